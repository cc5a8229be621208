// Instantiations of gdn_scan.h; _rN holds N rows of the state a lane.
#include "gdn_scan.h"

#define INSTANTIATE_GDN_SCAN(KERNEL, NAME, A, R)                                            \
  template [[host_name(#KERNEL "_" NAME "_r" #R)]] [[kernel]] void KERNEL<A, R>(            \
      const device A*, const device A*, const device A*, const device float*,               \
      const device float*, const device float*, device float*, device float*,               \
      constant GdnParams&, uint3, uint, uint);

#define INSTANTIATE_GDN_BLOCK(NAME, A, R)                                                   \
  template [[host_name("gdn_scan_block_" NAME "_r" #R)]] [[kernel]] void                    \
  gdn_scan_block<A, R>(                                                                     \
      const device A*, const device A*, const device A*, const device float*,               \
      const device float*, const device float*, device float*, device float*,               \
      constant GdnParams&, uint3, uint, uint, uint);

#define INSTANTIATE_GDN_NORM(NAME, A, R)                                                    \
  template [[host_name("gdn_scan_norm_" NAME "_r" #R)]] [[kernel]] void gdn_scan_norm<A, R>( \
      const device A*, const device A*, const device A*, const device float*,               \
      const device float*, const device float*, device float*, const device A*,             \
      const device A*, device A*, constant GdnParams&, uint3, uint, uint);

#define INSTANTIATE_GDN(NAME, A)                                                            \
  INSTANTIATE_GDN_SCAN(gdn_scan, NAME, A, 1)                                                \
  INSTANTIATE_GDN_SCAN(gdn_scan, NAME, A, 2)                                                \
  INSTANTIATE_GDN_BLOCK(NAME, A, 2)                                                         \
  INSTANTIATE_GDN_NORM(NAME, A, 2)                                                          \
  INSTANTIATE_GDN_NORM(NAME, A, 4)                                                          \
  template [[host_name("gated_norm_" NAME)]] [[kernel]] void gated_norm<A>(                 \
      const device float*, const device A*, const device A*, device A*, constant int&,      \
      constant float&, uint3, uint, uint);

INSTANTIATE_GDN("bf16", bfloat)
INSTANTIATE_GDN("fp16", half)
