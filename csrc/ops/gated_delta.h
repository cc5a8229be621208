// The Gated DeltaNet mixer between its input and output projections: convolution, gates, delta
// rule, gated norm.
//
//   gated_delta_step   one row of one sequence, without a mask
//   (metal/gated_delta/gated_delta_step.h) gated_delta_scan   any batch and length
//   (metal/gated_delta/gated_delta_conv.h, gated_delta_scan.h)
#pragma once

#include <memory>
#include <string>

#include "layer_program.h"
#include "ops/step_options.h"

namespace lily {

// The mixer's own parameters.
struct GatedDeltaVectors {
  VectorSpec conv, A_log, dt_bias, norm;
};

// Which of them serves, or why none does. rows: of all sequences.
Choice gated_delta_kernel(Target target, Type t, const GatedDeltaShape& shape,
                          const GatedDeltaVectors& v, int rows, bool masked);
// Which of the two runs where there is a kernel.
std::string gated_delta_form(Target target, int rows, bool masked);
// Whether the decode step has kernels for the layer.
Choice gated_delta_step_kernel(Target target, Type t, const GatedDelta<Specs>& layer);

struct GatedDeltaRows {
  int B = 1, T = 1;
  bool has_conv_state = true, has_state = true, has_mask = false, has_lengths = false;
};
Scan scan_for(Target target);

struct GatedDeltaSlots {
  SlotId qkv, z, b, a, conv_weight, A_log, dt_bias, norm, conv_state, state, mask, lengths;
  SlotId out, conv_next, state_next;
};
// kernel: gated_delta_kernel's answer.
void add_gated_delta(Builder& b, const std::string& kernel, const GatedDeltaShape& shape,
                     const GatedDeltaRows& rows, const GatedDeltaSlots& s, const std::string& name);
std::shared_ptr<LayerProgram> gated_delta_program(Target target, Type t,
                                                  const GatedDeltaShape& shape,
                                                  const GatedDeltaRows& rows,
                                                  const LayerOptions& options = {});
void gated_delta_pipelines(Target target, Type t, Pipelines& out);

// One row of the decode step; state and state_next may be one slot.
void add_gated_delta_row(Builder& b, const GatedDeltaShape& shape, const GatedDeltaSlots& s,
                         const std::string& name, const StepOptions& options);

}  // namespace lily
