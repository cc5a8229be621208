// The pick of moe_decode.h apart: ids and final weights of one row's experts, in one threadgroup.
//
// Bytes: 4 an expert read, 8 kTopK written.
#pragma once

#include "moe_decode.h"

// One threadgroup of kUpSimdgroups simdgroups.
[[kernel]] void moe_route(device const float* logits [[buffer(0)]], device uint* ids [[buffer(1)]],
                          device float* weights [[buffer(2)]],
                          uint tid [[thread_index_in_threadgroup]],
                          uint simdgroup [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
  threadgroup lily::PickSpace space;
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
