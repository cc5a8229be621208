// The decode step on the Metal host: the Program that a GPU would run, on the CPU.
#pragma once

#include <memory>
#include <vector>

#include "primitives/successors.h"

namespace lily {

// A step's Program, compiled and with its weights bound.
struct HostStep;
// Null where the reference runs; why is counted. capacities: rows of each layer's keys, 0 for
// DeltaNet. Changes no cache, so that a kernel that does not compile leaves them as they were.
std::shared_ptr<const HostStep> host_step(const DecodePlan& plan,
                                          const std::vector<int>& capacities, bool with_logits);

// Queues the step, which keeps `caches` until it has run; `used` are its arrays.
void run_on_host(mx::Stream s, const std::shared_ptr<const HostStep>& step,
                 std::shared_ptr<const Successors> caches,
                 const std::vector<Successors::Used>& used, int position, const mx::array& token,
                 mx::array& next, mx::array* logits);

}  // namespace lily
