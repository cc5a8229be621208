// Full attention with an output gate, between its projections.
//
//   attention_prepare   q and k norm and rotary for any batch and length
//   (metal/attention/attention_prepare.h); attention over a prompt
//                    is then MLX's own op
//   the decode step's own form for one row: prepare, attend in splits of the cache, merge
//   (metal/attention/attention_decode.h, attention_decode_mma.h)
#pragma once

#include <memory>
#include <string>

#include "layer_program.h"
#include "ops/step_options.h"

namespace lily {

// mask: "none", "causal", "bool" or "additive".
Choice attention_kernel(Target target, Type t, const AttentionShape& shape,
                        const VectorSpec& q_norm, const VectorSpec& k_norm,
                        const std::string& mask);
Choice attention_step_kernel(Target target, Type t, const Attention<Specs>& layer);

struct AttentionRows {
  int B = 1, T = 1;
  bool offset_each = false;  // an offset a batch row
};
// k to [B, kv_heads, T, head_dim]; v too, where it is given.
void add_attention_prepare(Builder& b, const AttentionShape& shape, const AttentionRows& rows,
                           SlotId q_gate, SlotId k, SlotId q_norm, SlotId k_norm, SlotId offset,
                           SlotId q_out, SlotId k_out);
std::shared_ptr<LayerProgram> attention_prepare_program(Target target, Type t,
                                                        const AttentionShape& shape,
                                                        const AttentionRows& rows);
void attention_pipelines(Type t, Pipelines& out);

// One row over a cache of `capacity` rows; keys and values get its own.
struct AttentionSlots {
  SlotId q_gate, k, v, q_norm, k_norm, keys, values, position, out;
};
void add_attention_row(Builder& b, const AttentionShape& shape, const AttentionSlots& s,
                       int capacity, const std::string& name, const StepOptions& options);

}  // namespace lily
