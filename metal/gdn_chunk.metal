// Instantiations of gdn_chunk.h.
#include "gdn_chunk.h"

#define INSTANTIATE_GDN_CHUNK(NAME, A)                                                    \
  template [[host_name("gdn_chunk_prepare_" NAME)]] [[kernel]]                            \
  decltype(gdn_chunk_prepare<A>) gdn_chunk_prepare<A>;                                    \
  template [[host_name("gdn_chunk_scan_" NAME)]] [[kernel]] decltype(gdn_chunk_scan<A>)   \
      gdn_chunk_scan<A>;

INSTANTIATE_GDN_CHUNK("bf16", bfloat)
INSTANTIATE_GDN_CHUNK("fp16", half)
