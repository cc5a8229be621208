// The pick of moe_decode.h apart, for the unfused form: ids and final weights of one row's experts.
//
// One simdgroup picks; the others of the threadgroup do the same and write nothing.
//
// Bytes: 4 an expert read, 8 kTopK written.
#pragma once

#include "moe_decode.h"

// One threadgroup of kUpSimdgroups simdgroups.
[[kernel]] void moe_route(device const float* logits [[buffer(0)]], device uint* ids [[buffer(1)]],
                          device float* weights [[buffer(2)]],
                          uint tid [[thread_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
  const lily::Pick pick = lily::pick_experts(lily::load_logits(logits, lane), lane);
  if (int(tid) < lily::kTopK) {
    ids[tid] = pick.id;
    weights[tid] = pick.weight;
  }
}
