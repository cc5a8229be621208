// tile_mma.h's interface over NVIDIA's tensor cores (mma.sync m16n8k16), for PTX alone: no Mac compiles
// it.
//
// One simdgroup's tile of 8 TM rows by 8 TN columns as (TM / 2) x TN products of 16 x 8 x 16, operands
// by ldmatrix from threadgroup memory, fp32 sums in registers. Offers start, multiply_nt and store, and
// what gemm_tiles.h asks of a tile whose lane layout is known (<nvidia_simdgroup>): results leave from
// registers, and the columns of two matrices alternate by eight, so that a lane holds both sides of
// silu(gate) up. Tiles of 16 rows that hold none are skipped.
//
// Floor on an H200 for 2048 rows of the 35B's shapes, at 500 TFLOP/s: DeltaNet in (12352 x 2048) 207 us,
// out (2048 x 4096) 69, attention in 155, experts up 137, down 69; at 64 rows the experts' 450 MB of codes
// and scales take 110 us of memory.
//
// Bytes: a step of 16 reads (8 TM + 8 TN) 32 bytes for 2,048 TM TN / 2 multiply-adds; 64 x 32 keeps the
// tensor cores ahead of threadgroup memory (24 cycles of loads for 32 of products). Rows of threadgroup
// memory are an odd number of 16-byte words apart, which leaves ldmatrix without bank conflicts.
// Registers: 2 TM TN fp32 a lane.
#pragma once

#include <nvidia_simdgroup>

#include "gemm_tiles.h"
#include "pairs_sync.h"

namespace lily {

template <typename A, int TM, int TN>
struct SyncTile {
  static_assert(TM % 2 == 0 && TN % 2 == 0, "a tile of tensor cores is made of 16 x 16 products");
  float sums[TM / 2][TN][4];
  int lane;
  int live;  // tiles of 16 rows that hold any

  METAL_FUNC void start(uint lane_index) {
    lane = int(lane_index);
    live = TM / 2;
#pragma clang loop unroll(full)
    for (int i = 0; i < TM / 2; ++i) {
#pragma clang loop unroll(full)
      for (int j = 0; j < TN; ++j) {
#pragma clang loop unroll(full)
        for (int e = 0; e < 4; ++e) {
          sums[i][j][e] = 0.0f;
        }
      }
    }
  }

  // Only the first `rows` rows are wanted.
  METAL_FUNC void limit(int rows) {
    live = min((max(rows, 0) + 15) / 16, TM / 2);
  }

  template <int K>
  METAL_FUNC void multiply_nt(
      const threadgroup A* x, int x_stride, const threadgroup A* w, int w_stride) {
    const threadgroup A* xs = x + lane % 16 * x_stride + lane / 16 * 8;
    const threadgroup A* ws = w + (lane % 8 + lane / 16 * 8) * w_stride + lane / 8 % 2 * 8;
#pragma clang loop unroll(full)
    for (int k = 0; k < K; k += 16) {
      uint b[TN / 2][4];
#pragma clang loop unroll(full)
      for (int j = 0; j < TN / 2; ++j) {
        nvidia::load_matrices(ws + 16 * j * w_stride + k, b[j]);
      }
      uint a[2][4];  // the next one is loaded before this one's products
      if (live > 0) {
        nvidia::load_matrices(xs + k, a[0]);
      }
#pragma clang loop unroll(full)
      for (int i = 0; i < TM / 2; ++i) {
        if (i < live) {
          if (i + 1 < TM / 2) {
            nvidia::load_matrices(xs + 16 * (i + 1) * x_stride + k, a[(i + 1) % 2]);
          }
#pragma clang loop unroll(full)
          for (int j = 0; j < TN; ++j) {
            nvidia::multiply_accumulate(
                sums[i][j], a[i % 2], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], A(0.0f));
          }
        }
      }
    }
  }

  METAL_FUNC void store(threadgroup float* y, int stride) {
#pragma clang loop unroll(full)
    for (int i = 0; i < TM / 2; ++i) {
#pragma clang loop unroll(full)
      for (int j = 0; j < TN; ++j) {
#pragma clang loop unroll(full)
        for (int e = 0; e < 4; ++e) {
          y[(16 * i + lane / 4 + e / 2 * 8) * stride + 8 * j + lane % 4 * 2 + e % 2] =
              sums[i][j][e];
        }
      }
    }
  }
};

