// Moves caches when they grow or are shared: row r of dst is row r of src, then zeros.
//
// A thread moves 16 bytes; threadgroups of 256 threads along a row, one row of the grid a row of dst.
// Bytes: src read once, dst written once.
#include <metal_stdlib>
using namespace metal;

[[kernel]] void copy_rows(
    const device uint4* src [[buffer(0)]],
    device uint4* dst [[buffer(1)]],
    constant uint& src_units [[buffer(2)]],  // of 16 bytes, in a row
    constant uint& dst_units [[buffer(3)]],
    uint3 group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]]) {
  const uint i = group.x * 256u + tid;
  if (i >= dst_units) {
    return;
  }
  uint4 value = uint4(0u);
  if (i < src_units) {
    value = src[ulong(group.y) * src_units + i];
  }
  dst[ulong(group.y) * dst_units + i] = value;
}
