// What surrounds the layers: embedding, RMS norm, residual, and the head with its argmax.
#pragma once

#include <memory>
#include <string>

#include "layer_program.h"
#include "ops/step_options.h"

namespace lily {

// ---- Any number of rows

Choice embed_kernel(Target target, Type t, const MatrixSpec& m);
void add_embed(Builder& b, const std::string& label, int count, SlotId ids, const MatrixSlots& m,
               SlotId y);
std::shared_ptr<LayerProgram> embed_program(Target target, Type t, int count, const MatrixSpec& m);
void embed_pipelines(Type t, const MatrixSpec& format, Pipelines& out);

Choice rms_norm_kernel(Target target, Type t, const VectorSpec& weight);
std::shared_ptr<LayerProgram> rms_norm_program(Target target, Type t, int rows, int dim, float eps);

// out = rnd(h + y).
void add_residual(Builder& b, int values, SlotId h, SlotId y, SlotId out);

// ---- One row, in the decode step

void add_embed_row(Builder& b, SlotId token, const MatrixSlots& m, SlotId h);
void add_norm_row(Builder& b, int dim, float eps, SlotId h, SlotId weight, SlotId x);

// The last norm, the head and its argmax: the id of the largest logit to `next`, and with
// options.logits the logits. `x` is the input where the norm is a dispatch of its own.
void add_head_row(Builder& b, const MatrixSlots& head, std::optional<SlotId> norm, float eps,
                  SlotId h, SlotId next, std::optional<SlotId> logits, const StepOptions& options);

}  // namespace lily
