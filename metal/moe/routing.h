// Routing of a prefill chunk to its experts, on the GPU from router logits to block map.
//
// What it computes. For each of `tokens` rows of fp32 router logits: softmax over all experts, the
// top_k experts by probability (ties to the lowest id), their weights (divided by their sum when
// `renormalise`). Then a counting sort of the tokens * top_k assignments by expert; within an
// expert the assignments stay in ascending (token, slot) order. No atomics: the order depends on
// the data alone. Last, the block map: (expert, first sorted row) for each block of at most
// block_rows rows of one expert, in expert order. It is sized by its maximum, ceil(tokens * top_k /
// block_rows) + experts; entries past the last block hold kNoBlock, so that the grouped GEMM's grid
// needs no visit to the CPU.
//
// Layout of threads. Tokens come in blocks of 32, a threadgroup of 256 threads each; a simdgroup
// serves four tokens, a lane holds EPL = ceil(experts / 32) logits (experts lane, lane + 32, ...).
//   route_topk     a threadgroup a token block: ids, weights, and the block's count for each expert
//   route_scan     one threadgroup: prefix sums over blocks and experts, block map
//   route_scatter  a threadgroup a token block: sorted position of each assignment
//   route_small    all three for at most 32 tokens, one threadgroup
//
// Bytes: logits 4 T E read; ids and weights 8 T k written; counts 4 E T / 32 written, read,
// written, read; order 4 T k. Flops: about 3 T E. For T = 2048, E = 256, k = 8: 2.6 MB.
#pragma once

#include "params.h"
#include "rows_common.h"

