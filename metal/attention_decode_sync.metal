// Instantiations of attention_decode.h on NVIDIA's tensor cores: sync_attention_decode_<A>.
#include "attention_decode_sync.h"

template [[host_name("sync_attention_decode_bf16")]] [[kernel]]
decltype(lily::attention_decode<bfloat, lily::SyncAttend>)
    lily::attention_decode<bfloat, lily::SyncAttend>;
template [[host_name("sync_attention_decode_f16")]] [[kernel]]
decltype(lily::attention_decode<half, lily::SyncAttend>)
    lily::attention_decode<half, lily::SyncAttend>;
