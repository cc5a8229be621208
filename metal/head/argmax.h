// The token of the greatest logit, after head.h's first stage.
//
// argmax_final: one threadgroup; the greatest of those that head_gemv's threadgroups kept, to the token
// slot; adds 1 to the position.
//
// argmax_logits: the first stage apart, over logits in memory (ablation, or logits changed by a
// processor).
//
// Bytes: 8 a threadgroup of the first stage; argmax_logits 4 N.
#pragma once

#include "head/head.h"

// Names of kernels that are no templates are their own host names, so these stay out of the
// namespace.

[[kernel]] void argmax_final(const device float* partial_values [[buffer(0)]],
                             const device uint* partial_ids [[buffer(1)]],
                             device uint* token [[buffer(2)]],
                             device int* position [[buffer(3), function_constant(lily::kAdvance)]],
                             uint tid [[thread_index_in_threadgroup]],
                             uint simdgroup [[simdgroup_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float values[lily::kMaxSimdgroups];
  threadgroup uint ids[lily::kMaxSimdgroups];
  lily::Best best = lily::no_best();
  lily::wait_for_previous();
  for (int i = int(tid); i < lily::kPartials; i += lily::kSimdgroups * 32) {
    lily::keep_better(best, partial_values[i], partial_ids[i]);
  }
  lily::threadgroup_best(best, values, ids, simdgroup, lane, lily::kSimdgroups);
  if (tid == 0) {
    token[0] = best.id == 0xffffffffu ? 0u : best.id;
    if (lily::kAdvance) {
      position[0] += 1;
    }
  }
}

[[kernel]] void argmax_logits(const device float* logits [[buffer(0)]],
                              device float* partial_values [[buffer(1)]],
                              device uint* partial_ids [[buffer(2)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint tid [[thread_index_in_threadgroup]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float values[lily::kMaxSimdgroups];
  threadgroup uint ids[lily::kMaxSimdgroups];
  const int threads = lily::kSimdgroups * 32;
  lily::Best best = lily::no_best();
  for (int i = int(group.x) * threads + int(tid); i < lily::kRows0;
       i += lily::kPartials * threads) {
    lily::keep_better(best, logits[i], uint(i));
  }
  lily::threadgroup_best(best, values, ids, simdgroup, lane, lily::kSimdgroups);
  if (tid == 0) {
    partial_values[group.x] = best.value;
    partial_ids[group.x] = best.id;
  }
}
