// Instantiations of gated_delta_scan.h: <kernel>_<A>_r<rows of the state a lane>.
#include "gated_delta/gated_delta_scan.h"

#define INSTANTIATE_SCAN(KERNEL, NAME, A, R)                                              \
  template [[host_name(#KERNEL "_" NAME "_r" #R)]] [[kernel]] decltype(KERNEL<A, R>)      \
      KERNEL<A, R>;

#define INSTANTIATE_GATED_DELTA(NAME, A)                                                          \
  INSTANTIATE_SCAN(gated_delta_scan, NAME, A, 2)                                                  \
  INSTANTIATE_SCAN(gated_delta_scan_block, NAME, A, 2)                                            \
  INSTANTIATE_SCAN(gated_delta_scan_norm, NAME, A, 2)                                             \
  template [[host_name("gated_norm_" NAME)]] [[kernel]] decltype(gated_norm<A>)           \
      gated_norm<A>;

INSTANTIATE_GATED_DELTA("bf16", bfloat)
INSTANTIATE_GATED_DELTA("fp16", half)
