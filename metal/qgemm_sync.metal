// Instantiations of qgemm.h on NVIDIA's tensor cores: sync_qgemm_multi_<A>_<output>_m<rows a block>.
#include "gemm_sync.h"
#include "qgemm.h"
#include "qgemm_instances.h"

INSTANTIATE_QGEMM_ROWS("sync_", 16, SyncBlock16, SyncTile)
INSTANTIATE_QGEMM_ROWS("sync_", 32, SyncBlock32, SyncTile)
INSTANTIATE_QGEMM_ROWS("sync_", 64, SyncBlock64, SyncTile)
