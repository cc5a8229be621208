// The experts of one row, after the router's GEMV (gemv.h: fp32 logits, the shared expert's gate,
// the normalised row x).
//
// moe_gate_up: picks the experts (softmax over all, the kTopK most probable, ties to the lowest
// id), then for each of them and for the shared expert act = rnd(silu(gate_proj x) * (up_proj x)).
// The pick is done again by each threadgroup that needs it, instead of in a dispatch of its own;
// the first threadgroup writes ids and weights for moe_down.
//
// moe_down: y = sum over slots, in descending order of probability, of weight * (down_proj act),
// then + sigmoid(shared gate) * (shared down_proj act); out = rnd(h + rnd(y)). No atomics. An id
// past the experts reads the last one's weights instead of memory that is not there.
//
// moe_route.h: the pick apart, in front of moe_gate_up: the form of NVIDIA's GPUs, on which what a
// kernel knows of before the previous one has ended is on its way by then.
//
// Layout of threads. moe_gate_up: a threadgroup works on one slot; kUpLanes lanes share a row, a
// simdgroup does kUpR * 32 / kUpLanes values of act, reading each one's gate row and up row; x is
// staged once a threadgroup. moe_down: a threadgroup has a simdgroup a slot and does kDownR * 32 /
// kDownLanes output rows; a lane keeps its part of the slot's act in registers for all of them. All
// loads of a block of rows are issued before one is used.
//
// Bytes (35B, 4 bits, group 64): moe_gate_up 9 * 2 * 512 rows of 1152 = 10.6 MB; moe_down 2048 * 9
// rows of 288 = 5.3 MB; logits, x and act stay in the cache.
//
// Divisibility: experts a multiple of 32, up to 512; kTopK up to 16; hidden / unit_codes(bits)
// by kUpLanes * kUpU; each width / unit_codes(bits) by kDownLanes * kDownU; lanes powers of two; kUpLanes at
// least kUpR; any width and any hidden size within that.
#pragma once

#include "linear/gemv_tiles.h"

