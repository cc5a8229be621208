// Instantiations of attention_decode.h on NVIDIA's tensor cores: mma_attention_decode_<A>.
#include "attention/attention_decode_mma.h"

template [[host_name("mma_attention_decode_bf16")]] [[kernel]]
decltype(lily::attention_decode<bfloat, lily::MmaAttend>)
    lily::attention_decode<bfloat, lily::MmaAttend>;
template [[host_name("mma_attention_decode_fp16")]] [[kernel]]
decltype(lily::attention_decode<half, lily::MmaAttend>)
    lily::attention_decode<half, lily::MmaAttend>;
