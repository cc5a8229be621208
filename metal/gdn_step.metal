#include "gdn_step.h"

#define LILY_GDN(suffix, A)                                   \
  template [[host_name("gdn_step_" suffix)]] [[kernel]]       \
  decltype(lily::gdn_step<A>) lily::gdn_step<A>;              \
  template [[host_name("gdn_conv_step_" suffix)]] [[kernel]]  \
  decltype(lily::gdn_conv_step<A>) lily::gdn_conv_step<A>;    \
  template [[host_name("gdn_delta_step_" suffix)]] [[kernel]] \
  decltype(lily::gdn_delta_step<A>) lily::gdn_delta_step<A>;  \
  template [[host_name("gdn_gated_norm_" suffix)]] [[kernel]] \
  decltype(lily::gdn_gated_norm<A>) lily::gdn_gated_norm<A>;

LILY_GDN("bf16", bfloat)
LILY_GDN("f16", half)
