// The pick of moe_decode.h apart: ids and final weights of one row's experts, in one threadgroup.
//
// The rest of the GPU, idle meanwhile, may ask for weights that a later kernel reads: `ahead`, by
// lines of 128 bytes, into the L2 cache. On an H200 8 MB of the next layer's input projections come
// while the router and the pick run.
//
// Bytes: 4 an expert read, 8 kTopK written; of `ahead` none that its reader would not move itself.
#pragma once

#include "moe/moe_decode.h"

namespace lily {
constant bool kAhead [[function_constant(104)]];
}

// Grid: one threadgroup of kUpSimdgroups simdgroups that picks, then those that ask.
[[kernel]] void moe_route(const device float* logits [[buffer(0)]], device uint* ids [[buffer(1)]],
                          device float* weights [[buffer(2)]],
                          const device uint4* ahead [[buffer(3), function_constant(lily::kAhead)]],
                          constant int& lines [[buffer(4)]],  // of ahead
                          uint3 group [[threadgroup_position_in_grid]],
                          uint3 groups [[threadgroups_per_grid]],
                          uint tid [[thread_index_in_threadgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
  threadgroup lily::PickSpace space;
  if (lily::kAhead && group.x > 0) {
    const int threads = 32 * lily::kUpSimdgroups;
    const int first = int(group.x - 1) * threads + int(tid);
    for (int i = first; i < lines; i += int(groups.x - 1) * threads) {
      lily::prefetch(ahead + i * 8);
    }
    return;
  }
  lily::wait_for_previous();
  lily::Logits l;
  lily::load_logits(l, logits, simdgroup, lane);
  lily::pick_experts(l, space, tid, simdgroup, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (int(tid) < lily::kTopK) {
    ids[tid] = space.ids[tid];
    weights[tid] = lily::picked_weight(space, int(tid));
  }
}
