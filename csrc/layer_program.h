// A layer primitive's Program.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "builder.h"

namespace lily {

// Inputs and outputs in the order of the primitive's arrays.
struct LayerProgram {
  Program program;
  std::vector<SlotId> inputs, outputs;
  std::vector<Builder::Table> tables;
  mutable std::shared_ptr<const void> on_device;  // the tables there, kept by a backend
};

// Binds a primitive's arrays to its slots; bind(slot, array).
template <typename Array, typename Bind>
void bind_layer(const LayerProgram& layer, const std::vector<Array>& in,
                const std::vector<Array>& out, Bind&& bind) {
  for (size_t i = 0; i < layer.inputs.size(); ++i) {
    bind(layer.inputs[i], in.at(i));
  }
  for (size_t i = 0; i < layer.outputs.size(); ++i) {
    bind(layer.outputs[i], out.at(i));
  }
}

std::shared_ptr<LayerProgram> finished(Builder& b, std::vector<SlotId> inputs,
                                       std::vector<SlotId> outputs);

// Kernels with their constants, by key.
using Pipelines = std::map<std::string, Pipeline>;
void add_pipeline(Pipelines& pipelines, const std::string& kernel, const Constants& constants);

}  // namespace lily
