#include "ops/embed_head.h"

#include <algorithm>

#include "../metal/params.h"
#include "ops/linear.h"

namespace lily {

// ---- Any number of rows

Choice embed_kernel(Target target, Type t, const MatrixSpec& m) {
  Choice c = first_refusal(check_activations(target, t), check_matrix(target, t, m));
  return c ? chosen(target == Target::cpu ? "reference" : "embed_rows") : c;
}

namespace {

// A matrix read row by row: each of its rows counts as an expert.
MatrixSlots by_row(const MatrixSlots& m) {
  MatrixSlots rows = m;
  rows.spec.experts = m.spec.rows;
  rows.spec.rows = 1;
  return rows;
}

}  // namespace

void add_embed(Builder& b, const std::string& label, int count, SlotId ids, const MatrixSlots& m,
               SlotId y) {
  Dispatch d(kernels().at("embed_rows_" + suffix(b.t)));
  set_constants(d, weight_format(m.spec, b.t));
  d.read("ids", ids);
  read_matrix_always(d, by_row(m), "w", "scales", "biases", std::min(count, m.spec.rows));
  d.write("out", y).value("p", Value::of_struct(EmbedParams{m.spec.rows, m.spec.cols}));
  d.grid(ceil_div(m.spec.cols, 1024), count).threads(128);
  b.add(std::move(d), label);
}

std::shared_ptr<LayerProgram> embed_program(Target target, Type t, int count, const MatrixSpec& m) {
  Builder b("embed", target, t);
  std::vector<SlotId> inputs{b.input("ids", 4 * size_t(count))};
  MatrixSlots slots = b.matrix("embedding", m);
  inputs.insert(inputs.end(), b.weights.begin(), b.weights.end());
  SlotId y = b.output("y", b.size(size_t(count) * m.cols));
  add_embed(b, "embed", count, inputs[0], slots, y);
  return finished(b, inputs, {y});
}

void embed_pipelines(Type t, const MatrixSpec& format, Pipelines& out) {
  add_pipeline(out, "embed_rows_" + suffix(t), weight_format(format, t));
}

Choice rms_norm_kernel(Target target, Type t, const VectorSpec& weight) {
  if (target == Target::cpu) {
    return chosen("reference");
  }
  Choice c = first_refusal(check_activations(target, t),
                           check_vector(target, t, weight, "the norm's weight"),
                           check_multiple("the last axis", weight.size, 4));
  return c ? chosen("rms_norm_rows") : c;
}

std::shared_ptr<LayerProgram> rms_norm_program(Target target, Type t, int rows, int dim,
                                               float eps) {
  Builder b("rms_norm", target, t);
  SlotId x = b.input("x", b.size(size_t(rows) * dim));
  SlotId weight = b.weight("weight", b.size(dim));
  SlotId y = b.output("y", b.size(size_t(rows) * dim));
  Dispatch d(kernels().at("rms_norm_rows_" + suffix(t)));
  d.read("h", x).read("weight", weight).write("x", y);
  d.value("hidden", int32_t{dim}).value("eps", eps).grid(rows).threads(256);
  b.add(std::move(d), "rms_norm");
  return finished(b, {x, weight}, {y});
}

void add_residual(Builder& b, int values, SlotId h, SlotId y, SlotId out) {
  Dispatch d(kernels().at("add_rows_" + suffix(b.t)));
  d.read("h", h).read("y", y).write("out", out).value("count", int32_t{values});
  d.grid(ceil_div(values, 1024)).threads(256);
  b.add(std::move(d), "residual");
}

// ---- One row

void add_embed_row(Builder& b, SlotId token, const MatrixSlots& m, SlotId h) {
  const int simdgroups = std::min(8, std::max(1, m.spec.cols / 256));
  Dispatch d(kernels().at("embed_row_" + suffix(b.t)));
  set_constants(d, {{"kK", int32_t{m.spec.cols}},
                    {"kRows0", int32_t{m.spec.rows}},
                    {"kBits0", int32_t{kernel_bits(m.spec, b.t)}},
                    {"kGroup", int32_t{m.quantized() ? m.spec.group : 64}},
                    {"kSimdgroups", int32_t{simdgroups}},
                    {"kQuantized0", m.quantized()}});
  d.read("token", token);
  read_matrix(d, by_row(m), "w", "scales", "biases", 1);
  d.write("h", h);
  d.grid(ceil_div(m.spec.cols / 8, 32 * simdgroups)).threads(32 * simdgroups);
  b.add(std::move(d), "embedding");
}

void add_norm_row(Builder& b, int dim, float eps, SlotId h, SlotId weight, SlotId x) {
  constexpr int kSimdgroups = 8;
  Dispatch d(kernels().at("norm_row_" + suffix(b.t)));
  set_constants(d, {{"kK", int32_t{dim}}, {"kSimdgroups", int32_t{kSimdgroups}}, {"kEps", eps}});
  d.read("h", h).read("weight", weight).write("y", x).grid(1).threads(32 * kSimdgroups);
  b.add(std::move(d), "norm");
}

void add_head_row(Builder& b, const MatrixSlots& head, std::optional<SlotId> norm, float eps,
                  SlotId h, SlotId next, std::optional<SlotId> logits, const StepOptions& o) {
  GemvOptions options;
  options.norm = norm;
  options.eps = eps;
  options.tiles = o.tiles;
  options.mma = o.mma;
  const GemvTile tile = gemv_tile(b.t, {head.spec}, options, "head");
  const int partials = gemv_groups({head.spec}, tile);
  SlotId values = b.scratch("partial values", 4 * size_t(partials));
  SlotId ids = b.scratch("partial ids", 4 * size_t(partials));
  Dispatch d(kernels().at((tile.mma ? "mma_head_gemv_" : "head_gemv_") + suffix(b.t) + "_k" +
                          std::to_string(kmax(head.spec.cols))));
  Constants constants = gemv_constants(b.t, {head.spec}, tile, options);
  constants.push_back({"kWriteLogits", logits.has_value()});
  set_constants(d, constants);
  d.read("h", h);
  if (norm) {
    d.read("norm_weight", *norm);
  }
  read_matrix(d, head, "w", "scales", "biases");
  if (logits) {
    d.write("logits", *logits);
  }
  d.write("partial_values", values).write("partial_ids", ids);
  d.grid(partials).threads(32 * tile.simdgroups);
  b.add(std::move(d), "head");

  int simdgroups = tile.simdgroups;
  override_field(simdgroups, o.tiles, "argmax.simdgroups");
  Dispatch a(kernels().at("argmax_final"));
  set_constants(a, {{"kSimdgroups", int32_t{simdgroups}}, {"kPartials", int32_t{partials}}});
  a.read("partial_values", values).read("partial_ids", ids).write("token", next);
  a.grid(1).threads(32 * simdgroups);
  b.add(std::move(a), "argmax");
}

}  // namespace lily