// Eight codes of 4 bits to eight values of A, two at a time: set into a mantissa, base taken off, scaled
// and rounded once. A pair holds codes i and i + 4; then neighbours are brought together.
template <typename A>
METAL_FUNC uint4 dequantize8(uint codes, uint scale, uint bias) {
  uint pairs[4];
#pragma clang loop unroll(full)
  for (int i = 0; i < 4; ++i) {
    const uint set = nvidia::select_bits(codes >> (4 * i), 0x000f000fu, pair_base(A(0.0f)));
    const uint code = nvidia::fma_pair(set, pair_one(A(0.0f)), pair_minus_base(A(0.0f)), A(0.0f));
    pairs[i] = nvidia::fma_pair(code, scale, bias, A(0.0f));
  }
  return uint4(
      nvidia::lower_halves(pairs[0], pairs[1]),
      nvidia::lower_halves(pairs[2], pairs[3]),
      nvidia::upper_halves(pairs[0], pairs[1]),
      nvidia::upper_halves(pairs[2], pairs[3]));
}

template <typename A, int TM, int TN>
struct TileTraits<SyncTile<A, TM, TN>> {
  constexpr static constant bool kStaged = false;

  static METAL_FUNC bool is_second(int row, int) {
    return row / 8 % 2 != 0;
  }
  static METAL_FUNC int pair_column(int row, int) {
    return row / 16 * 8 + row % 8;
  }
  static METAL_FUNC void dequantize(uint4 lo, uint4 hi, A scale, A bias, threadgroup A* out) {
    if (kBits == 4) {
      const uint scales = pair_of(scale);
      const uint biases = pair_of(bias);
      *(threadgroup uint4*)out = dequantize8<A>(lo[0], scales, biases);
      *(threadgroup uint4*)(out + 8) = dequantize8<A>(lo[1], scales, biases);
      return;
    }
    dequantize16<A>(lo, hi, scale, bias, out);
  }
  static METAL_FUNC void limit(thread SyncTile<A, TM, TN>& tile, int rows) {
    tile.limit(rows);
  }
};

// gemm_tiles.h's, from registers: two neighbouring columns at a time.
template <typename Block, typename A, int TM, int TN, typename Store>
METAL_FUNC void gemm_results(
    thread SyncTile<A, TM, TN>& tile,
    thread const Store& store,
    threadgroup float4*,
    uint,
    uint sg) {
  const int row = int(sg) / Block::kColumnGroups * TM * 8 + tile.lane / 4;
  const int column = int(sg) % Block::kColumnGroups * TN * 8 + tile.lane % 4 * 2;
#pragma clang loop unroll(full)
  for (int i = 0; i < TM / 2; ++i) {
#pragma clang loop unroll(full)
    for (int j = 0; j < TN; ++j) {
      store.put(row + 16 * i, column + 8 * j, float2(tile.sums[i][j][0], tile.sums[i][j][1]));
      store.put(row + 16 * i + 8, column + 8 * j, float2(tile.sums[i][j][2], tile.sums[i][j][3]));
    }
  }
}

template <typename Block, typename A, int TM, int TN, typename Store>
METAL_FUNC void gemm_pair_results(
    thread SyncTile<A, TM, TN>& tile,
    thread const Store& store,
    threadgroup float4*,
    uint,
    uint sg) {
  const int row = int(sg) / Block::kColumnGroups * TM * 8 + tile.lane / 4;
  const int column = int(sg) % Block::kColumnGroups * TN * 4 + tile.lane % 4 * 2;
#pragma clang loop unroll(full)
  for (int i = 0; i < TM / 2; ++i) {
#pragma clang loop unroll(full)
    for (int j = 0; j < TN; j += 2) {
#pragma clang loop unroll(full)
      for (int e = 0; e < 4; e += 2) {
        store.put(
            row + 16 * i + 4 * e,
            column + 4 * j,
            float2(tile.sums[i][j][e], tile.sums[i][j][e + 1]),
            float2(tile.sums[i][j + 1][e], tile.sums[i][j + 1][e + 1]));
      }
    }
  }
}

typedef GemmBlock<64, 128, 1, 4> SyncBlock64;
typedef GemmBlock<128, 128, 2, 4> SyncBlock128;

}  // namespace lily
