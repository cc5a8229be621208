// The part that the quantized GEMMs share: a threadgroup's product of a block of rows of x with a block
// of weight rows.
//
// What it computes. sums[r, n] = sum over k of x[r, k] * w[n, k], fp32, where w = scale * code +
// bias is rounded to A on its way into threadgroup memory. Rows and weight rows are named by
// pointers of the loading threads, so that gathered rows, experts, and two matrices side by side
// cost nothing here. A sum does not depend on the block that it is computed in.
//
// Layout of threads: GemmBlock. On Macs 128 threads and 64 weight rows; 16 rows: 1 x 4 simdgroups of 16 x
// 16, 32 rows: 2 x 2 of 16 x 32, 64 rows: 2 x 2 of 32 x 32. A step covers 32 of k: a thread brings 16 (or
// 32) codes of one weight row and a run of one row of x. The next step's bytes are loaded to registers
// before this step's product.
//
// Threadgroup memory: 80 (rows + weight rows) bytes for the operands; the same space then holds the fp32
// result, 272 bytes a row. gemm_mma.h does all this its own way. Bytes: a threadgroup reads rows K values and
// columns K codes with their scales; flops 2 rows columns K.
//
// Function constants: 0 = bits of a code (16: weights of type A without scales), 1 =
// group size (32, 64 or 128). K is a multiple of 32 and of the group; buffers are 16-byte aligned.
#pragma once

#include "rows_common.h"
#include "quant.h"

constant int kBits [[function_constant(0)]];
constant int kGroup [[function_constant(1)]];

namespace lily {

constant constexpr int kGemmStep = 32;
constant constexpr int kGemmStride = kGemmStep + 8;  // of the operands in threadgroup memory

// ROWS of x by COLUMNS weight rows, over ROW_GROUPS x COLUMN_GROUPS simdgroups.
template <int ROWS, int COLUMNS, int ROW_GROUPS, int COLUMN_GROUPS>
struct GemmBlock {
  constexpr static constant int kRows = ROWS;
  constexpr static constant int kColumns = COLUMNS;
  constexpr static constant int kColumnGroups = COLUMN_GROUPS;
  constexpr static constant int kThreads = 32 * ROW_GROUPS * COLUMN_GROUPS;
  constexpr static constant int kTileRows = ROWS / 8 / ROW_GROUPS;  // of a simdgroup, by 8
  constexpr static constant int kTileColumns = COLUMNS / 8 / COLUMN_GROUPS;
  constexpr static constant int kRun = ROWS * kGemmStep / kThreads;       // values of x a thread
  constexpr static constant int kCodes = COLUMNS * kGemmStep / kThreads;  // codes a thread
  constexpr static constant int kOutStride = COLUMNS + 4;                 // of a staged result
  static_assert((kRun == 4 || kRun % 8 == 0) && kCodes % 16 == 0, "a thread brings whole words");
};

typedef GemmBlock<16, 64, 1, 4> GemmBlock16;
typedef GemmBlock<32, 64, 2, 2> GemmBlock32;
typedef GemmBlock<64, 64, 2, 2> GemmBlock64;

// A run of codes to values of A in threadgroup memory.
template <typename A, int CODES>
METAL_FUNC void dequantize(
    thread const CodeRun<CODES>& run, A scale, A bias, threadgroup A* out) {
  if (kBits > 8) {
    for (int i = 0; i < CODES / 8; ++i) {
      *(threadgroup uint4*)(out + 8 * i) = run.words[i];
    }
    return;
  }
  for (int i = 0; i < CODES / 4; ++i) {
    vec<A, 4> v;
    for (int c = 0; c < 4; ++c) {
      v[c] = A(fma(float(code_at(run, 4 * i + c, kBits)), float(scale), float(bias)));
    }
    *(threadgroup vec<A, 4>*)(out + 4 * i) = v;
  }
}

// The scale or bias that serves code `k` of a row.
template <typename A>
METAL_FUNC A group_value(const device A* values, int k, int group) {
  return values[k / group];
}

METAL_FUNC size_t groups_before(size_t row, int depth, int group) {
  return row * size_t(depth / group);
}

// A matrix of affine codes, or of A itself (bits 16).
template <typename A>
struct QuantizedRows {
  const device uint* codes;
  const device A* scales;
  const device A* biases;
};

// What one thread brings: a run of one row of x and a part of a step of one weight row.
template <typename A, typename Block>
struct StagedLoader {
  constexpr static constant int kRun = Block::kRun;
  constexpr static constant int kCodes = Block::kCodes;
  const device A* x;
  const device uchar* w;
  const device A* scales;
  const device A* biases;
  bool has_x;
  bool has_w;
  int first_code;  // of the step
  uint4 x_next[(kRun + 7) / 8];
  CodeRun<kCodes> codes;
  A scale;
  A bias;

