// Instantiations of embed.h.
#include "head/embed.h"

#define INSTANTIATE_EMBED(NAME, A)                                                        \
  template [[host_name("embed_rows_" NAME)]] [[kernel]] decltype(embed_rows<A>) embed_rows<A>;

INSTANTIATE_EMBED("bf16", bfloat)
INSTANTIATE_EMBED("fp16", half)
