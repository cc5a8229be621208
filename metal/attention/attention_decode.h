// Attention of one row over the cache.
//
// attention_prepare: q and k get an RMS norm over head_dim and rotary on the first kRotary dims
// (pairs (i, i + kRotary / 2)), rounded once; k and v go into the cache at `position`. A simdgroup
// a head, 8 dims a lane.
//
// attention_decode: softmax(q k / sqrt(D)) v over cache rows 0 .. position, the context cut into
// splits. A threadgroup takes one split for kPack query heads of one KV head and leaves
// (max, sum, o) in fp32.
//
// attention_decode_strided: the same with a lane a key, so that neighbouring lanes read rows apart
// (ablation).
//
// attention_merge: adds the splits up, out = rnd(o * sigmoid(gate)).
//
// Position and so the context length come from device memory: a step's dispatches never change.
// General path, kBlockTokens = 0: kSplits splits of equal length, a multiple of
// 4 * kAttendSimdgroups tokens. Fixed-block path, kBlockTokens = 512 ... 1024: splits of that
// length, kSplits of them cover the capacity. Splits past the context exit at once, and the merge
// leaves them out by the same formula.
//
// Layout of threads of attention_decode. A lane holds 8 of the 256 dims, so a simdgroup reads a
// cache row as 512 neighbouring bytes, 16 a lane. It takes 4 keys at a time; the 4 * kPack sums
// over lanes are done together, halving the number of values with each exchange (order 16, 8, 4, 2,
// 1), after which a lane holds one (key, head) score and its softmax is done once. Each row is
// unpacked once for all kPack heads. The arithmetic of a head, in content and order, does not
// depend on kPack: packed and unpacked results are equal to the bit.
//
// Bytes: 2 * D * sizeof(A) a cached token and KV head (35B: 2 KB a layer and token), read H / (Hkv
// * kPack) times, once from memory when those threadgroups run together. Partials: (D + 2) * 4 a
// head and split, written and read.
//
// D = 256; kRotary a power of two, 16 to 256; kPack 1, 2, 4 or 8 divides H / Hkv; kAttendSimdgroups
// 1 to 16.
#pragma once

#include "common.h"

