#include "moe/moe_decode.h"
#include "moe/moe_route.h"

#define LILY_MOE(suffix, A)                                         \
  template [[host_name("moe_gate_up_" suffix "_k2048")]] [[kernel]] \
  decltype(lily::moe_gate_up<A, 2048>) lily::moe_gate_up<A, 2048>;  \
  template [[host_name("moe_gate_up_" suffix "_k4096")]] [[kernel]] \
  decltype(lily::moe_gate_up<A, 4096>) lily::moe_gate_up<A, 4096>;  \
  template [[host_name("moe_down_" suffix)]] [[kernel]]             \
  decltype(lily::moe_down<A>) lily::moe_down<A>;

LILY_MOE("bf16", bfloat)
LILY_MOE("fp16", half)
