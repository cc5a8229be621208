// Instantiations of qgemm.h on simdgroup_matrix: qgemm_<A>_<output>_m<rows a block>.
#include "qgemm.h"
#include "qgemm_instances.h"
#include "tile_mma.h"

INSTANTIATE_QGEMM_ROWS("", 16, GemmBlock16, SimdgroupTile)
INSTANTIATE_QGEMM_ROWS("", 32, GemmBlock32, SimdgroupTile)
INSTANTIATE_QGEMM_ROWS("", 64, GemmBlock64, SimdgroupTile)

#define INSTANTIATE_DEQUANTIZE(NAME, A)                                                   \
  template [[host_name("dequantize_rows_" NAME)]] [[kernel]] decltype(dequantize_rows<A>) \
      dequantize_rows<A>;

INSTANTIATE_DEQUANTIZE("bf16", bfloat)
INSTANTIATE_DEQUANTIZE("fp16", half)
