// How a decode step runs on a GPU: one Program for the whole model, its caches in fixed buffers.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mlx/array.h"
#include "mlx/stream.h"

namespace lily {

struct DecodePlan;
struct Successors;

// The caches of one layer: (conv state, DeltaNet state) or (keys, values), absent until first
// needed.
struct CachePair {
  std::optional<mlx::core::array> first, second;
};

class GpuDecode {
 public:
  virtual ~GpuDecode() = default;

  // Queues one step. `layers` are the state's caches, and `next` gets what takes their place once
  // this has returned: a step that throws changes neither `layers` nor what they hold. `next` is
  // kept until the step has run. out is {next token} or {next token, logits}, already allocated.
  virtual void step(const std::vector<CachePair>& layers, const std::shared_ptr<Successors>& next,
                    int position, const mlx::core::array& token, std::vector<mlx::core::array>& out,
                    mlx::core::Stream stream) = 0;

  // Times the last step's kernels on the caches as they are: the dispatches of one label run after
  // each other, over all layers, so that weights come from memory. Results are not kept.
  struct Timing {
    std::string label;
    size_t dispatches;
    double seconds;  // of all of them
  };
  virtual std::vector<Timing> profile(mlx::core::Stream stream) = 0;
};

// Rows that keys and values are given when `needed` no longer fit in `capacity`: whole blocks of
// 256, and an eighth more than there was, so that a long generation copies each key a few times
// only.
int grown_capacity(int capacity, int needed);

}  // namespace lily
