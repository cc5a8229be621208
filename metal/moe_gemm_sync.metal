// Instantiations of moe_gemm.h on NVIDIA's tensor cores: sync_moe_{gate_up,down}_<A>_m<rows a block>.
#include "gemm_sync.h"
#include "moe_gemm.h"
#include "moe_gemm_instances.h"

INSTANTIATE_MOE_GEMM_ROWS("sync_", 16, SyncBlock16, SyncTile)
INSTANTIATE_MOE_GEMM_ROWS("sync_", 32, SyncBlock32, SyncTile)
INSTANTIATE_MOE_GEMM_ROWS("sync_", 64, SyncBlock64, SyncTile)
