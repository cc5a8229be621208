// Instantiations of qgemm.h on NVIDIA's tensor cores: sync_qgemm_<A>_<output>_m<rows a block>.
#include "qgemm.h"
#include "qgemm_instances.h"
#include "tile_mma_sync.h"

INSTANTIATE_QGEMM_ROWS("sync_", 64, SyncBlock64, SyncTile)
INSTANTIATE_QGEMM_ROWS("sync_", 128, SyncBlock128, SyncTile)
