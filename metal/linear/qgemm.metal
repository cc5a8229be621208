// Instantiations of qgemm.h on simdgroup_matrix: qgemm_multi_<A>_<output>_m<rows a block>.
#include "linear/qgemm.h"
#include "linear/qgemm_instances.h"
#include "linear/tile_simdgroup.h"

INSTANTIATE_QGEMM_ROWS("", 32, GemmBlock32, SimdgroupTile)
INSTANTIATE_QGEMM_ROWS("", 64, GemmBlock64, SimdgroupTile)
