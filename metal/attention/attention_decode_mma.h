// attention_decode on NVIDIA's tensor cores, for PTX alone. Lane by lane a long context is bound by its
// instructions, and reads each row once for every four heads; here once for eight.
//
// What it computes. attention_decode.h's partials of a split, for kPack = 8 query heads of one KV head.
// Scores are K q^T, 16 keys by 8 heads; o^T = V^T p^T, 16 dims by 8 heads. A weight p is two values of
// A, p rounded and what that lost, so that o is as exact as with fp32 weights.
//
// Layout of threads. A simdgroup takes 16 keys at a time. For the scores lane l has keys l / 4 and
// l / 4 + 8, and 16-byte units l % 4, l % 4 + 4, ... of their rows; for o it has keys 2 (l % 4), the
// next, and both + 8, and units l / 4, l / 4 + 8, ...: 64 neighbouring bytes of eight rows, or 128 of
// four, a load. A product's operands may take the dims, and the rows of o, in any order, so nothing is
// moved between lanes but p (8 x 8 values transposed, twice). The next keys are asked for before the
// softmax, the values before the scores.
//
// Bytes: attention_decode.h's, each row once. Flops: 8 D a key and head; instructions 30 a key.
//
// D = 256, A of 16 bits, kPack = 8.
#pragma once

#include <nvidia_simdgroup>

#include "attention/attention_decode.h"
#include "linear/pairs_mma.h"

