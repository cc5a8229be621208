// A model's Programs: the one loop over its layers, for one row with caches (the decode step) or a
// prompt chunk.
//
// A decode step is a Program of the whole model: token and position are in buffers, so that it
// stays the same until keys and values outgrow their capacity. Of a prompt chunk a Program holds
// what our primitives launch; between them MLX's own ops run (norms, residuals, attention over the
// prompt and its gate), whose results are inputs.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "layer_program.h"
#include "ops/step_options.h"

namespace lily {

// Whether the decode step has kernels for this model, or why not, naming the layer.
Choice step_kernel(Target target, const ModelSpec& model);

struct StepProgram {
  explicit StepProgram(Program p) : program(std::move(p)) {}

  Program program;
  std::vector<SlotId> weights;  // in the order of for_each(model)
  std::vector<Builder::Table> tables;
  struct Caches {
    SlotId first, first_next;  // conv state read and written, or keys (first_next is not used)
    SlotId second;             // DeltaNet state, updated in place, or values
  };
  std::vector<Caches> caches;  // by layer
  SlotId token, position, next;
  SlotId logits;  // with options.logits
};

// capacities: rows of each layer's keys and values (0 for DeltaNet layers). Throws
// std::invalid_argument for options that no kernel is compiled for.
std::shared_ptr<StepProgram> step_program(Target target, const ModelSpec& model,
                                          const std::vector<int>& capacities,
                                          const StepOptions& options);

// What primitives launch for a prompt chunk of `rows` tokens of one sequence.
std::shared_ptr<LayerProgram> chunk_program(Target target, const ModelSpec& model, int rows,
                                            const LayerOptions& options = {});

// The pipelines of all that a model runs on a target with this: decode steps at these capacities,
// and layer primitives at any number of rows.
Pipelines step_pipelines(Target target, const ModelSpec& model, const std::vector<int>& capacities,
                         const StepOptions& options);
Pipelines layer_pipelines(Target target, const ModelSpec& model);

// The step's Programs of one model. Building one takes the CPU 5 ms at 40 layers, between a prompt
// and its first token, so all sequences share them; those used last are kept.
class StepPrograms {
 public:
  StepPrograms(Target target, ModelSpec model)
      : target(target), model(std::move(model)), choice(step_kernel(target, this->model)) {}

  const Target target;
  const ModelSpec model;
  const Choice choice;

  // Throws what step_program throws. From any thread.
  std::shared_ptr<const StepProgram> at(const std::vector<int>& capacities,
                                        const StepOptions& options);
  size_t size() const;

 private:
  struct Kept {
    std::vector<int> capacities;
    StepOptions options;
    std::shared_ptr<const StepProgram> program;
  };
  mutable std::mutex mutex_;
  std::list<Kept> kept_;  // the one used last comes first
};

}  // namespace lily