namespace lily {

constant constexpr int kRouteTokens = 32;    // tokens a block
constant constexpr int kRouteThreads = 256;
constant constexpr int kRouteMaxTopK = 16;
constant constexpr int kRouteMaxExperts = 512;
constant constexpr uint kNoExpert = 0xffffffffu;

// Softmax and top-k of one row by one simdgroup. NaN logits give NaN weights but distinct, valid
// ids.
template <int EPL>
METAL_FUNC void route_token(
    const device float* logits,
    device uint* ids,
    device float* weights,
    threadgroup uint* local_ids,
    int experts,
    int top_k,
    bool renormalise,
    uint lane) {
  float p[EPL];
  float top = -numeric_limits<float>::infinity();
  for (int i = 0; i < EPL; ++i) {
    const int e = i * 32 + int(lane);
    p[i] = e < experts ? logits[e] : -numeric_limits<float>::infinity();
    top = max(top, p[i]);
  }
  top = simd_max(top);
  float sum = 0.0f;
  for (int i = 0; i < EPL; ++i) {
    p[i] = precise::exp(p[i] - top);
    sum += p[i];
  }
  sum = simd_sum(sum);
  for (int i = 0; i < EPL; ++i) {
    const int e = i * 32 + int(lane);
    const float q = p[i] / sum;
    p[i] = e < experts ? (q >= 0.0f ? q : 0.0f) : -1.0f;
  }
  const float poison = sum - sum;  // NaN for a row that holds NaN or +inf, 0 otherwise

  float kept = 0.0f;
  float total = 0.0f;
  for (int s = 0; s < top_k; ++s) {
    float best = p[0];
    uint id = lane;
    for (int i = 1; i < EPL; ++i) {
      if (p[i] > best) {
        best = p[i];
        id = uint(i * 32) + lane;
      }
    }
    const float value = simd_max(best);
    const uint chosen = simd_min(best == value ? id : kNoExpert);
    for (int i = 0; i < EPL; ++i) {
      if (chosen == uint(i * 32) + lane) {
        p[i] = -1.0f;
      }
    }
    total += value;
    if (int(lane) == s) {
      kept = value;
      ids[s] = chosen;
      local_ids[s] = chosen;
    }
  }
  if (int(lane) < top_k) {
    weights[lane] = (renormalise ? kept / total : kept) + poison;
  }
}

// Top-k of the 32 tokens of `block`; local_ids [32 * top_k] holds kNoExpert for tokens past the
// end.
template <int EPL>
METAL_FUNC void route_block_topk(
    const device float* logits,
    device uint* ids,
    device float* weights,
    threadgroup uint* local_ids,
    constant RouteParams& p,
    int block,
    uint sg,
    uint lane) {
  for (int i = 0; i < kRouteTokens / 8; ++i) {
    const int local = int(sg) * (kRouteTokens / 8) + i;
    const int token = block * kRouteTokens + local;
    threadgroup uint* row_ids = local_ids + local * p.top_k;
    if (token < p.tokens) {
      route_token<EPL>(
          logits + size_t(token) * p.experts,
          ids + size_t(token) * p.top_k,
          weights + size_t(token) * p.top_k,
          row_ids,
          p.experts,
          p.top_k,
          p.renormalise != 0,
          lane);
    } else if (int(lane) < p.top_k) {
      row_ids[lane] = kNoExpert;
    }
  }
}

METAL_FUNC uint route_count(const threadgroup uint* local_ids, int n, uint expert) {
  uint count = 0;
  for (int i = 0; i < n; ++i) {
    count += local_ids[i] == expert ? 1u : 0u;
  }
  return count;
}

// In: row_starts[e] = rows of expert e, written by thread e % 256, which alone reads it. Out:
// exclusive prefix sums of the rows and of the blocks, [experts + 1]. `partials` holds 2 *
// kRouteMaxExperts / 32 words.
METAL_FUNC void route_prefix(
    threadgroup uint* row_starts,
    threadgroup uint* block_starts,
    threadgroup uint* partials,
    int experts,
    int block_rows,
    uint sg,
    uint lane) {
  const int spans = (experts + 31) / 32;
  for (int s = int(sg); s < spans; s += kRouteThreads / 32) {
    const int e = s * 32 + int(lane);
    const uint rows = e < experts ? row_starts[e] : 0u;
    const uint blocks = (rows + uint(block_rows) - 1) / uint(block_rows);
    const uint rows_before = simd_prefix_exclusive_sum(rows);
    const uint blocks_before = simd_prefix_exclusive_sum(blocks);
    if (e < experts) {
      row_starts[e] = rows_before;
      block_starts[e] = blocks_before;
    }
    if (lane == 31) {
      partials[2 * s] = rows_before + rows;
      partials[2 * s + 1] = blocks_before + blocks;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int s = int(sg); s < spans; s += kRouteThreads / 32) {
    uint rows = 0;
    uint blocks = 0;
    for (int i = 0; i < s; ++i) {
      rows += partials[2 * i];
      blocks += partials[2 * i + 1];
    }
    const int e = s * 32 + int(lane);
    if (e < experts) {
      row_starts[e] += rows;
      block_starts[e] += blocks;
    }
    if (s == spans - 1 && lane == 0) {
      row_starts[experts] = rows + partials[2 * s];
      block_starts[experts] = blocks + partials[2 * s + 1];
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

METAL_FUNC void route_write_map(
    const threadgroup uint* row_starts,
    const threadgroup uint* block_starts,
    device uint* offsets,
    device uint* block_map,
    constant RouteParams& p,
    uint tid) {
  for (int e = int(tid); e <= p.experts; e += kRouteThreads) {
    offsets[e] = row_starts[e];
  }
  const uint blocks = block_starts[p.experts];
  for (uint i = tid; i < uint(p.max_blocks); i += kRouteThreads) {
    uint expert = kNoBlock;
    uint row = 0;
    if (i < blocks) {
      int lo = 0;  // the last expert whose first block is at or before i
      int hi = p.experts - 1;
      while (lo < hi) {
        const int mid = (lo + hi + 1) / 2;
        if (block_starts[mid] <= i) {
          lo = mid;
        } else {
          hi = mid - 1;
        }
      }
      expert = uint(lo);
      row = row_starts[lo] + (i - block_starts[lo]) * uint(p.block_rows);
    }
    block_map[2 * i] = expert;
    block_map[2 * i + 1] = row;
  }
}

// Assignments before `a` of the same expert in this token block.
METAL_FUNC uint route_rank(const threadgroup uint* local_ids, int a) {
  uint rank = 0;
  for (int i = 0; i < a; ++i) {
    rank += local_ids[i] == local_ids[a] ? 1u : 0u;
  }
  return rank;
}

}  // namespace lily

using namespace lily;

template <int EPL>
[[kernel]] void route_topk(
    const device float* logits [[buffer(0)]],
    device uint* ids [[buffer(1)]],
    device float* weights [[buffer(2)]],
    device uint* counts [[buffer(3)]],
    constant RouteParams& p [[buffer(4)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint local_ids[kRouteTokens * kRouteMaxTopK];
  const int block = int(tg.x);
  route_block_topk<EPL>(logits, ids, weights, local_ids, p, block, sg, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int e = int(tid); e < p.experts; e += kRouteThreads) {
    counts[block * p.experts + e] = route_count(local_ids, kRouteTokens * p.top_k, uint(e));
  }
}

// counts [blocks, experts] becomes the sorted position of each block's first assignment to each
// expert.
[[kernel]] void route_scan(
    device uint* counts [[buffer(0)]],
    device uint* offsets [[buffer(1)]],
    device uint* block_map [[buffer(2)]],
    constant RouteParams& p [[buffer(3)]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint row_starts[kRouteMaxExperts + 1];
  threadgroup uint block_starts[kRouteMaxExperts + 1];
  threadgroup uint partials[2 * kRouteMaxExperts / 32];
  const int blocks = (p.tokens + kRouteTokens - 1) / kRouteTokens;
  for (int e = int(tid); e < p.experts; e += kRouteThreads) {
    uint rows = 0;
    for (int b = 0; b < blocks; ++b) {
      rows += counts[b * p.experts + e];
    }
    row_starts[e] = rows;
  }
  route_prefix(row_starts, block_starts, partials, p.experts, p.block_rows, sg, lane);
  for (int e = int(tid); e < p.experts; e += kRouteThreads) {
    uint start = row_starts[e];
    for (int b = 0; b < blocks; ++b) {
      const uint count = counts[b * p.experts + e];
      counts[b * p.experts + e] = start;
      start += count;
    }
  }
  route_write_map(row_starts, block_starts, offsets, block_map, p, tid);
}

[[kernel]] void route_scatter(
    const device uint* ids [[buffer(0)]],
    const device uint* starts [[buffer(1)]],
    device uint* order [[buffer(2)]],
    constant RouteParams& p [[buffer(3)]],
    uint3 tg [[threadgroup_position_in_grid]],
    uint tid [[thread_index_in_threadgroup]]) {
  threadgroup uint local_ids[kRouteTokens * kRouteMaxTopK];
  const int block = int(tg.x);
  const int first = block * kRouteTokens * p.top_k;
  const int n = min(kRouteTokens * p.top_k, p.tokens * p.top_k - first);
  for (int a = int(tid); a < n; a += kRouteThreads) {
    local_ids[a] = ids[first + a];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int a = int(tid); a < n; a += kRouteThreads) {
    const uint start = starts[block * p.experts + int(local_ids[a])];
    order[start + route_rank(local_ids, a)] = uint(first + a);
  }
}

template <int EPL>
[[kernel]] void route_small(
    const device float* logits [[buffer(0)]],
    device uint* ids [[buffer(1)]],
    device float* weights [[buffer(2)]],
    device uint* order [[buffer(3)]],
    device uint* offsets [[buffer(4)]],
    device uint* block_map [[buffer(5)]],
    constant RouteParams& p [[buffer(6)]],
    uint tid [[thread_index_in_threadgroup]],
    uint sg [[simdgroup_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint local_ids[kRouteTokens * kRouteMaxTopK];
  threadgroup uint row_starts[kRouteMaxExperts + 1];
  threadgroup uint block_starts[kRouteMaxExperts + 1];
  threadgroup uint partials[2 * kRouteMaxExperts / 32];
  route_block_topk<EPL>(logits, ids, weights, local_ids, p, 0, sg, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const int n = p.tokens * p.top_k;
  for (int e = int(tid); e < p.experts; e += kRouteThreads) {
    row_starts[e] = route_count(local_ids, n, uint(e));
  }
  route_prefix(row_starts, block_starts, partials, p.experts, p.block_rows, sg, lane);
  for (int a = int(tid); a < n; a += kRouteThreads) {
    order[row_starts[local_ids[a]] + route_rank(local_ids, a)] = uint(a);
  }
  route_write_map(row_starts, block_starts, offsets, block_map, p, tid);
}
