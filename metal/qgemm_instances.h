// Instantiation of qgemm.h for one matrix unit; PREFIX is empty or names the unit.
#pragma once

#define INSTANTIATE_QGEMM(PREFIX, NAME, A, ONAME, O, BM, TILE)                            \
  template [[host_name(PREFIX "qgemm_" NAME "_" ONAME "_m" #BM)]] [[kernel]]              \
  decltype(qgemm<A, O, BM, TILE>) qgemm<A, O, BM, TILE>;                                  \
  template [[host_name(PREFIX "qgemm_multi_" NAME "_" ONAME "_m" #BM)]] [[kernel]]        \
  decltype(qgemm_multi<A, O, BM, TILE>) qgemm_multi<A, O, BM, TILE>;

#define INSTANTIATE_QGEMM_ROWS(PREFIX, BM, TILE)                                          \
  INSTANTIATE_QGEMM(PREFIX, "bf16", bfloat, "bf16", bfloat, BM, TILE)                     \
  INSTANTIATE_QGEMM(PREFIX, "bf16", bfloat, "fp32", float, BM, TILE)                      \
  INSTANTIATE_QGEMM(PREFIX, "fp16", half, "fp16", half, BM, TILE)                         \
  INSTANTIATE_QGEMM(PREFIX, "fp16", half, "fp32", float, BM, TILE)
