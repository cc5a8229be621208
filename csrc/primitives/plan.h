// The weights that a decode step runs with.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model.h"
#include "primitives/layers.h"

namespace lily {

struct HostSteps;
class StepPrograms;
class StepPool;

// The model's weights, evaluated and checked once; immutable afterwards.
struct DecodePlan {
  Model<Weights> model;
  mx::Dtype dtype = mx::bfloat16;                  // of activations
  mutable std::shared_ptr<StepPrograms> programs;  // see programs_of
  mutable std::shared_ptr<HostSteps> host;         // these with weights bound, on the Metal host
  mutable std::shared_ptr<StepPool> steps;         // what ended sequences leave, on NVIDIA

  // Evaluates every array and throws on the first that does not fit.
  void prepare();
  std::vector<const mx::array*> arrays() const;
};

// The plan's Programs for a GPU, made by the first who asks. From any thread.
std::shared_ptr<StepPrograms> programs_of(const DecodePlan& plan, Target target);

}  // namespace lily
