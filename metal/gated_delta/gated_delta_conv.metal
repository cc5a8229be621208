// Instantiations of gated_delta_conv.h.
#include "gated_delta/gated_delta_conv.h"

#define INSTANTIATE_CONV_PREFILL(NAME, A)                                                 \
  template [[host_name("gated_delta_conv_rows_" NAME)]] [[kernel]] decltype(gated_delta_conv_rows<A>)       \
      gated_delta_conv_rows<A>;

INSTANTIATE_CONV_PREFILL("bf16", bfloat)
INSTANTIATE_CONV_PREFILL("fp16", half)
