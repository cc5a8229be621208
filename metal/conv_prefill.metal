// Instantiations of conv_prefill.h.
#include "conv_prefill.h"

#define INSTANTIATE_CONV_PREFILL(NAME, A)                                                   \
  template [[host_name("conv_prefill_" NAME)]] [[kernel]] void conv_prefill<A>(             \
      const device A*, const device A*, const device A*, const device A*, const device A*,  \
      const device float*, const device A*, const device uchar*, const device int*,         \
      device A*, device A*, device A*, device float*, device float*, device A*,             \
      constant ConvParams&, uint3, uint3, uint, uint, uint);

INSTANTIATE_CONV_PREFILL("bf16", bfloat)
INSTANTIATE_CONV_PREFILL("fp16", half)
