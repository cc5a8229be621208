// placeholder until the kernels' own header is merged
#pragma once
namespace lily {
struct GemvRowsMultiParams { int rows, depth, lanes, n[4]; };
struct QgemmMultiParams { int rows, depth, n[4]; };
struct RouteParams { int tokens, experts, top_k, renormalise, block_rows, max_blocks; };
struct MoeRowsParams { int hidden, width, top_k, lanes; };
struct MoeGateUpParams { int rows, width, hidden, top_k, grouped; };
struct MoeDownParams { int hidden, width; };
struct CombineParams { int hidden, top_k, has_shared, has_residual; };
struct ConvParams { int tokens, key_heads, value_heads, has_mask, has_lengths; };
struct GdnParams { int tokens, key_heads, value_heads; float eps; };
struct AttentionPrepParams { int tokens, q_heads, kv_heads, capacity, first_row, offset_stride; float eps; };
struct EmbedParams { int vocabulary, columns; };
}