  // The row of x that thread tid brings.
  static METAL_FUNC int x_row(uint tid) {
    return int(tid) / (kGemmStep / kRun);
  }

  // The weight row that thread tid brings.
  static METAL_FUNC int w_row(uint tid) {
    return int(tid) / (kGemmStep / kCodes);
  }

  METAL_FUNC void set_x(const device A* row, bool valid, uint tid) {
    x = row + int(tid) % (kGemmStep / kRun) * kRun;
    has_x = valid;
    for (int i = 0; i < (kRun + 7) / 8; ++i) {
      x_next[i] = uint4(0);
    }
  }

  // The block's columns are `rows` of a matrix of depth K from its row `first` on, or fewer.
  METAL_FUNC void set_matrix(QuantizedRows<A> matrix, size_t first, int rows, int depth, uint tid) {
    set_row(matrix, first, w_row(tid), rows, depth, tid);
  }

  // Half the columns are rows of one matrix, the other half the same rows of another.
  METAL_FUNC void set_pair(
      QuantizedRows<A> one, QuantizedRows<A> two, size_t first, int rows, int depth, uint tid) {
    constexpr int kHalf = Block::kColumns / 2;
    set_row(w_row(tid) < kHalf ? one : two, first, w_row(tid) % kHalf, rows, depth, tid);
  }

  METAL_FUNC void set_row(
      QuantizedRows<A> matrix, size_t first, int row, int rows, int depth, uint tid) {
    first_code = int(tid) % (kGemmStep / kCodes) * kCodes;
    w = (const device uchar*)matrix.codes + (first + row) * size_t(depth * kBits / 8);
    scales = matrix.scales + groups_before(first + row, depth, kGroup);
    biases = matrix.biases + groups_before(first + row, depth, kGroup);
    has_w = row < rows;
    for (int i = 0; i < kCodes / 8; ++i) {
      codes.words[i] = uint4(0);
    }
    scale = A(0.0f);
    bias = A(0.0f);
  }

  METAL_FUNC void fetch(int k) {
    if (has_x) {
      if (kRun == 4) {
        const uint2 few = *(const device uint2*)(x + k);
        x_next[0][0] = few[0];
        x_next[0][1] = few[1];
      } else {
        for (int i = 0; i < kRun / 8; ++i) {
          x_next[i] = *(const device uint4*)(x + k + 8 * i);
        }
      }
    }
    if (has_w) {
      const int at = k + first_code;
      load_codes(w + at * kBits / 8, kBits, codes);
      if (kBits <= 8) {
        scale = group_value(scales, at, kGroup);
        bias = group_value(biases, at, kGroup);
      }
    }
  }

