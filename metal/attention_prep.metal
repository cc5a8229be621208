// Instantiations of attention_prep.h; _dD_rRD: head_dim D, rotary dims RD.
#include "attention_prep.h"

#define INSTANTIATE_ATTENTION_PREP(NAME, A, D, RD)                                          \
  template [[host_name("attention_prep_" NAME "_d" #D "_r" #RD)]] [[kernel]] void           \
  attention_prep<A, D, RD>(                                                                 \
      const device A*, const device A*, const device A*, const device A*, const device A*,  \
      const device float*, const device int*, device A*, device A*, device A*,              \
      constant AttentionPrepParams&, uint3, uint, uint);

#define INSTANTIATE_ATTENTION(NAME, A)                                                      \
  INSTANTIATE_ATTENTION_PREP(NAME, A, 256, 64)                                              \
  INSTANTIATE_ATTENTION_PREP(NAME, A, 128, 128)                                             \
  template [[host_name("attention_gate_" NAME)]] [[kernel]] void attention_gate<A>(         \
      const device A*, const device A*, device A*, constant AttentionGateParams&, uint3,    \
      uint);

INSTANTIATE_ATTENTION("bf16", bfloat)
INSTANTIATE_ATTENTION("fp16", half)
