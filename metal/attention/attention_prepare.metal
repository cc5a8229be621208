// Instantiations of attention_prepare.h; _dD_rRD: head_dim D, rotary dims RD.
#include "attention/attention_prepare.h"

#define INSTANTIATE_PREP(NAME, A, D, RD)                                                  \
  template [[host_name("attention_prepare_rows_" NAME "_d" #D "_r" #RD)]] [[kernel]]              \
  decltype(attention_prepare<A, D, RD>) attention_prepare<A, D, RD>;

INSTANTIATE_PREP("bf16", bfloat, 256, 64)
INSTANTIATE_PREP("fp16", half, 256, 64)
