// The parameters that kernels take by value, one struct a kernel family: kernels and the C++ that
// dispatches them include this file. Members are int32 and float32 alone, so that both sides lay
// them out alike. A flag is 0 or 1. With them, what both sides count in.
#pragma once

namespace lily {

// The codes of a unit, which a lane of a product of one row loads at once (quant.h): as many as fit
// 16 bytes, but codes that cross words end with three of them. Values that are no codes have 16 bits.
constexpr int unit_codes(int bits) {
  return bits == 6 ? 16 : 128 / bits;
}

// gemv_rows_multi (gemv_rows.h)
struct GemvRowsMultiParams {
  int rows;   // of x
  int depth;  // values in a row of x and of a matrix
  int lanes;  // that share a weight row: a power of two, at most 32 and at most depth / 16
  int n[4];   // rows of each matrix, 0 for none
};

// qgemm_multi (qgemm.h)
struct QgemmMultiParams {
  int rows;   // of x
  int depth;  // values in a row of x and of a matrix
  int n[4];   // rows of each matrix, 0 for none
};

// route_topk, route_scan, route_scatter, route_small (routing.h)
struct RouteParams {
  int tokens;       // rows of logits
  int experts;      // logits in a row
  int top_k;        // experts that a token chooses
  int renormalise;  // flag: a token's weights are divided by their sum
  int block_rows;   // assignments that an entry of the block map covers at most
  int max_blocks;   // entries of the block map; those past the last block are kNoBlock
};

// moe_gate_up_rows, moe_down_rows (gemv_rows.h)
struct MoeRowsParams {
  int hidden;  // values in a row of x and of down
  int width;   // values in a row of act
  int top_k;   // assignments of a token
  int lanes;   // that share a weight row: a power of two, at most 32 and at most its length / 16
};

// moe_gate_up (moe_gemm.h)
struct MoeGateUpParams {
  int rows;     // assignments, or tokens when not grouped
  int width;    // values in a row of act
  int hidden;   // values in a row of x
  int top_k;    // assignments of a token
  int grouped;  // flag: rows are sorted by expert; 0: one expert, row s is token s
};

// moe_down (moe_gemm.h)
struct MoeDownParams {
  int hidden;  // values in a row of down
  int width;   // values in a row of act
};

// moe_combine (row_ops.h)
struct CombineParams {
  int hidden;        // values in a row
  int top_k;         // rows of down that a token sums
  int has_shared;    // flag: adds sigmoid(shared_gate) * shared_down
  int has_residual;  // flag: adds the row of h
};

// gated_delta_conv_rows (gated_delta_conv.h)
struct ConvParams {
  int tokens;       // rows of a batch row
  int key_heads;    // heads of q, and of k
  int value_heads;  // heads of v
  int has_mask;     // flag: mask says which positions are tokens
  int has_lengths;  // flag: lengths says where the new conv state ends; 0: at the last token
};

// gated_delta_scan, gated_delta_scan_norm, gated_delta_scan_block (gated_delta_scan.h)
struct GatedDeltaParams {
  int tokens;       // rows of a batch row
  int key_heads;    // heads of q, and of k
  int value_heads;  // heads of v, a multiple of key_heads
  float eps;        // of the gated norm, added to the mean of squares
};

// attention_prepare (attention_prepare.h)
struct AttentionPrepParams {
  int tokens;         // rows of a batch row
  int q_heads;        // query heads
  int kv_heads;       // key heads, and value heads
  int capacity;       // rows of a head in the cache
  int first_row;      // of the cache, for the first token
  int offset_stride;  // 0: offset[0] serves every batch row, 1: offset[batch row]
  float eps;          // of the q and k norms, added to the mean of squares
};

// embed_rows (embed.h)
struct EmbedParams {
  int vocabulary;  // rows of the table
  int columns;     // values in a row
};

}  // namespace lily