namespace lily {

constant constexpr int kTileKeys = 16;

struct KeyTile {
  uint4 word[2][8];  // of keys l / 4 and l / 4 + 8
};
struct ValueTile {
  uint4 word[4][4];  // of keys 2 (l % 4), + 1, + 8, + 9
};

template <typename A>
METAL_FUNC void load_keys(thread KeyTile& tile, const device A* cache, int base, int last,
                          uint lane) {
  for (int h = 0; h < 2; ++h) {
    const int row = min(base + 8 * h + int(lane / 4), last);
    const device uint4* p = (const device uint4*)(cache + row * kD) + (lane & 3u);
    for (int j = 0; j < 8; ++j) {
      tile.word[h][j] = p[4 * j];
    }
  }
}

template <typename A>
METAL_FUNC void load_values(thread ValueTile& tile, const device A* cache, int base, int last,
                            uint lane) {
  for (int i = 0; i < 4; ++i) {
    const int row = min(base + 8 * (i / 2) + 2 * int(lane & 3u) + i % 2, last);
    const device uint4* p = (const device uint4*)(cache + row * kD) + lane / 4;
    for (int s = 0; s < 4; ++s) {
      tile.word[i][s] = p[8 * s];
    }
  }
}

template <typename A>
METAL_FUNC uint pair_up(float low, float high) {
  return uint(as_type<ushort>(A(low))) | (uint(as_type<ushort>(A(high))) << 16);
}

// The maximum over the keys of a tile, of one head.
METAL_FUNC float over_keys(float v) {
  v = max(v, simd_shuffle_xor(v, ushort(4)));
  v = max(v, simd_shuffle_xor(v, ushort(8)));
  return max(v, simd_shuffle_xor(v, ushort(16)));
}

METAL_FUNC float sum_over_keys(float v) {
  v += simd_shuffle_xor(v, ushort(4));
  v += simd_shuffle_xor(v, ushort(8));
  return v + simd_shuffle_xor(v, ushort(16));
}

struct MmaAttend {
  template <typename A>
  static METAL_FUNC void run(const device A* q, const device A* keys, const device A* values,
                             device float2* partial_ml, device float* partial_o,
                             threadgroup float* o_shared, threadgroup float* m_shared,
                             threadgroup float* l_shared, int length, int capacity, uint3 group,
                             uint tid, uint simdgroup, uint lane) {
    constexpr int kHeads = 8;
    const int split = int(group.x);
    const int head0 = int(group.y) * kHeads;
    const int start = split * split_tokens(length);
    if (start >= length) {
      return;  // the whole threadgroup
    }
    const int end = min(start + split_tokens(length), length);
    const int kv_head = head0 / (kQueryHeads / at_least_1(kKvHeads));
    const device A* k = keys + ulong(kv_head) * ulong(capacity) * kD;
    const device A* v = values + ulong(kv_head) * ulong(capacity) * kD;

    const int step = kTileKeys * kAttendSimdgroups;
    int base = start + kTileKeys * int(simdgroup);
    KeyTile k_tile;
    // The newest row is written by the dispatch before this one, all others by earlier steps.
    load_keys(k_tile, k, base, min(end - 1, max(length - 2, 0)), lane);
    issue_loads();
    wait_for_previous();
    if (base + kTileKeys >= length) {
      load_keys(k_tile, k, base, end - 1, lane);
    }
    uint4 query[8];  // of head l / 4
    for (int j = 0; j < 8; ++j) {
      query[j] =
          ((const device uint4*)(q + (head0 + int(lane / 4)) * kD))[4 * j + int(lane & 3u)];
    }

    // Of heads 2 (l % 4) and the next: o's dims 64 s + 8 (l / 4) + 2 e and the next, running maximum,
    // and this lane's share of the sum.
    float o[4][4][4];
    for (int s = 0; s < 4; ++s) {
      for (int e = 0; e < 4; ++e) {
        for (int i = 0; i < 4; ++i) {
          o[s][e][i] = 0.0f;
        }
      }
    }
    float2 m = float2(minus_infinity(), minus_infinity());
    float2 l = float2(0.0f, 0.0f);
    for (; base < end; base += step) {
      ValueTile v_tile;
      load_values(v_tile, v, base, end - 1, lane);
      issue_loads();
      float even[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      float odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      for (int j = 0; j < 8; ++j) {
        const uint4 x = k_tile.word[0][j];
        const uint4 y = k_tile.word[1][j];
        const uint low[4] = {x[0], y[0], x[1], y[1]};
        const uint high[4] = {x[2], y[2], x[3], y[3]};
        nvidia::multiply_accumulate(even, low, query[j][0], query[j][1], A(0.0f));
        nvidia::multiply_accumulate(odd, high, query[j][2], query[j][3], A(0.0f));
      }
      load_keys(k_tile, k, base + step, end - 1, lane);
      issue_loads();
      float2 near = float2(even[0] + odd[0], even[1] + odd[1]) * kScoreScale;
      float2 far = float2(even[2] + odd[2], even[3] + odd[3]) * kScoreScale;
      const int key = base + int(lane / 4);
      near = key < end ? near : float2(minus_infinity(), minus_infinity());
      far = key + 8 < end ? far : float2(minus_infinity(), minus_infinity());
      float2 m_new;
      m_new.x = max(m.x, over_keys(max(near.x, far.x)));
      m_new.y = max(m.y, over_keys(max(near.y, far.y)));
      if (simd_any(m_new.x > m.x || m_new.y > m.y)) {
        float2 factor;
        factor.x = precise::exp(m.x - m_new.x);
        factor.y = precise::exp(m.y - m_new.y);
        l *= factor;
        for (int s = 0; s < 4; ++s) {
          for (int e = 0; e < 4; ++e) {
            for (int i = 0; i < 4; ++i) {
              o[s][e][i] *= i % 2 == 0 ? factor.x : factor.y;
            }
          }
        }
        m = m_new;
      }
      const float p[4] = {precise::exp(near.x - m.x), precise::exp(near.y - m.y),
                          precise::exp(far.x - m.x), precise::exp(far.y - m.y)};
      l.x += p[0] + p[2];
      l.y += p[1] + p[3];
      float lost[4];
      for (int i = 0; i < 4; ++i) {
        lost[i] = p[i] - float(A(p[i]));
      }
      const uint high0 = nvidia::transpose_matrix(pair_up<A>(p[0], p[1]));
      const uint high1 = nvidia::transpose_matrix(pair_up<A>(p[2], p[3]));
      const uint low0 = nvidia::transpose_matrix(pair_up<A>(lost[0], lost[1]));
      const uint low1 = nvidia::transpose_matrix(pair_up<A>(lost[2], lost[3]));
      for (int s = 0; s < 4; ++s) {
        for (int e = 0; e < 4; ++e) {
          const uint w0 = v_tile.word[0][s][e];
          const uint w1 = v_tile.word[1][s][e];
          const uint w2 = v_tile.word[2][s][e];
          const uint w3 = v_tile.word[3][s][e];
          const uint a[4] = {lower_halves(w0, w1), upper_halves(w0, w1), lower_halves(w2, w3),
                             upper_halves(w2, w3)};
          nvidia::multiply_accumulate(o[s][e], a, high0, high1, A(0.0f));
          nvidia::multiply_accumulate(o[s][e], a, low0, low1, A(0.0f));
        }
      }
    }

    l.x = sum_over_keys(l.x);
    l.y = sum_over_keys(l.y);
    const int own = 2 * int(lane & 3u);
    if (lane < 4) {
      m_shared[int(simdgroup) * kHeads + own] = m.x;
      m_shared[int(simdgroup) * kHeads + own + 1] = m.y;
      l_shared[int(simdgroup) * kHeads + own] = l.x;
      l_shared[int(simdgroup) * kHeads + own + 1] = l.y;
    }
    // Two heads a round: up to eight simdgroups' o fit.
    for (int first = 0; first < kHeads; first += 2) {
      if (own == first) {
        for (int i = 0; i < 4; ++i) {
          threadgroup float* row =
              o_shared + (i % 2 * kAttendSimdgroups + int(simdgroup)) * kD + int(lane / 4);
          for (int s = 0; s < 4; ++s) {
            for (int e = 0; e < 4; ++e) {
              row[(2 * e + i / 2) * 32 + 8 * s] = o[s][e][i];
            }
          }
        }
      }
      merge_simdgroups(o_shared, m_shared, l_shared, partial_ml, partial_o, kHeads, first, 2, head0,
                       split, tid);
    }
  }
};

}  // namespace lily
