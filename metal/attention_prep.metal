// Instantiations of attention_prep.h; _dD_rRD: head_dim D, rotary dims RD.
#include "attention_prep.h"

#define INSTANTIATE_PREP(NAME, A, D, RD)                                                  \
  template [[host_name("attention_prep_" NAME "_d" #D "_r" #RD)]] [[kernel]]              \
  decltype(attention_prep<A, D, RD>) attention_prep<A, D, RD>;

#define INSTANTIATE_ATTENTION(NAME, A)                                                    \
  INSTANTIATE_PREP(NAME, A, 256, 64)                                                      \
  INSTANTIATE_PREP(NAME, A, 128, 128)                                                     \
  template [[host_name("attention_gate_" NAME)]] [[kernel]] decltype(attention_gate<A>)   \
      attention_gate<A>;

INSTANTIATE_ATTENTION("bf16", bfloat)
INSTANTIATE_ATTENTION("fp16", half)
