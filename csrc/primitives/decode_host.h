// The decode step on the Metal host: the Program that a GPU would run, on the CPU.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "primitives/plan.h"

namespace lily {

// A step's Program, compiled and with its weights bound.
struct HostStep;
// Null where the reference runs; why is counted. capacities: rows of each layer's keys, 0 for
// DeltaNet. Changes no cache, so that a kernel that does not compile leaves them as they were.
std::shared_ptr<const HostStep> host_step(const DecodePlan& plan,
                                          const std::vector<int>& capacities, bool with_logits);

// The arrays of one layer's caches in a step: conv state (old and new) and state, or keys and
// values.
struct StepCaches {
  mx::array first, second;
  std::optional<mx::array> old_conv;
};
// Queues the step; `owner` keeps the caches alive until it has run.
void run_on_host(mx::Stream s, const std::shared_ptr<const HostStep>& step,
                 std::shared_ptr<const void> owner, const std::vector<StepCaches>& caches,
                 int position, const mx::array& token, mx::array& next, mx::array* logits);

}  // namespace lily
