// gemm_tiles.h's product on NVIDIA's tensor cores (mma.sync m16n8k16), for PTX alone: no Mac compiles it.
//
// What it computes. The same sums, w rounded to A before the product. Weights are the left operand and go
// from memory through registers to the tensor cores; only x passes through threadgroup memory. Which value
// of k stands where in an operand is free, as long as both agree: a lane's 16-byte load holds 32 codes of
// one weight row, and x is put down in the order in which those codes come out. The order of a sum depends
// on K alone.
//
// Layout of threads. GemmBlock: a simdgroup has TN / 2 tiles of 16 weight rows by TM tiles of 8 rows of x;
// of two matrices side by side, 8 rows of each in a tile, so that a lane holds both sides of silu(gate) up.
// Lane l has, of a step of 128, codes 32 (l % 4) to 32 (l % 4) + 31 of weight rows l / 4 and l / 4 + 8 of
// each tile: four lanes read 64 bytes of a row. A step's loads are in flight during the step before. Tiles
// of x that hold no row are skipped.
//
// Threadgroup memory: two steps of x, 256 bytes a row each.
//
// Bytes: gemm_tiles.h's from memory; a simdgroup reads its rows of x from threadgroup memory once a step.
// Instructions: 15 to unpack 8 codes, for TM products of 16 x 8 x 16 with 16 rows of them. Floor on an H200
// for 2048 rows of the 35B's shapes, at 500 TFLOP/s: DeltaNet in (12352 x 2048) 207 us, out (2048 x 4096)
// 69, attention in 155, experts up 137, down 69; up to 64 tokens, the experts' 450 MB of codes and scales
// take 110 us of memory.
#pragma once

#include <nvidia_simdgroup>

#include "linear/gemm_tiles.h"
#include "quant_mma.h"

namespace lily {

constant constexpr int kMmaStep = 128;
constant constexpr int kRowUnits = kMmaStep / 8;   // of 8 values, of a row in a step
constant constexpr int kLaneUnits = kRowUnits / 4;  // a lane's, of a weight row
constant constexpr int kLaneCodes = 8 * kLaneUnits;

// Where unit j of the lanes l with l % 4 = quarter lies in a row of x, so that neither the lanes that put
// it there nor those that take it meet in a bank.
METAL_FUNC int unit_slot(int row, int quarter, int j) {
  return 4 * ((j + row) % 4) + (quarter + j + row / 2 * 2) % 4;
}

// A unit of 8 codes of a lane's rows as left operands: of each tile two products.
template <int TILES>
struct MmaUnit {
  uint a[TILES][2][4];
};

// A lane's part of a step of the weights: rows l / 4 and l / 4 + 8 of each tile.
template <typename A, int TILES>
struct MmaWeights {
  CodeRun<kLaneCodes> codes[TILES][2];
  A scale[TILES][2];
  A bias[TILES][2];

  METAL_FUNC uint4 pairs(int tile, int h, int j) const {
    return dequantize_pairs<A>(codes[tile][h], j, kBits, scale[tile][h], bias[tile][h]);
  }

  // Unit j of all rows.
  METAL_FUNC MmaUnit<TILES> unit(int j) const {
    MmaUnit<TILES> u;
#pragma clang loop unroll(full)
    for (int m = 0; m < TILES; ++m) {
#pragma clang loop unroll(full)
      for (int h = 0; h < 2; ++h) {
        const uint4 p = pairs(m, h, j);
        u.a[m][0][h] = p[0];
        u.a[m][0][2 + h] = p[1];
        u.a[m][1][h] = p[2];
        u.a[m][1][2 + h] = p[3];
      }
    }
    return u;
  }
};

template <typename A, int TM, int TN>
struct MmaTile {
  static_assert(TN % 2 == 0, "weights come in tiles of 16 rows");
  constexpr static constant int kTiles = TN / 2;
  float sums[kTiles][TM][4];
  int lane;
  int live;  // tiles of x that hold a row

  METAL_FUNC void start(uint lane_index, int rows) {
    lane = int(lane_index);
    live = min((max(rows, 0) + 7) / 8, TM);
#pragma clang loop unroll(full)
    for (int m = 0; m < kTiles; ++m) {
#pragma clang loop unroll(full)
      for (int i = 0; i < TM; ++i) {
#pragma clang loop unroll(full)
        for (int e = 0; e < 4; ++e) {
          sums[m][i][e] = 0.0f;
        }
      }
    }
  }

  // The products of unit j of a step, from the simdgroup's first row of x.
  METAL_FUNC void multiply(thread const MmaUnit<kTiles>& w, const threadgroup uint4* x, int j) {
    const threadgroup uint4* units =
        x + lane / 4 * kRowUnits + unit_slot(lane / 4, lane % 4, j);
    uint4 b[2];  // the next one is loaded before this one's products
    b[0] = units[0];
#pragma clang loop unroll(full)
    for (int i = 0; i < TM; ++i) {
      if (i < live) {
        if (i + 1 < TM) {
          b[(i + 1) % 2] = units[8 * (i + 1) * kRowUnits];
        }
        const uint4 pairs = b[i % 2];
#pragma clang loop unroll(full)
        for (int m = 0; m < kTiles; ++m) {
          nvidia::multiply_accumulate(sums[m][i], w.a[m][0], pairs[0], pairs[1], A(0.0f));
          nvidia::multiply_accumulate(sums[m][i], w.a[m][1], pairs[2], pairs[3], A(0.0f));
        }
      }
    }
  }

