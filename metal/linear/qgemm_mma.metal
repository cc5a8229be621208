// Instantiations of qgemm.h on NVIDIA's tensor cores: mma_qgemm_multi_<A>_<output>_m<rows a block>.
#include "linear/gemm_mma.h"
#include "linear/qgemm.h"
#include "linear/qgemm_instances.h"

INSTANTIATE_QGEMM_ROWS("mma_", 16, SyncBlock16, SyncTile)
INSTANTIATE_QGEMM_ROWS("mma_", 32, SyncBlock32, SyncTile)
INSTANTIATE_QGEMM_ROWS("mma_", 64, SyncBlock64, SyncTile)
