#include "layer_program.h"

namespace lily {

std::shared_ptr<LayerProgram> finished(Builder& b, std::vector<SlotId> inputs,
                                       std::vector<SlotId> outputs) {
  b.program.finish();
  return std::make_shared<LayerProgram>(LayerProgram{
      std::move(b.program), std::move(inputs), std::move(outputs), std::move(b.tables), {}});
}

void add_pipeline(Pipelines& pipelines, const std::string& kernel, const Constants& constants) {
  Dispatch d(kernels().at(kernel));
  set_constants(d, constants);
  Pipeline p = pipeline_of(d);
  pipelines.emplace(p.key, p);
}

}  // namespace lily
