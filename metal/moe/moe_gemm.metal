// Instantiations of moe_gemm.h on simdgroup_matrix: moe_{gate_up,down}_<A>_m<rows a block>.
#include "moe/moe_gemm.h"
#include "moe/moe_gemm_instances.h"
#include "linear/tile_simdgroup.h"

INSTANTIATE_MOE_GEMM_ROWS("", 16, GemmBlock16, SimdgroupTile)
INSTANTIATE_MOE_GEMM_ROWS("", 32, GemmBlock32, SimdgroupTile)
INSTANTIATE_MOE_GEMM_ROWS("", 64, GemmBlock64, SimdgroupTile)
