// Instantiations of qgemm.h on Metal 4 tensor operations: nax_qgemm_multi_<A>_<output>_m<rows a block>.
#include "linear/qgemm.h"
#include "linear/qgemm_instances.h"
#include "linear/tile_nax.h"

INSTANTIATE_QGEMM_ROWS("nax_", 32, GemmBlock32, TensorTile)
INSTANTIATE_QGEMM_ROWS("nax_", 64, GemmBlock64, TensorTile)
