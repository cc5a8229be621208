// What the GPU forms of the decode step share: the model's shapes, checked once, and the Program
// for the capacities that the caches have.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "primitives/decode.h"
#include "primitives/gpu_decode.h"
#include "primitives/successors.h"
#include "run.h"

namespace lily {

class PlannedDecode : public GpuDecode {
 protected:
  // `backend` opens the sentence of an error.
  PlannedDecode(const DecodePlan& plan, const std::string& backend)
      : plan_(plan), programs_(programs_of(plan, gpu_target())) {
    if (!programs_->choice) {
      throw std::invalid_argument("lily_mlx, " + backend +
                                  ": no decode kernel: " + programs_->choice.reason);
    }
    for (const mx::array* a : plan.arrays()) {
      if (!a->flags().row_contiguous) {
        throw std::invalid_argument("lily_mlx, " + backend + ": a weight of shape " +
                                    shape_text(*a) +
                                    " is not contiguous; make it so with mx.contiguous");
      }
    }
  }

  const DecodePlan& plan_;  // whoever steps keeps it alive
  const std::shared_ptr<StepPrograms> programs_;
  std::shared_ptr<const StepProgram> program_;
  std::vector<int> capacities_;  // that program_ was built for: set once all is built
};

}  // namespace lily