  METAL_FUNC void put(threadgroup A* xs, threadgroup A* ws, uint tid) {
    threadgroup A* x_out = xs + x_row(tid) * kGemmStride + int(tid) % (kGemmStep / kRun) * kRun;
    if (kRun == 4) {
      *(threadgroup uint2*)x_out = uint2(x_next[0][0], x_next[0][1]);
    } else {
      for (int i = 0; i < kRun / 8; ++i) {
        *(threadgroup uint4*)(x_out + 8 * i) = x_next[i];
      }
    }
    dequantize<A>(codes, scale, bias, ws + w_row(tid) * kGemmStride + first_code);
  }
};

// What a threadgroup is made of, by its kind of tile; this is for those whose lanes hold nobody knows what.
template <typename A, typename Block, template <typename, int, int> class Tile>
struct GemmShape {
  typedef Tile<A, Block::kTileRows, Block::kTileColumns> TileType;
  typedef StagedLoader<A, Block> Loader;
  constexpr static constant int kOperandBytes =
      2 * kGemmStride * (Block::kRows + Block::kColumns);
  constexpr static constant int kResultBytes = 4 * Block::kOutStride * Block::kRows;
  constexpr static constant int kWords =  // of 16 bytes
      (kOperandBytes > kResultBytes ? kOperandBytes : kResultBytes) / 16;
};

// Leaves the fp32 sums of the simdgroup's part in `tile`; only the block's first `rows` rows are wanted.
template <typename A, typename Block, typename TileType>
METAL_FUNC void gemm_sums(
    thread StagedLoader<A, Block>& loader,
    thread TileType& tile,
    int depth,
    int,
    threadgroup float4* shared,
    uint tid,
    uint sg) {
  threadgroup A* xs = (threadgroup A*)shared;
  threadgroup A* ws = xs + Block::kRows * kGemmStride;
  const int row = int(sg) / Block::kColumnGroups * Block::kTileRows * 8;
  const int column = int(sg) % Block::kColumnGroups * Block::kTileColumns * 8;
  tile.start(tid % 32);
  loader.fetch(0);
  for (int k = 0; k < depth; k += kGemmStep) {
    loader.put(xs, ws, tid);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (k + kGemmStep < depth) {
      loader.fetch(k + kGemmStep);
    }
    tile.template multiply_nt<kGemmStep>(
        xs + row * kGemmStride, kGemmStride, ws + column * kGemmStride, kGemmStride);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// The block's results in threadgroup memory, row stride Block::kOutStride, visible to all threads.
template <typename Block, typename TileType>
METAL_FUNC const threadgroup float* gemm_staged(
    thread TileType& tile, threadgroup float4* shared, uint sg) {
  threadgroup float* result = (threadgroup float*)shared;
  const int row = int(sg) / Block::kColumnGroups * Block::kTileRows * 8;
  const int column = int(sg) % Block::kColumnGroups * Block::kTileColumns * 8;
  tile.store(result + row * Block::kOutStride + column, Block::kOutStride);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return result;
}

// Hands the block's results to store.put(row, column, values), four neighbouring columns at a time.
template <typename Block, typename TileType, typename Store>
METAL_FUNC void gemm_results(
    thread TileType& tile,
    thread const Store& store,
    threadgroup float4* shared,
    uint tid,
    uint sg) {
  const threadgroup float* result = gemm_staged<Block>(tile, shared, sg);
  for (int i = int(tid); i < Block::kRows * Block::kColumns / 4; i += Block::kThreads) {
    const int r = i / (Block::kColumns / 4);
    const int c = i % (Block::kColumns / 4) * 4;
    store.put(r, c, *(const threadgroup float4*)(result + r * Block::kOutStride + c));
  }
}

// The same for two matrices side by side: store.put(row, column, first's values, second's).
template <typename Block, typename TileType, typename Store>
METAL_FUNC void gemm_pair_results(
    thread TileType& tile,
    thread const Store& store,
    threadgroup float4* shared,
    uint tid,
    uint sg) {
  constexpr int kHalf = Block::kColumns / 2;
  const threadgroup float* result = gemm_staged<Block>(tile, shared, sg);
  for (int i = int(tid); i < Block::kRows * kHalf / 4; i += Block::kThreads) {
    const int r = i / (kHalf / 4);
    const int c = i % (kHalf / 4) * 4;
    const threadgroup float* at = result + r * Block::kOutStride + c;
    store.put(r, c, *(const threadgroup float4*)at, *(const threadgroup float4*)(at + kHalf));
  }
}

// Rounds N values to O and stores them; y is aligned to all of them.
template <typename O, int N>
METAL_FUNC void store_values(device O* y, vec<float, N> x) {
  vec<O, N> v;
  for (int i = 0; i < N; ++i) {
    v[i] = O(x[i]);
  }
  *(device vec<O, N>*)y = v;
}

}  // namespace lily
