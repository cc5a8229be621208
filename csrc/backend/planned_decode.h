// What the GPU forms of the decode step share: the model's shapes, checked once, and the Program
// for the capacities that the caches have.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "primitives/decode.h"
#include "primitives/gpu_decode.h"
#include "programs/metal_host.h"

namespace lily {

class PlannedDecode : public GpuDecode {
 protected:
  // `backend` opens the sentence of an error.
  PlannedDecode(const DecodePlan& plan, const std::string& backend) : plan_(plan) {
    const std::string& refusal = programs_of(plan)->refusal;  // the plan keeps it
    if (!refusal.empty()) {
      throw std::invalid_argument("lily_mlx, " + backend + ": no decode kernel: " + refusal);
    }
    for (const mx::array* a : plan.arrays()) {
      if (!a->flags().row_contiguous) {
        throw std::invalid_argument("lily_mlx, " + backend + ": a weight of shape " +
                                    shape_text(*a) +
                                    " is not contiguous; make it so with mx.contiguous");
      }
    }
  }

  // Rows of each layer's keys and values, 0 for DeltaNet layers.
  std::vector<int> capacities(const std::vector<CachePair>& layers) const {
    std::vector<int> c;
    for (size_t i = 0; i < layers.size(); ++i) {
      c.push_back(plan_.layers[i].delta ? 0 : layers[i].first->shape(2));
    }
    return c;
  }

  const DecodePlan& plan_;  // the state that owns this keeps it alive
  std::shared_ptr<const DecodeProgram> program_;
  std::vector<int> capacities_;  // that program_ was built for
};

}  // namespace lily