namespace lily {

constant int kQueryHeads [[function_constant(60)]];
constant int kKvHeads [[function_constant(61)]];
constant int kRotary [[function_constant(62)]];
constant float kHeadEps [[function_constant(63)]];
constant int kAttendSimdgroups [[function_constant(64)]];
constant int kSplits [[function_constant(65)]];
constant int kBlockTokens [[function_constant(66)]];
constant int kPack [[function_constant(67)]];
constant int kPrepareSimdgroups [[function_constant(68)]];
constant int kMergeSimdgroups [[function_constant(69)]];  // 1 to 16

constant constexpr int kD = 256;
constant constexpr int kKeys = 4;                // keys a simdgroup takes at a time
constant constexpr float kScoreScale = 0.0625f;  // D^-0.5
constant constexpr int kMergeFloats = 4096;  // threadgroup memory in which the simdgroups' o meet
constant constexpr int kMaxAttendSimdgroups = 16;
constant constexpr int kMergeDims = 64;   // dims a threadgroup of attention_merge
constant constexpr int kMergeAtOnce = 4;  // loads that a lane of attention_merge has in flight

// ---------------------------------------------------------------- prepare

template <typename A>
METAL_FUNC void store8(device A* p, thread const float* x) {
  for (int i = 0; i < 8; ++i) {
    p[i] = A(x[i]);
  }
}

// Grid: ceil((H + 2 Hkv) / kPrepareSimdgroups) threadgroups. Cosines and sines are made once a
// threadgroup, a pair of dims a thread; rows and weights are in flight meanwhile.
// Bytes: (3 H + 4 Hkv) * D * sizeof(A) less the gates.
template <typename A>
[[kernel]] void attention_prepare(const device A* q_gate [[buffer(0)]],  // [H][q D | gate D]
                                  const device A* k [[buffer(1)]], const device A* v [[buffer(2)]],
                                  const device A* q_norm [[buffer(3)]],
                                  const device A* k_norm [[buffer(4)]],
                                  const device float* inv_freq [[buffer(5)]],  // [kRotary / 2]
                                  const device int* position [[buffer(6)]],
                                  constant int& capacity [[buffer(7)]],  // rows of the cache
                                  device A* q_out [[buffer(8)]],
                                  device A* k_cache [[buffer(9)]],  // [Hkv][capacity][D]
                                  device A* v_cache [[buffer(10)]],
                                  uint3 group [[threadgroup_position_in_grid]],
                                  uint tid [[thread_index_in_threadgroup]],
                                  uint simdgroup [[simdgroup_index_in_threadgroup]],
                                  uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 rotation[kD / 4];  // (cos, sin) of two pairs
  const int item = int(group.x) * kPrepareSimdgroups + int(simdgroup);
  const int at = position[0];
  const int dim = int(lane) * 8;
  const bool query = item < kQueryHeads;
  const bool value = item >= kQueryHeads + kKvHeads;
  const int head = query ? item : (item - kQueryHeads) % at_least_1(kKvHeads);
  float w[8];
  load8((query ? q_norm : k_norm) + dim, w);
  for (int p = int(tid); p < kRotary / 2; p += 32 * kPrepareSimdgroups) {
    const float angle = float(at) * inv_freq[p];
    ((threadgroup float2*)rotation)[p] = float2(precise::cos(angle), precise::sin(angle));
  }
  wait_for_previous();
  float x[8];
  load8((query   ? q_gate + head * 2 * kD
         : value ? v + head * kD
                 : k + head * kD) +
            dim,
        x);
  float squares = 0.0f;
  for (int i = 0; i < 8; ++i) {
    squares = fma(x[i], x[i], squares);
  }
  const float scale = precise::rsqrt(group_sum(squares, 32) / float(kD) + kHeadEps);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (item >= kQueryHeads + 2 * kKvHeads) {
    return;
  }
  if (!value) {
    const int half_lanes = kRotary / 16;
    const bool rotated = int(lane) < 2 * half_lanes;
    const float sign = int(lane) < half_lanes ? -1.0f : 1.0f;
    const int first = int(lane) % at_least_1(half_lanes) * 4;
#pragma clang loop unroll(full)
    for (int i = 0; i < 4; ++i) {
      const float4 r = rotation[first + i];
      const float a = x[2 * i] * scale * w[2 * i];
      const float b = x[2 * i + 1] * scale * w[2 * i + 1];
      const float a_pair = simd_shuffle_xor(a, ushort(half_lanes)) * sign;
      const float b_pair = simd_shuffle_xor(b, ushort(half_lanes)) * sign;
      x[2 * i] = rotated ? fma(a, r.x, a_pair * r.y) : a;
      x[2 * i + 1] = rotated ? fma(b, r.z, b_pair * r.w) : b;
    }
  }
  const ulong row = (ulong(head) * ulong(capacity) + ulong(at)) * kD;
  store8(query   ? q_out + head * kD + dim
         : value ? v_cache + row + dim
                 : k_cache + row + dim,
         x);
}

// ---------------------------------------------------------------- splits

// Tokens of a split of a context of `length` tokens.
METAL_FUNC int split_tokens(int length) {
  if (kBlockTokens > 0) {
    return kBlockTokens;
  }
  const int round = kKeys * at_least_1(kAttendSimdgroups);
  const int each = (length + kSplits - 1) / at_least_1(kSplits);
  return (each + round - 1) / round * round;
}

// ---------------------------------------------------------------- attend

// Sums N values over the lanes of a simdgroup; lane l is left with value l / (32 / N). A step keeps
// half of the values and sends the other half to the lane MASK away. Recursive, and each value read
// before it is chosen, so that no index and no address is left to run time: those cost a chain of
// selects, or the stack.
template <int N, int MASK>
struct SumAndScatter {
  static METAL_FUNC float of(thread const float* p, uint lane) {
    const bool upper = (int(lane) & MASK) != 0;
    float half_sums[N / 2];
#pragma clang loop unroll(full)
    for (int i = 0; i < N / 2; ++i) {
      const float low = p[i];
      const float high = p[i + N / 2];
      half_sums[i] = (upper ? high : low) + simd_shuffle_xor(upper ? low : high, ushort(MASK));
    }
    return SumAndScatter<N / 2, MASK / 2>::of(half_sums, lane);
  }
};

template <int MASK>
struct SumAndScatter<1, MASK> {
  static METAL_FUNC float of(thread const float* p, uint) {
    float sum = p[0];
#pragma clang loop unroll(full)
    for (int mask = MASK; mask >= 1; mask >>= 1) {
      sum += simd_shuffle_xor(sum, ushort(mask));
    }
    return sum;
  }
};

// What a simdgroup has of H heads: o dims 8 * lane ..., and running max and sum.
template <int H>
struct Heads {
  float o[H][8];
  float m[H];
  float l[H];
};

// Adds up what the simdgroups of a threadgroup left of `count` heads, `first` and on: o at
// o_shared[h - first][simdgroup][place], place (dim % 8) * 32 + dim / 8. Begins and ends with a
// barrier.
METAL_FUNC void merge_simdgroups(const threadgroup float* o_shared, const threadgroup float* m_shared,
                                 const threadgroup float* l_shared, device float2* partial_ml,
                                 device float* partial_o, int heads, int first, int count,
                                 int head0, int split, uint tid) {
  const int simdgroups = kAttendSimdgroups;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int e = int(tid); e < count * kD; e += simdgroups * 32) {
    const int h = first + e / kD;
    const int place = e % kD;
    float top = m_shared[h];
    for (int s = 1; s < simdgroups; ++s) {
      top = max(top, m_shared[s * heads + h]);
    }
    float o = 0.0f;
    float l = 0.0f;
    for (int s = 0; s < simdgroups; ++s) {
      const float w = precise::exp(m_shared[s * heads + h] - top);
      o = fma(w, o_shared[((h - first) * simdgroups + s) * kD + place], o);
      l = fma(w, l_shared[s * heads + h], l);
    }
    const int index = (head0 + h) * kSplits + split;
    partial_o[index * kD + (place % 32) * 8 + place / 32] = o;
    if (place == 0) {
      partial_ml[index] = float2(top, l);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Adds up the simdgroups of a threadgroup and writes the split's partials.
template <int H>
METAL_FUNC void finish_split(thread Heads<H>& a, threadgroup float* o_shared,
                             threadgroup float* m_shared, threadgroup float* l_shared,
                             device float2* partial_ml, device float* partial_o, int head0,
                             int split, uint tid, uint simdgroup, uint lane) {
  const int simdgroups = kAttendSimdgroups;
  const int at_once = min(H, kMergeFloats / kD / at_least_1(simdgroups));  // heads a round
  if (lane == 0) {
    for (int h = 0; h < H; ++h) {
      m_shared[int(simdgroup) * H + h] = a.m[h];
      l_shared[int(simdgroup) * H + h] = a.l[h];
    }
  }
  for (int first = 0; first < H; first += at_once) {
    for (int h = 0; h < H; ++h) {
      if (h >= first && h < first + at_once) {
        threadgroup float* row = o_shared + ((h - first) * simdgroups + int(simdgroup)) * kD;
        for (int i = 0; i < 8; ++i) {
          row[i * 32 + int(lane)] = a.o[h][i];  // dim 8 * lane + i
        }
      }
    }
    merge_simdgroups(o_shared, m_shared, l_shared, partial_ml, partial_o, H, first,
                     min(at_once, H - first), head0, split, tid);
  }
}

// Four rows of a cache, this lane's eight dims of each.
template <typename A>
struct Rows {
  uint4 word[kKeys];
};

template <typename A>
METAL_FUNC void load_rows(thread Rows<A>& rows, const device A* cache, int first, int last,
                          uint lane) {
  for (int j = 0; j < kKeys; ++j) {
    rows.word[j] = *(const device uint4*)(cache + min(first + j, last) * kD + int(lane) * 8);
  }
}

template <typename A>
METAL_FUNC void widen_row(thread const Rows<A>& rows, int j, thread float* x) {
  widen(rows.word[j], x, A(0.0f));
}

template <typename A, int H>
METAL_FUNC void attend_body(const device A* q, const device A* keys, const device A* values,
                            device float2* partial_ml, device float* partial_o,
                            threadgroup float* o_shared, threadgroup float* m_shared,
                            threadgroup float* l_shared, int length, int capacity, int split,
                            int head0, uint tid, uint simdgroup, uint lane) {
  constexpr int kHeadLanes = 8 / H;  // lanes that share a (key, head)
  const int start = split * split_tokens(length);
  if (start >= length) {
    return;  // the whole threadgroup
  }
  const int end = min(start + split_tokens(length), length);
  const int kv_head = head0 / (kQueryHeads / at_least_1(kKvHeads));
  const device A* k = keys + ulong(kv_head) * ulong(capacity) * kD;
  const device A* v = values + ulong(kv_head) * ulong(capacity) * kD;

  const int step = kKeys * kAttendSimdgroups;
  Rows<A> k_rows;
  Rows<A> v_rows;
  int base = start + kKeys * int(simdgroup);
  // The newest row is written by the dispatch before this one, all others by earlier steps.
  load_rows(k_rows, k, base, min(end - 1, max(length - 2, 0)), lane);
  issue_loads();
  wait_for_previous();
  if (base + kKeys >= length) {
    load_rows(k_rows, k, base, end - 1, lane);
  }

  Heads<H> heads;
  float query[H][8];
  for (int h = 0; h < H; ++h) {
    load8(q + (head0 + h) * kD + int(lane) * 8, query[h]);
    for (int i = 0; i < 8; ++i) {
      query[h][i] *= kScoreScale;
      heads.o[h][i] = 0.0f;
    }
  }
  // This lane's head; the keys of its slot only, until the end.
  float m = minus_infinity();
  float l = 0.0f;
  for (; base < end; base += step) {
    load_rows(v_rows, v, base, end - 1, lane);
    issue_loads();
    float p[kKeys * H];
    for (int j = 0; j < kKeys; ++j) {
      float x[8];
      widen_row(k_rows, j, x);
      for (int h = 0; h < H; ++h) {
        float sum = query[h][0] * x[0];
        for (int i = 1; i < 8; ++i) {
          sum = fma(query[h][i], x[i], sum);
        }
        p[j * H + h] = sum;
      }
    }
    load_rows(k_rows, k, base + step, end - 1, lane);
    issue_loads();
    float score = SumAndScatter<kKeys * H, 16>::of(p, lane);
    score = base + int(lane) / 8 < end ? score : minus_infinity();
    float top = max(score, simd_shuffle_xor(score, ushort(16)));
    top = max(top, simd_shuffle_xor(top, ushort(8)));
    const float m_new = max(m, top);
    const float weight = precise::exp(score - m_new);
    if (simd_any(m_new > m)) {
      const float factor = precise::exp(m - m_new);
      l *= factor;
      for (int h = 0; h < H; ++h) {
        const float f = simd_shuffle(factor, ushort(h * kHeadLanes));
        for (int i = 0; i < 8; ++i) {
          heads.o[h][i] *= f;
        }
      }
      m = m_new;
    }
    l += weight;
    for (int j = 0; j < kKeys; ++j) {
      float x[8];
      widen_row(v_rows, j, x);
      for (int h = 0; h < H; ++h) {
        const float w = simd_shuffle(weight, ushort(j * 8 + h * kHeadLanes));
        for (int i = 0; i < 8; ++i) {
          heads.o[h][i] = fma(w, x[i], heads.o[h][i]);
        }
      }
    }
  }
  l += simd_shuffle_xor(l, ushort(16));
  l += simd_shuffle_xor(l, ushort(8));
  for (int h = 0; h < H; ++h) {
    heads.m[h] = simd_shuffle(m, ushort(h * kHeadLanes));
    heads.l[h] = simd_shuffle(l, ushort(h * kHeadLanes));
  }
  finish_split(heads, o_shared, m_shared, l_shared, partial_ml, partial_o, head0, split, tid,
               simdgroup, lane);
}

// A threadgroup's split, lane by lane; attention_decode_mma.h has another form.
struct LaneAttend {
  template <typename A>
  static METAL_FUNC void run(const device A* q, const device A* keys, const device A* values,
                             device float2* partial_ml, device float* partial_o,
                             threadgroup float* o_shared, threadgroup float* m_shared,
                             threadgroup float* l_shared, int length, int capacity, uint3 group,
                             uint tid, uint simdgroup, uint lane) {
#define LILY_CASE(H)                                                                            \
  if (kPack == H) {                                                                             \
    attend_body<A, H>(q, keys, values, partial_ml, partial_o, o_shared, m_shared, l_shared,     \
                      length, capacity, int(group.x), int(group.y) * H, tid, simdgroup, lane);  \
  }
    LILY_CASE(1)
    LILY_CASE(2)
    LILY_CASE(4)
    LILY_CASE(8)
#undef LILY_CASE
  }
};

// Grid: (kSplits, H / kPack).
template <typename A, typename Attend = LaneAttend>
[[kernel]] void attention_decode(
    const device A* q [[buffer(0)]], const device A* k_cache [[buffer(1)]],
    const device A* v_cache [[buffer(2)]], const device int* position [[buffer(3)]],
    constant int& capacity [[buffer(4)]],
    device float2* partial_ml [[buffer(5)]],  // [H][kSplits]
    device float* partial_o [[buffer(6)]],    // [H][kSplits][D]
    uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float o_shared[kMergeFloats];
  threadgroup float m_shared[kMaxAttendSimdgroups * 8];
  threadgroup float l_shared[kMaxAttendSimdgroups * 8];
  Attend::run(q, k_cache, v_cache, partial_ml, partial_o, o_shared, m_shared, l_shared,
              position[0] + 1, capacity, group, tid, simdgroup, lane);
}

// The uncoalesced form, four heads a threadgroup (kPack = 4): a lane computes all 256 products of
// its own key, 32 keys a simdgroup at a time, so that a load touches 32 rows.
template <typename A>
[[kernel]] void attention_decode_strided(
    const device A* q [[buffer(0)]], const device A* k_cache [[buffer(1)]],
    const device A* v_cache [[buffer(2)]], const device int* position [[buffer(3)]],
    constant int& capacity [[buffer(4)]], device float2* partial_ml [[buffer(5)]],
    device float* partial_o [[buffer(6)]], uint3 group [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr int H = 4;
  threadgroup float o_shared[kMergeFloats];
  threadgroup float m_shared[kMaxAttendSimdgroups * H];
  threadgroup float l_shared[kMaxAttendSimdgroups * H];
  threadgroup float query[H * kD];
  const int length = position[0] + 1;
  const int split = int(group.x);
  const int head0 = int(group.y) * H;
  const int start = split * split_tokens(length);
  if (start >= length) {
    return;
  }
  const int end = min(start + split_tokens(length), length);
  const int kv_head = head0 / (kQueryHeads / at_least_1(kKvHeads));
  const device A* k = k_cache + ulong(kv_head) * ulong(capacity) * kD;
  const device A* v = v_cache + ulong(kv_head) * ulong(capacity) * kD;
  for (int i = int(tid); i < H * kD; i += kAttendSimdgroups * 32) {
    query[i] = float(q[head0 * kD + i]) * kScoreScale;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  Heads<H> heads;
  float sum[H];  // of this lane's keys
  for (int h = 0; h < H; ++h) {
    heads.m[h] = minus_infinity();
    sum[h] = 0.0f;
    for (int i = 0; i < 8; ++i) {
      heads.o[h][i] = 0.0f;
    }
  }
  for (int base = start + 32 * int(simdgroup); base < end; base += 32 * kAttendSimdgroups) {
    const device A* row = k + min(base + int(lane), end - 1) * kD;
    float score[H];
    for (int h = 0; h < H; ++h) {
      score[h] = 0.0f;
    }
    for (int d = 0; d < kD; d += 8) {
      float x[8];
      load8(row + d, x);
      for (int h = 0; h < H; ++h) {
        for (int i = 0; i < 8; ++i) {
          score[h] = fma(query[h * kD + d + i], x[i], score[h]);
        }
      }
    }
    float weight[H];
    for (int h = 0; h < H; ++h) {
      const float s = base + int(lane) < end ? score[h] : minus_infinity();
      const float m_new = max(heads.m[h], group_max(s));
      const float factor = precise::exp(heads.m[h] - m_new);
      weight[h] = precise::exp(s - m_new);
      sum[h] = fma(sum[h], factor, weight[h]);
      heads.m[h] = m_new;
      for (int i = 0; i < 8; ++i) {
        heads.o[h][i] *= factor;
      }
    }
    for (int j = 0; j < min(32, end - base); ++j) {
      float x[8];
      load8(v + (base + j) * kD + int(lane) * 8, x);
      for (int h = 0; h < H; ++h) {
        const float w = simd_shuffle(weight[h], ushort(j));
        for (int i = 0; i < 8; ++i) {
          heads.o[h][i] = fma(w, x[i], heads.o[h][i]);
        }
      }
    }
  }
  for (int h = 0; h < H; ++h) {
    heads.l[h] = group_sum(sum[h], 32);
  }
  finish_split(heads, o_shared, m_shared, l_shared, partial_ml, partial_o, head0, split, tid,
               simdgroup, lane);
}

// ---------------------------------------------------------------- merge

// o of splits first, first + kMergeSimdgroups, ..., the last split in place of those past it.
METAL_FUNC void load_partials(thread float2* o, const device float* column, int first, int last) {
#pragma clang loop unroll(full)
  for (int i = 0; i < kMergeAtOnce; ++i) {
    o[i] = *(const device float2*)(column + min(first + i * kMergeSimdgroups, last) * kD);
  }
}

// Grid: (D / 64, H), kMergeSimdgroups simdgroups; a lane holds 2 dims, simdgroup s adds splits s, s
// + kMergeSimdgroups, ... of each 32, whose weights its lanes make, one each. kMergeAtOnce loads of
// o are in flight together, the first of them before the maximum is known.
template <typename A>
[[kernel]] void attention_merge(
    const device float2* partial_ml [[buffer(0)]], const device float* partial_o [[buffer(1)]],
    const device A* q_gate [[buffer(2)]], const device int* position [[buffer(3)]],
    device A* out [[buffer(4)]],  // [H][D]
    uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float2 shared[16 * 32];
  start_next();
  const int head = int(group.y);
  const int dim = int(group.x) * kMergeDims + int(lane) * 2;
  const device A* gate = q_gate + head * 2 * kD + kD + dim;
  const float gate0 = float(gate[0]);
  const float gate1 = float(gate[1]);
  const int length = position[0] + 1;
  const int tokens = split_tokens(length);
  const int splits = min((length + tokens - 1) / at_least_1(tokens), kSplits);
  const device float2* ml = partial_ml + head * kSplits;
  const device float* column = partial_o + head * kSplits * kD + dim;

  wait_for_previous();
  float2 next[kMergeAtOnce];
  load_partials(next, column, int(simdgroup), splits - 1);
  float top = minus_infinity();
  for (int i = int(lane); i < splits; i += 32) {
    top = max(top, ml[i].x);
  }
  top = group_max(top);
  float l = 0.0f;
  float2 o = float2(0.0f);
  for (int base = 0; base < splits; base += 32) {
    float w = 0.0f;
    if (base + int(lane) < splits) {
      const float2 part = ml[base + int(lane)];
      w = precise::exp(part.x - top);
      l = fma(w, part.y, l);
    }
    const int end = min(32, splits - base);
    for (int j = int(simdgroup); j < end; j += kMergeAtOnce * kMergeSimdgroups) {
      float2 now[kMergeAtOnce];
      for (int i = 0; i < kMergeAtOnce; ++i) {
        now[i] = next[i];
      }
      const int after = j + kMergeAtOnce * kMergeSimdgroups;
      load_partials(next, column, base + (after < end ? after : 32 + int(simdgroup)), splits - 1);
      for (int i = 0; i < kMergeAtOnce; ++i) {
        const int at = j + i * kMergeSimdgroups;  // from 32 on: not of these
        const float weight = simd_shuffle(w, ushort(at & 31));
        o = fma(float2(at < 32 ? weight : 0.0f), now[i], o);
      }
    }
  }
  l = group_sum(l, 32);
  shared[int(simdgroup) * 32 + int(lane)] = o;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simdgroup == 0) {
    for (int s = 1; s < kMergeSimdgroups; ++s) {
      o += shared[s * 32 + int(lane)];
    }
    out[head * kD + dim] = A(o.x / l * sigmoid(gate0));
    out[head * kD + dim + 1] = A(o.y / l * sigmoid(gate1));
  }
}

}  // namespace lily