  // Of weight row 16 m + l / 4 + 8 h a lane has rows 8 i + 2 (l % 4) and the next of x. Two neighbouring
  // weight rows of one row of x instead: row_of, column_of and the next.
  METAL_FUNC float2 two(int m, int i, int h) const {
    const bool odd = lane / 4 % 2 != 0;
    const float mine = odd ? sums[m][i][2 * h + 1] : sums[m][i][2 * h];
    const float given = odd ? sums[m][i][2 * h] : sums[m][i][2 * h + 1];
    const float got = simd_shuffle_xor(given, ushort(4));
    return odd ? float2(got, mine) : float2(mine, got);
  }
  METAL_FUNC int row_of(int i) const {
    return 8 * i + lane % 4 * 2 + lane / 4 % 2;
  }
  METAL_FUNC int column_of(int h) const {
    return 8 * h + lane / 8 * 2;
  }
};

// What one lane brings of the weights, and one thread of x: units of one row.
template <typename A, typename Block>
struct MmaLoader {
  constexpr static constant int kTiles = Block::kTileColumns / 2;
  constexpr static constant int kXThreads = Block::kThreads / Block::kRows;  // of a row of x
  constexpr static constant int kXUnits = kRowUnits / kXThreads;
  static_assert(kXUnits >= 1 && kRowUnits % kXThreads == 0, "x's rows are shared evenly");
  // Loads wait for the step's codes to be unpacked: with two steps of them in registers only two
  // threadgroups of 32 rows fit on a multiprocessor, not three. No gain at other sizes.
  constexpr static constant bool kLate = Block::kTileRows == 4;
  const device A* x;
  bool has_x;
  int depth;
  QuantizedRows<A> matrix[2];  // of rows l / 4 and of rows l / 4 + 8
  uint code_bytes[kTiles][2];  // from the matrix's first code to a row's
  uint groups[kTiles][2];
  int quarter;
  int x_part;  // of a row's threads, which
  uint4 x_next[kXUnits];
  MmaWeights<A, kTiles> next;

  static METAL_FUNC int x_row(uint tid) {
    return int(tid) / kXThreads;
  }

  METAL_FUNC void set_x(const device A* row, bool valid, uint tid) {
    x = row;
    has_x = valid;
    x_part = int(tid) % kXThreads;
#pragma clang loop unroll(full)
    for (int i = 0; i < kXUnits; ++i) {
      x_next[i] = uint4(0);
    }
  }

  METAL_FUNC void set_matrix(QuantizedRows<A> m, size_t first, int rows, int k, uint tid) {
    start(k, tid);
    for (int h = 0; h < 2; ++h) {
      set_rows(h, m, first, own_tile(tid) * 16 + 8 * h, 16, rows, tid);
    }
  }

  // Half of each tile is of one matrix, half of another.
  METAL_FUNC void set_pair(
      QuantizedRows<A> one, QuantizedRows<A> two, size_t first, int rows, int k, uint tid) {
    start(k, tid);
    for (int h = 0; h < 2; ++h) {
      set_rows(h, h == 0 ? one : two, first, own_tile(tid) * 8, 8, rows, tid);
    }
  }

  METAL_FUNC void start(int k, uint tid) {
    depth = k;
    quarter = int(tid) % 4;
  }

  // The simdgroup's first tile in the block.
  static METAL_FUNC int own_tile(uint tid) {
    return int(tid) / 32 % Block::kColumnGroups * kTiles;
  }

  // Half h of each tile, from row `row` of m's part on, a tile `apart` rows after the one before. Rows
  // past the end are the last one: their results go nowhere.
  METAL_FUNC void set_rows(
      int h, QuantizedRows<A> m, size_t first, int row, int apart, int rows, uint tid) {
    matrix[h].codes =
        (const device uint*)((const device uchar*)m.codes + first * size_t(depth * kBits / 8));
    matrix[h].scales = m.scales + groups_before(first, depth, kGroup);
    matrix[h].biases = m.biases + groups_before(first, depth, kGroup);
    for (int tile = 0; tile < kTiles; ++tile) {
      const int at = min(row + apart * tile + int(tid) % 32 / 4, rows - 1);
      code_bytes[tile][h] = uint(at) * uint(depth * kBits / 8);
      groups[tile][h] = uint(groups_before(at, depth, kGroup));
    }
  }

