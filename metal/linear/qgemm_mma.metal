// Instantiations of qgemm.h on NVIDIA's tensor cores: mma_qgemm_multi_<A>_<output>_m<rows a block>.
#include "linear/gemm_mma.h"
#include "linear/qgemm.h"
#include "linear/qgemm_instances.h"

INSTANTIATE_QGEMM_ROWS("mma_", 16, MmaBlock16, MmaTile)
INSTANTIATE_QGEMM_ROWS("mma_", 32, MmaBlock32, MmaTile)
INSTANTIATE_QGEMM_ROWS("mma_", 64, MmaBlock64, MmaTile)
