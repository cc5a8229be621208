// Instantiations of moe_gemm.h on NVIDIA's tensor cores: mma_moe_{gate_up,down}_<A>_m<rows a block>.
#include "linear/gemm_mma.h"
#include "moe/moe_gemm.h"
#include "moe/moe_gemm_instances.h"

INSTANTIATE_MOE_GEMM_ROWS("mma_", 16, MmaBlock16, MmaTile)
INSTANTIATE_MOE_GEMM_ROWS("mma_", 32, MmaBlock32, MmaTile)
INSTANTIATE_MOE_GEMM_ROWS("mma_", 64, MmaBlock64, MmaTile)
