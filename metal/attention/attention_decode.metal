#include "attention/attention_decode.h"

#define LILY_ATTENTION(suffix, A)                                                \
  template [[host_name("attention_prepare_" suffix)]] [[kernel]]                 \
  decltype(lily::attention_prepare<A>) lily::attention_prepare<A>;               \
  template [[host_name("attention_decode_" suffix)]] [[kernel]]                  \
  decltype(lily::attention_decode<A>) lily::attention_decode<A>;                 \
  template [[host_name("attention_decode_strided_" suffix)]] [[kernel]]          \
  decltype(lily::attention_decode_strided<A>) lily::attention_decode_strided<A>; \
  template [[host_name("attention_merge_" suffix)]] [[kernel]]                   \
  decltype(lily::attention_merge<A>) lily::attention_merge<A>;

LILY_ATTENTION("bf16", bfloat)
LILY_ATTENTION("fp16", half)
