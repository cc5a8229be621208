// Instantiations of moe_gemm.h on Metal 4 tensor operations: nax_moe_{gate_up,down}_<A>_m<rows a
// block>.
#include "moe/moe_gemm.h"
#include "moe/moe_gemm_instances.h"
#include "linear/tile_nax.h"

INSTANTIATE_MOE_GEMM_ROWS("nax_", 32, GemmBlock32, TensorTile)
INSTANTIATE_MOE_GEMM_ROWS("nax_", 64, GemmBlock64, TensorTile)
