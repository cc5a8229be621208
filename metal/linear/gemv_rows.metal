// Instantiations of gemv_rows.h: <kernel>_<A>[_<output>]_m<most rows>, two weight rows a lane (four
// held 160 to 190 registers and left too few threadgroups at layer sizes).
#include "linear/gemv_rows.h"

#define INSTANTIATE_GEMV_ROWS(NAME, A, ONAME, O, R, MT)                                   \
  template [[host_name("gemv_rows_multi_" NAME "_" ONAME "_m" #MT)]] [[kernel]]           \
  decltype(gemv_rows_multi<A, O, R, MT>) gemv_rows_multi<A, O, R, MT>;

#define INSTANTIATE_ROWS(NAME, A, R, MT)                                                  \
  INSTANTIATE_GEMV_ROWS(NAME, A, NAME, A, R, MT)                                          \
  INSTANTIATE_GEMV_ROWS(NAME, A, "fp32", float, R, MT)                                    \
  template [[host_name("moe_gate_up_rows_" NAME "_m" #MT)]] [[kernel]]                    \
  decltype(moe_gate_up_rows<A, R, MT>) moe_gate_up_rows<A, R, MT>;                        \
  template [[host_name("moe_down_rows_" NAME "_m" #MT)]] [[kernel]]                       \
  decltype(moe_down_rows<A, R, MT>) moe_down_rows<A, R, MT>;

INSTANTIATE_ROWS("bf16", bfloat, 2, 4)
INSTANTIATE_ROWS("bf16", bfloat, 2, 8)
INSTANTIATE_ROWS("bf16", bfloat, 2, 16)
INSTANTIATE_ROWS("fp16", half, 2, 4)
INSTANTIATE_ROWS("fp16", half, 2, 8)
INSTANTIATE_ROWS("fp16", half, 2, 16)
