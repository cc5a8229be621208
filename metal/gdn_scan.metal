// Instantiations of gdn_scan.h: <kernel>_<A>_r<rows of the state a lane>.
#include "gdn_scan.h"

#define INSTANTIATE_SCAN(KERNEL, NAME, A, R)                                              \
  template [[host_name(#KERNEL "_" NAME "_r" #R)]] [[kernel]] decltype(KERNEL<A, R>)      \
      KERNEL<A, R>;

#define INSTANTIATE_GDN(NAME, A)                                                          \
  INSTANTIATE_SCAN(gdn_scan, NAME, A, 2)                                                  \
  INSTANTIATE_SCAN(gdn_scan_block, NAME, A, 2)                                            \
  INSTANTIATE_SCAN(gdn_scan_norm, NAME, A, 2)                                             \
  template [[host_name("gated_norm_" NAME)]] [[kernel]] decltype(gated_norm<A>)           \
      gated_norm<A>;

INSTANTIATE_GDN("bf16", bfloat)
INSTANTIATE_GDN("fp16", half)