  METAL_FUNC void fetch(int k) {
    if (has_x) {
#pragma clang loop unroll(full)
      for (int i = 0; i < kXUnits; ++i) {
        const int at = k + 8 * x_unit(i);
        x_next[i] = at < depth ? *(const device uint4*)(x + at) : uint4(0);
      }
    }
    // Past the end of K, where x is 0, the row's last codes.
    const int at = min(k + quarter * kLaneCodes, depth - kLaneCodes);
#pragma clang loop unroll(full)
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma clang loop unroll(full)
      for (int h = 0; h < 2; ++h) {
        const device uchar* p = (const device uchar*)matrix[h].codes + code_bytes[tile][h] +
            uint(at * kBits / 8);
        load_codes(p, kBits, next.codes[tile][h]);
        if (kBits <= 8) {
          next.scale[tile][h] = group_value(matrix[h].scales + groups[tile][h], at, kGroup);
          next.bias[tile][h] = group_value(matrix[h].biases + groups[tile][h], at, kGroup);
        }
      }
    }
  }

  // The unit of a step that is the thread's i-th.
  METAL_FUNC int x_unit(int i) const {
    return i * kXThreads + x_part;
  }

  METAL_FUNC void put(threadgroup uint4* xs, uint tid) const {
    const int row = x_row(tid);
#pragma clang loop unroll(full)
    for (int i = 0; i < kXUnits; ++i) {
      const int unit = x_unit(i);
      const int slot = unit_slot(row, unit / kLaneUnits, unit % kLaneUnits);
      xs[row * kRowUnits + slot] = pair_halves(x_next[i]);
    }
  }
};

template <typename A, typename Block>
struct GemmShape<A, Block, MmaTile> {
  typedef MmaTile<A, Block::kTileRows, Block::kTileColumns> TileType;
  typedef MmaLoader<A, Block> Loader;
  constexpr static constant int kWords = 2 * kRowUnits * Block::kRows;
};

// gemm_tiles.h's.
template <typename A, typename Block, typename TileType>
METAL_FUNC void gemm_sums(
    thread MmaLoader<A, Block>& loader,
    thread TileType& tile,
    int depth,
    int rows,
    threadgroup float4* shared,
    uint tid,
    uint sg) {
  typedef MmaLoader<A, Block> Loader;
  const int row = int(sg) / Block::kColumnGroups * Block::kTileRows * 8;
  tile.start(tid % 32, rows - row);
  loader.fetch(0);
  threadgroup uint4* xs = (threadgroup uint4*)shared;
  for (int k = 0; k < depth; k += kMmaStep) {
    loader.put(xs, tid);
    // One barrier a step: who writes here again has passed the next one, after all have read.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const MmaWeights<A, Loader::kTiles> weights = loader.next;
    const bool more = k + kMmaStep < depth;
    if (!Loader::kLate && more) {
      loader.fetch(k + kMmaStep);
    }
#pragma clang loop unroll(full)
    for (int j = 0; j < kLaneUnits; ++j) {
      const MmaUnit<Loader::kTiles> unit = weights.unit(j);
      if (Loader::kLate && j + 1 == kLaneUnits && more) {
        loader.fetch(k + kMmaStep);
      }
      tile.multiply(unit, xs + row * kRowUnits, j);
    }
    const int other = k / kMmaStep % 2 == 0 ? 1 : 0;
    xs = (threadgroup uint4*)shared + other * kRowUnits * Block::kRows;
  }
}

// gemm_tiles.h's, from registers: two neighbouring columns at a time.
template <typename Block, typename A, int TM, int TN, typename Store>
METAL_FUNC void gemm_results(
    thread MmaTile<A, TM, TN>& tile,
    thread const Store& store,
    threadgroup float4*,
    uint,
    uint sg) {
  const int row = int(sg) / Block::kColumnGroups * TM * 8;
  const int column = int(sg) % Block::kColumnGroups * TN * 8;
#pragma clang loop unroll(full)
  for (int m = 0; m < TN / 2; ++m) {
#pragma clang loop unroll(full)
    for (int i = 0; i < TM; ++i) {
#pragma clang loop unroll(full)
      for (int h = 0; h < 2; ++h) {
        store.put(row + tile.row_of(i), column + 16 * m + tile.column_of(h), tile.two(m, i, h));
      }
    }
  }
}

template <typename Block, typename A, int TM, int TN, typename Store>
METAL_FUNC void gemm_pair_results(
    thread MmaTile<A, TM, TN>& tile,
    thread const Store& store,
    threadgroup float4*,
    uint,
    uint sg) {
  const int row = int(sg) / Block::kColumnGroups * TM * 8;
  const int column = int(sg) % Block::kColumnGroups * TN * 4;
#pragma clang loop unroll(full)
  for (int m = 0; m < TN / 2; ++m) {
#pragma clang loop unroll(full)
    for (int i = 0; i < TM; ++i) {
      store.put(
          row + tile.row_of(i),
          column + 8 * m + tile.column_of(0),
          tile.two(m, i, 0),
          tile.two(m, i, 1));
    }
  }
}

typedef GemmBlock<16, 128, 1, 4> MmaBlock16;
typedef GemmBlock<32, 128, 1, 4> MmaBlock32;
typedef GemmBlock<64, 256, 1, 8> MmaBlock64;

}  // namespace lily
