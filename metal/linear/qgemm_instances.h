// Instantiation of qgemm.h for one matrix unit; PREFIX is empty or names the unit.
#pragma once

#define INSTANTIATE_QGEMM(PREFIX, NAME, A, ONAME, O, BM, BLOCK, TILE)                            \
  template [[host_name(PREFIX "qgemm_multi_" NAME "_" ONAME "_m" #BM)]] [[kernel]]        \
  decltype(qgemm_multi<A, O, BLOCK, TILE>) qgemm_multi<A, O, BLOCK, TILE>;

#define INSTANTIATE_QGEMM_ROWS(PREFIX, BM, BLOCK, TILE)                                          \
  INSTANTIATE_QGEMM(PREFIX, "bf16", bfloat, "bf16", bfloat, BM, BLOCK, TILE)                     \
  INSTANTIATE_QGEMM(PREFIX, "bf16", bfloat, "fp32", float, BM, BLOCK, TILE)                      \
  INSTANTIATE_QGEMM(PREFIX, "fp16", half, "fp16", half, BM, BLOCK, TILE)                         \
  INSTANTIATE_QGEMM(PREFIX, "fp16", half, "fp32", float, BM, BLOCK, TILE)
