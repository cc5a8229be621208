// Instantiations of qgemm.h on simdgroup_matrix: qgemm_multi_<A>_<output>_m<rows a block>.
#include "qgemm.h"
#include "qgemm_instances.h"
#include "tile_mma.h"

INSTANTIATE_QGEMM_ROWS("", 16, GemmBlock16, SimdgroupTile)
INSTANTIATE_QGEMM_ROWS("", 32, GemmBlock32, SimdgroupTile)
INSTANTIATE_QGEMM_ROWS("", 64, GemmBlock64, SimdgroupTile)
