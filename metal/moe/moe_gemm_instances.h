// Instantiation of moe_gemm.h for one matrix unit; PREFIX is empty or names the unit.
#pragma once

#define INSTANTIATE_MOE_GEMM(PREFIX, NAME, A, BM, BLOCK, TILE)                                   \
  template [[host_name(PREFIX "moe_gate_up_" NAME "_m" #BM)]] [[kernel]]                  \
  decltype(moe_gate_up<A, BLOCK, TILE>) moe_gate_up<A, BLOCK, TILE>;                            \
  template [[host_name(PREFIX "moe_down_" NAME "_m" #BM)]] [[kernel]]                     \
  decltype(moe_down<A, BLOCK, TILE>) moe_down<A, BLOCK, TILE>;

#define INSTANTIATE_MOE_GEMM_ROWS(PREFIX, BM, BLOCK, TILE)                                       \
  INSTANTIATE_MOE_GEMM(PREFIX, "bf16", bfloat, BM, BLOCK, TILE)                                  \
  INSTANTIATE_MOE_GEMM(PREFIX, "fp16", half, BM, BLOCK, TILE)
