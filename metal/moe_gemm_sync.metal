// Instantiations of moe_gemm.h on NVIDIA's tensor cores: sync_moe_{gate_up,down}_<A>_m<rows a block>.
#include "moe_gemm.h"
#include "moe_gemm_instances.h"
#include "tile_mma_sync.h"

INSTANTIATE_MOE_GEMM_ROWS("sync_", 64, SyncBlock64, SyncTile)
INSTANTIATE_MOE_GEMM_ROWS("sync_", 128, SyncBlock128, SyncTile)
