#include "gated_delta/gated_delta_step.h"

#define LILY_GATED_DELTA(suffix, A)                                   \
  template [[host_name("gated_delta_step_" suffix)]] [[kernel]]       \
  decltype(lily::gated_delta_step<A>) lily::gated_delta_step<A>;              \
  template [[host_name("gated_delta_conv_step_" suffix)]] [[kernel]]  \
  decltype(lily::gated_delta_conv_step<A>) lily::gated_delta_conv_step<A>;    \
  template [[host_name("gated_delta_delta_step_" suffix)]] [[kernel]] \
  decltype(lily::gated_delta_delta_step<A>) lily::gated_delta_delta_step<A>;  \
  template [[host_name("gated_delta_gated_norm_" suffix)]] [[kernel]] \
  decltype(lily::gated_delta_gated_norm<A>) lily::gated_delta_gated_norm<A>;

LILY_GATED_DELTA("bf16", bfloat)
LILY_GATED_DELTA("fp16", half)
