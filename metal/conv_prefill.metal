// Instantiations of conv_prefill.h.
#include "conv_prefill.h"

#define INSTANTIATE_CONV_PREFILL(NAME, A)                                                 \
  template [[host_name("conv_prefill_" NAME)]] [[kernel]] decltype(conv_prefill<A>)       \
      conv_prefill<A>;

INSTANTIATE_CONV_PREFILL("bf16", bfloat)
INSTANTIATE_CONV_PREFILL("fp16", half)
