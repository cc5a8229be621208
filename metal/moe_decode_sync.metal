// Instantiations of moe_decode.h on NVIDIA's tensor cores: sync_moe_gate_up_<A>_k<KMAX>, sync_moe_down_row_<A>.
#include "moe_decode_sync.h"

#define LILY_SYNC_MOE(suffix, A)                                               \
  template [[host_name("sync_moe_gate_up_" suffix "_k2048")]] [[kernel]]       \
  decltype(lily::moe_gate_up<A, 2048, lily::SyncUp>)                           \
      lily::moe_gate_up<A, 2048, lily::SyncUp>;                                \
  template [[host_name("sync_moe_gate_up_" suffix "_k4096")]] [[kernel]]       \
  decltype(lily::moe_gate_up<A, 4096, lily::SyncUp>)                           \
      lily::moe_gate_up<A, 4096, lily::SyncUp>;                                \
  template [[host_name("sync_moe_down_" suffix)]] [[kernel]]                   \
  decltype(lily::moe_down<A, lily::SyncDown>) lily::moe_down<A, lily::SyncDown>;

LILY_SYNC_MOE("bf16", bfloat)
LILY_SYNC_MOE("f16", half)