namespace lily {

constant int kExperts [[function_constant(80)]];
constant int kTopK [[function_constant(81)]];
constant bool kNormTopK [[function_constant(82)]];
constant int kHidden [[function_constant(83)]];
constant int kWidth [[function_constant(84)]];
constant int kSharedWidth [[function_constant(85)]];
constant int kExpertBits [[function_constant(86)]];
constant int kSharedBits [[function_constant(87)]];
constant int kMoeGroup [[function_constant(88)]];
constant int kUpLanes [[function_constant(89)]];
constant int kUpR [[function_constant(90)]];
constant int kUpU [[function_constant(91)]];
constant int kUpSimdgroups [[function_constant(92)]];  // also of moe_route; 1 to 16
constant int kDownLanes [[function_constant(93)]];
constant int kDownR [[function_constant(94)]];
constant int kDownU [[function_constant(95)]];
// Which arguments exist.
constant bool kExpertScales [[function_constant(98)]];  // kExpertBits <= 8
constant bool kSharedScales [[function_constant(99)]];  // kSharedBits <= 8
constant bool kSelect [[function_constant(100)]];  // moe_gate_up picks, and writes ids and weights
constant bool kGivenIds [[function_constant(101)]];  // moe_gate_up reads ids; moe_route wrote them

constant constexpr int kMaxTopK = 16;
constant constexpr int kMaxChunks = 16;    // of 32 experts
constant constexpr int kMaxDownRows = 64;  // output rows of a threadgroup of moe_down

// ---------------------------------------------------------------- the pick
//
// By all simdgroups of a threadgroup, a lane an expert of every 32, in loops instead of unrolled
// over the experts: little code, which is new to the GPU in each layer. (One simdgroup with eight
// experts a lane, without a barrier, took 4 us on an H200.)

constant constexpr int kTaken = -2147483647 - 1;  // less than any probability

struct PickSpace {
  int4 best[kMaxChunks * kMaxTopK / 4];  // the kTopK of each 32 experts, in order of their ids
  uint expert[kMaxChunks * kMaxTopK];    // whose they are
  float sums[kMaxChunks];                // of exp over each 32 experts
  uint ids[kMaxTopK];                    // by rank, 0 the most probable
  float probabilities[kMaxTopK];
};

// What a lane needs of the logits, so that it can be on its way during other work.
struct Logits {
  float top;              // the greatest of every 32
  float own[kMaxChunks];  // of the chunks that this simdgroup ranks
};

METAL_FUNC int picked_chunks() {  // a simdgroup
  const int simdgroups = at_least_1(kUpSimdgroups);
  return (kExperts / 32 + simdgroups - 1) / simdgroups;
}

METAL_FUNC void load_logits(thread Logits& l, const device float* logits, uint simdgroup,
                            uint lane) {
  const int chunks = kExperts / 32;
  l.top = minus_infinity();
#pragma clang loop unroll(full)
  for (int i = 0; i < kMaxChunks; ++i) {
    if (i < picked_chunks()) {
      const int chunk = min(int(simdgroup) + i * kUpSimdgroups, chunks - 1);
      l.own[i] = logits[chunk * 32 + int(lane)];
    }
    if (i < chunks) {
      l.top = max(l.top, logits[i * 32 + int(lane)]);
    }
  }
}

METAL_FUNC bool comes_before(int order, int at, int other_order, int other_at) {
  return order > other_order || (order == other_order && at < other_at);
}

// Softmax of logits and the kTopK best into space.ids and space.probabilities; a barrier must
// follow. A probability is not negative, so its bits order as an integer does. Each chunk of 32
// experts keeps its kTopK best, by counting who comes before whom; among those the same again, four
// lanes each. They stand in order of their ids where they are equal. A NaN counts as less than all
// others, so ids are always distinct and valid.
METAL_FUNC void pick_experts(thread const Logits& logits, threadgroup PickSpace& space, uint tid,
                             uint simdgroup, uint lane) {
  const int simdgroups = at_least_1(kUpSimdgroups);
  const int chunks = kExperts / 32;
  const int each = picked_chunks();
  const int candidates = chunks * kTopK;
  const int padded = (candidates + 15) / 16 * 16;
  float e[kMaxChunks];
  const float top = group_max(logits.top);
#pragma clang loop unroll(full)
  for (int i = 0; i < kMaxChunks; ++i) {
    const int chunk = int(simdgroup) + i * simdgroups;
    if (i < each && chunk < chunks) {
      e[i] = precise::exp(logits.own[i] - top);
      const float sum = group_sum(e[i], 32);
      if (lane == 0) {
        space.sums[chunk] = sum;
      }
    }
  }
  threadgroup int* best = (threadgroup int*)space.best;
  if (int(tid) < padded - candidates) {
    best[candidates + int(tid)] = kTaken;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0.0f;
  for (int i = 0; i < chunks; ++i) {
    sum += space.sums[i];
  }
#pragma clang loop unroll(full)
  for (int i = 0; i < kMaxChunks; ++i) {
    const int chunk = int(simdgroup) + i * simdgroups;
    if (i < each && chunk < chunks) {
      const float probability = e[i] / sum;
      const int order = isnan(probability) ? -1 : as_type<int>(probability);
      int rank = 0;
#pragma clang loop unroll_count(4)
      for (int j = 0; j < 32; ++j) {
        rank += comes_before(simd_shuffle(order, ushort(j)), j, order, int(lane)) ? 1 : 0;
      }
      if (rank < kTopK) {
        best[chunk * kTopK + rank] = order;
        space.expert[chunk * kTopK + rank] = uint(chunk * 32) + lane;
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int first = 0; first < candidates; first += simdgroups * 8) {
    const int i = min(first + int(tid) / 4, candidates - 1);
    const int order = best[i];
    int rank = 0;
#pragma clang loop unroll_count(2)
    for (int j = int(tid) % 4; j < padded / 4; j += 4) {
      const int4 others = space.best[j];
      for (int k = 0; k < 4; ++k) {
        rank += comes_before(others[k], 4 * j + k, order, i) ? 1 : 0;
      }
    }
    rank += simd_shuffle_xor(rank, ushort(1));
    rank += simd_shuffle_xor(rank, ushort(2));
    if (rank < kTopK && tid % 4 == 0 && first + int(tid) / 4 < candidates) {
      space.ids[rank] = space.expert[i];
      space.probabilities[rank] = order < 0 ? -1.0f : as_type<float>(order);
    }
  }
}

// The final weight of rank `rank`.
METAL_FUNC float picked_weight(const threadgroup PickSpace& space, int rank) {
  float sum = 0.0f;
  for (int i = 0; i < kTopK; ++i) {
    sum += space.probabilities[i];
  }
  return kNormTopK ? space.probabilities[rank] / sum : space.probabilities[rank];
}

// ---------------------------------------------------------------- gate, up, SwiGLU

template <typename A>
struct Rows3 {
  const device uint* w;
  const device A* scales;
  const device A* biases;
};

// Gate and up tiles against the same part of x.
template <typename A, int R, int U, int BITS>
METAL_FUNC void add_tile_pair(thread const Tile<A, R, U>& gate, thread const Tile<A, R, U>& up,
                              StagedRow<A> x, int first_unit, int lanes, thread float* gate_sum,
                              thread float* up_sum) {
  for (int u = 0; u < U; ++u) {
    UnitX<BITS> v;
    load_unit_x(x, first_unit + u * lanes, v);
    for (int r = 0; r < R; ++r) {
      const int i = r * U + u;
      gate_sum[r] = add_unit(gate.q[i], gate.scale[i], gate.bias[i], v, gate_sum[r]);
      up_sum[r] = add_unit(up.q[i], up.scale[i], up.bias[i], v, up_sum[r]);
    }
  }
}

// Rows block * rows_a_simdgroup ... of one expert; first_row is the expert's first row in its
// matrices.
template <typename A, int R, int U>
METAL_FUNC void gate_up_body(Rows3<A> gate, Rows3<A> up, device A* act, StagedRow<A> x,
                             int first_row, int width, int bits, int block, uint lane, bool waits) {
  const int lanes = at_least_1(kUpLanes);
  const int sub_row = int(lane) / lanes;
  const int sub_lane = int(lane) % lanes;
  const int row0 = block * R * (32 / lanes) + sub_row;
  const int units = units_in(kHidden, bits);
  const int groups = kHidden / at_least_1(kMoeGroup);
  const int chunks = units / (lanes * U);
  int rows[R];
  float gate_sum[R];
  float up_sum[R];
  for (int r = 0; r < R; ++r) {
    rows[r] = first_row + min(row0 + r * (32 / lanes), width - 1);
    gate_sum[r] = 0.0f;
    up_sum[r] = 0.0f;
  }
  Tile<A, R, U> gate_tile;
  Tile<A, R, U> up_tile;
  load_tile(gate_tile, gate.w, gate.scales, gate.biases, rows, units, groups, bits, kMoeGroup,
            sub_lane, lanes);
  load_tile(up_tile, up.w, up.scales, up.biases, rows, units, groups, bits, kMoeGroup, sub_lane,
            lanes);
  issue_loads();
  if (waits) {
    wait_for_previous();  // before anything is written
  }
  for (int c = 0; c < chunks; ++c) {
    const Tile<A, R, U> g = gate_tile;
    const Tile<A, R, U> p = up_tile;
    const int unit = sub_lane + c * lanes * U;
    if (c + 1 < chunks) {
      const int next = unit + lanes * U;
      load_tile(gate_tile, gate.w, gate.scales, gate.biases, rows, units, groups, bits, kMoeGroup,
                next, lanes);
      load_tile(up_tile, up.w, up.scales, up.biases, rows, units, groups, bits, kMoeGroup, next,
                lanes);
      issue_loads();
    }
#define LILY_CASE(BITS) add_tile_pair<A, R, U, BITS>(g, p, x, unit, lanes, gate_sum, up_sum);
    LILY_BY_BITS(bits, LILY_CASE)
#undef LILY_CASE
  }
  float g = 0.0f;
  float p = 0.0f;
  for (int r = 0; r < R; ++r) {
    const float gate_total = group_sum(gate_sum[r], lanes);
    const float up_total = group_sum(up_sum[r], lanes);
    g = sub_lane == r ? gate_total : g;
    p = sub_lane == r ? up_total : p;
  }
  const int row = row0 + sub_lane * (32 / lanes);
  if (sub_lane < R && row < width) {
    act[row] = A(silu(g) * p);
  }
}

#define LILY_UP_SHAPES(CASE) CASE(1, 1) CASE(1, 2) CASE(2, 1) CASE(2, 2) CASE(4, 1)

// Grid: kTopK * ceil(kWidth / rows) + ceil(kSharedWidth / rows), rows = kUpSimdgroups * kUpR * 32 /
// kUpLanes. KMAX bounds the hidden size: it sizes the threadgroup memory.
template <typename A, int KMAX>
[[kernel]] void moe_gate_up(
    const device A* x [[buffer(0)]],
    const device float* logits [[buffer(1), function_constant(kSelect)]],
    const device uint* given_ids [[buffer(2), function_constant(kGivenIds)]],
    const device uint* gate_w [[buffer(3)]],  // [experts][width][...]
    const device A* gate_scales [[buffer(4), function_constant(kExpertScales)]],
    const device A* gate_biases [[buffer(5), function_constant(kExpertScales)]],
    const device uint* up_w [[buffer(6)]],
    const device A* up_scales [[buffer(7), function_constant(kExpertScales)]],
    const device A* up_biases [[buffer(8), function_constant(kExpertScales)]],
    const device uint* shared_gate_w [[buffer(9)]],
    const device A* shared_gate_scales [[buffer(10), function_constant(kSharedScales)]],
    const device A* shared_gate_biases [[buffer(11), function_constant(kSharedScales)]],
    const device uint* shared_up_w [[buffer(12)]],
    const device A* shared_up_scales [[buffer(13), function_constant(kSharedScales)]],
    const device A* shared_up_biases [[buffer(14), function_constant(kSharedScales)]],
    device A* act [[buffer(15)]],  // [kTopK][kWidth], then [kSharedWidth]
    device uint* ids [[buffer(16), function_constant(kSelect)]],
    device float* weights [[buffer(17), function_constant(kSelect)]],
    uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint4 words[KMAX * sizeof(A) / 16];
  threadgroup float2 sums[KMAX / 8];
  threadgroup float scratch[1];  // of a norm, which there is none of here
  threadgroup PickSpace space;
  StagedRow<A> row;
  row.words = words;
  row.sums = sums;

  const int rows = kUpSimdgroups * kUpR * (32 / at_least_1(kUpLanes));
  const int slot_groups = (kWidth + rows - 1) / at_least_1(rows);
  const bool shared = int(group.x) >= kTopK * slot_groups;
  const int slot = shared ? kTopK : int(group.x) / at_least_1(slot_groups);
  const int block = (int(group.x) - slot * slot_groups) * kUpSimdgroups + int(simdgroup);

  const bool select = !shared && kSelect;
  Logits l;
  if (!kGivenIds) {
    wait_for_previous();
    if (select) {
      load_logits(l, logits, simdgroup, lane);
    }
    issue_loads();
  }  // Else x is from before the previous dispatch, which picks.
  stage_pieces(row, x, x, act, kHidden, false, false, 0.0f, scratch, tid, simdgroup, lane,
               kUpSimdgroups, false);
  if (select) {
    pick_experts(l, space, tid, simdgroup, lane);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  int expert = 0;
  if (select) {
    expert = int(space.ids[slot]);
    if (group.x == 0 && int(tid) < kTopK) {
      ids[tid] = space.ids[tid];
      weights[tid] = picked_weight(space, int(tid));
    }
  } else if (!shared && kGivenIds) {
    wait_for_previous();
    expert = int(min(given_ids[slot], uint(kExperts - 1)));
  }
  Rows3<A> gate;
  Rows3<A> up;
  gate.w = shared ? shared_gate_w : gate_w;
  gate.scales = shared ? shared_gate_scales : gate_scales;
  gate.biases = shared ? shared_gate_biases : gate_biases;
  up.w = shared ? shared_up_w : up_w;
  up.scales = shared ? shared_up_scales : up_scales;
  up.biases = shared ? shared_up_biases : up_biases;
  const int width = shared ? kSharedWidth : kWidth;
  const int bits = shared ? kSharedBits : kExpertBits;
#define LILY_CASE(R, U)                                                                            \
  if (kUpR == R && kUpU == U) {                                                                    \
    gate_up_body<A, R, U>(gate, up, act + slot * kWidth, row, expert * kWidth, width, bits, block, \
                          lane, shared && kGivenIds);                                              \
  }
  LILY_UP_SHAPES(LILY_CASE)
#undef LILY_CASE
}

// ---------------------------------------------------------------- down, combine, residual

// The part of a row in device memory that meets unit `unit`.
template <typename A, int BITS>
METAL_FUNC void load_unit_x(const device A* x, int unit, thread UnitX<BITS>& v) {
  constexpr int kCodes = unit_codes(BITS);
  const device uint4* p = (const device uint4*)(x + unit * kCodes);
  for (int i = 0; i < kCodes / 8; ++i) {
    widen(p[i], v.x + i * 8, A(0.0f));
  }
  v.even = 0.0f;
  v.odd = 0.0f;
  for (int i = 0; i < kCodes; i += 2) {
    v.even += v.x[i];
    v.odd += v.x[i + 1];
  }
  v.exponent = runtime_exponent(v.even);
}

template <typename A, int R, int U, int BITS>
METAL_FUNC void add_tile_of_act(thread const Tile<A, R, U>& t, const device A* act, int first_unit,
                                int lanes, thread float* sum) {
  for (int u = 0; u < U; ++u) {
    UnitX<BITS> v;
    load_unit_x(act, first_unit + u * lanes, v);
    for (int r = 0; r < R; ++r) {
      const int i = r * U + u;
      sum[r] = add_unit(t.q[i], t.scale[i], t.bias[i], v, sum[r]);
    }
  }
}

// One slot's products for the threadgroup's rows, to threadgroup memory.
template <typename A, int R, int U>
METAL_FUNC void down_body(Rows3<A> down, const device A* act, threadgroup float* products,
                          int first_row, int row0, int width, int bits, uint lane) {
  const int lanes = at_least_1(kDownLanes);
  const int sub_row = int(lane) / lanes;
  const int sub_lane = int(lane) % lanes;
  const int units = units_in(width, bits);
  const int groups = width / at_least_1(kMoeGroup);
  const int chunks = units / (lanes * U);
  int rows[R];
  float sum[R];
  for (int r = 0; r < R; ++r) {
    rows[r] = first_row + min(row0 + sub_row + r * (32 / lanes), kHidden - 1);
    sum[r] = 0.0f;
  }
  for (int c = 0; c < chunks; ++c) {
    const int unit = sub_lane + c * lanes * U;
    Tile<A, R, U> t;
    load_tile(t, down.w, down.scales, down.biases, rows, units, groups, bits, kMoeGroup, unit,
              lanes);
    issue_loads();
    if (c == 0 && kGivenIds) {
      wait_for_previous();  // for act
    }
#define LILY_CASE(BITS) add_tile_of_act<A, R, U, BITS>(t, act, unit, lanes, sum);
    LILY_BY_BITS(bits, LILY_CASE)
#undef LILY_CASE
  }
  for (int r = 0; r < R; ++r) {
    const float total = group_sum(sum[r], lanes);
    if (sub_lane == 0) {
      products[r * (32 / lanes) + sub_row] = total;
    }
  }
}

#define LILY_DOWN_SHAPES(CASE) CASE(1, 1) CASE(2, 1) CASE(4, 1) CASE(8, 1) CASE(2, 2) CASE(4, 2)

// Grid: ceil(hidden / rows), rows = kDownR * 32 / kDownLanes, at most 64; threads: 32 *
// (kTopK + 1), at least `rows`.
template <typename A>
[[kernel]] void moe_down(
    const device A* act [[buffer(0)]],
    const device uint* ids [[buffer(1)]], const device float* weights [[buffer(2)]],
    const device uint* down_w [[buffer(3)]],  // [experts][hidden][...]
    const device A* down_scales [[buffer(4), function_constant(kExpertScales)]],
    const device A* down_biases [[buffer(5), function_constant(kExpertScales)]],
    const device uint* shared_down_w [[buffer(6)]],
    const device A* shared_down_scales [[buffer(7), function_constant(kSharedScales)]],
    const device A* shared_down_biases [[buffer(8), function_constant(kSharedScales)]],
    const device float* shared_gate [[buffer(9)]],  // [1], a logit
    const device A* h [[buffer(10)]], device A* out [[buffer(11)]],
    uint3 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float products[(kMaxTopK + 1) * kMaxDownRows];
  const int rows = kDownR * (32 / at_least_1(kDownLanes));
  const int row0 = int(group.x) * rows;
  const int slot = int(simdgroup);
  const bool shared = slot == kTopK;
  // What the sum over slots needs, before the products: nobody waits for it then.
  const int row = row0 + int(tid);
  const bool owner = int(tid) < rows && row < kHidden;
  float weight[kMaxTopK];
  float gate = 0.0f;
  float before = 0.0f;
  int first_row = 0;
  if (!kGivenIds) {
    wait_for_previous();
  }  // Else all but act is from before the previous dispatch.
  if (owner) {
#pragma clang loop unroll(full)
    for (int s = 0; s < kMaxTopK; ++s) {
      if (s < kTopK) {
        weight[s] = weights[s];
      }
    }
    gate = shared_gate[0];
    before = float(h[row]);
  }
  if (!shared) {
    first_row = int(min(ids[slot], uint(kExperts - 1))) * kHidden;
  }
  Rows3<A> down;
  down.w = shared ? shared_down_w : down_w;
  down.scales = shared ? shared_down_scales : down_scales;
  down.biases = shared ? shared_down_biases : down_biases;
#define LILY_CASE(R, U)                                                                            \
  if (kDownR == R && kDownU == U) {                                                                \
    down_body<A, R, U>(down, act + slot * kWidth, products + slot * kMaxDownRows, first_row, row0, \
                       shared ? kSharedWidth : kWidth, shared ? kSharedBits : kExpertBits, lane);  \
  }
  LILY_DOWN_SHAPES(LILY_CASE)
#undef LILY_CASE
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (owner) {
    float y = 0.0f;
#pragma clang loop unroll(full)
    for (int s = 0; s < kMaxTopK; ++s) {
      if (s < kTopK) {
        y = fma(weight[s], products[s * kMaxDownRows + int(tid)], y);
      }
    }
    const float p = products[kTopK * kMaxDownRows + int(tid)];
    y = fma(sigmoid(gate), p, y);
    out[row] = A(before + float(A(y)));
  }
}

}  // namespace lily
