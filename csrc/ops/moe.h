// The mixture of experts: router, top-k, experts with SwiGLU, shared expert, combination.
//
//   moe_rows   up to 16 rows: every chosen expert's weights are read once
//   (metal/linear/gemv_rows.h) moe_gemm   rows grouped by expert in blocks of 16, 32 or 64
//   (metal/moe/moe_gemm.h) the decode step's own form for one row (metal/moe/moe_decode.h,
//   moe_route.h)
#pragma once

#include <memory>
#include <string>

#include "layer_program.h"
#include "ops/step_options.h"

namespace lily {

// Which of them serves, or why none does.
Choice moe_kernel(Target target, Type t, const Moe<Specs>& m, int rows);
// Whether the decode step's form does.
Choice moe_step_kernel(Target target, Type t, const Moe<Specs>& m);

// What the router's product would make, from elsewhere: [rows, experts] and [rows].
struct GivenLogits {
  SlotId logits, shared_logit;
};
// x, out [rows, hidden].
void add_moe(Builder& b, int rows, const Moe<Slots>& w, SlotId x, SlotId out,
             const std::string& name, std::optional<GivenLogits> given = std::nullopt);
// given: the two arrays of GivenLogits follow x.
std::shared_ptr<LayerProgram> moe_program(Target target, Type t, int rows, const Moe<Specs>& m,
                                          const LayerOptions& options = {}, bool given = false);
void moe_pipelines(Target target, Type t, const Moe<Specs>& m, Pipelines& out);

// Threads of the decode step's expert kernels (moe_decode.h).
struct MoeTile {
  int up_lanes, up_r, up_u, up_simdgroups;
  int down_lanes, down_r, down_u;

  int up_rows() const {
    return up_simdgroups * up_r * (32 / up_lanes);
  }
  int down_rows() const {
    return down_r * (32 / down_lanes);
  }
};

// What the router's projection wrote for the decode step's form.
struct MoeRow {
  SlotId x, logits, shared_logit, ids, weights;
};
MoeRow moe_row(Builder& b, const Moe<Slots>& w, const std::string& name);
// out = rnd(h + rnd(y)). `ahead`: a matrix of which the pick asks for the first bytes, where
// options say so.
void add_moe_row(Builder& b, const Moe<Slots>& w, const MoeRow& row, const std::string& name,
                 SlotId h, SlotId out, const MatrixSlots* ahead, const StepOptions& options);

}  // namespace lily
