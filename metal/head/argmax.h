// The token of the greatest logit, after head.h's first stage.
//
// argmax_final: one threadgroup; the greatest of those that head_gemv's threadgroups kept, to the token
// slot.
//
// Bytes: 8 a threadgroup of the first stage.
#pragma once

#include "head/head.h"

// The name of a kernel that is no template is its host name, so this stays out of the namespace.

[[kernel]] void argmax_final(const device float* partial_values [[buffer(0)]],
                             const device uint* partial_ids [[buffer(1)]],
                             device uint* token [[buffer(2)]],
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
  }
}
