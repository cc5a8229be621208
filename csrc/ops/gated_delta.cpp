#include "ops/gated_delta.h"

#include <stdexcept>

#include "../metal/params.h"

namespace lily {
namespace {

constexpr int kHeadDim = 128;  // Dk and Dv of the kernels

}  // namespace

std::string gated_delta_form(Target target, int rows, bool masked) {
  return is_metal(target) && rows == 1 && !masked ? "gated_delta_step" : "gated_delta_scan";
}

Choice gated_delta_kernel(Target target, Type t, const GatedDeltaShape& shape,
                          const GatedDeltaVectors& v, int rows, bool masked) {
  if (target == Target::cpu) {
    Choice c = first_refusal(check_multiple("key_dim", shape.key_dim, 16),
                             check_range("key_dim", shape.key_dim, 16, 256),
                             check_multiple("value_dim", shape.value_dim, 4),
                             check_range("value_dim", shape.value_dim, 4, 256));
    return c ? chosen("reference") : c;
  }
  Choice c = first_refusal(check_activations(target, t),
                           check_range("key_dim", shape.key_dim, kHeadDim, kHeadDim),
                           check_range("value_dim", shape.value_dim, kHeadDim, kHeadDim),
                           check_range("convolution width", shape.conv_width, 4, 4),
                           check_vector(target, t, v.conv, "conv1d.weight"),
                           check_vector(target, Type::fp32, v.A_log, "A_log"),
                           check_vector(target, t, v.dt_bias, "dt_bias"),
                           check_vector(target, t, v.norm, "norm.weight"));
  if (!c) {
    return c;
  }
  if (rows == kAnyRows) {
    return chosen(is_metal(target) ? "gated_delta_step, gated_delta_scan" : "gated_delta_scan");
  }
  return chosen(gated_delta_form(target, rows, masked));
}

Choice gated_delta_step_kernel(Target target, Type t, const GatedDelta<Specs>& l) {
  return gated_delta_kernel(target, t, l.shape, {l.conv, l.A_log, l.dt_bias, l.norm}, 1, false);
}

Scan scan_for(Target target) {
  // One threadgroup a head leaves most of a large GPU idle: there the norm comes apart, so that
  // more can scan.
  return target == Target::cuda ? Scan::apart : Scan::norm;
}

// ---- Any batch and length

void add_gated_delta(Builder& b, const std::string& kernel, const GatedDeltaShape& shape,
                     const GatedDeltaRows& d, const GatedDeltaSlots& s, const std::string& name) {
  if (kernel == "gated_delta_step") {
    add_gated_delta_row(b, shape, s, name, {});
    return;
  }
  const size_t rows = size_t(d.B) * d.T;
  const Scan scan = b.form.scan.value_or(scan_for(b.target));
  SlotId q = b.scratch(name + "q", b.size(rows * shape.key_heads * 128));
  SlotId k = b.scratch(name + "k", b.size(rows * shape.key_heads * 128));
  SlotId v = b.scratch(name + "v", b.size(rows * shape.value_heads * 128));
  SlotId g = b.scratch(name + "g", 4 * rows * shape.value_heads);
  SlotId beta = b.scratch(name + "beta", 4 * rows * shape.value_heads);
  const std::string t = suffix(b.t);

  Dispatch c(kernels().at("gated_delta_conv_rows_" + t));
  c.read("qkv", s.qkv).read("conv_state", s.conv_state).read("weight", s.conv_weight);
  c.read("a", s.a).read("b", s.b).read("a_log", s.A_log).read("dt_bias", s.dt_bias);
  if (d.has_mask) {
    c.read("mask", s.mask);
  } else {
    read_nothing(c, "mask", s.A_log);
  }
  if (d.has_lengths) {
    c.read("lengths", s.lengths);
  } else {
    read_nothing(c, "lengths", s.A_log);
  }
  c.write("q", q).write("k", k).write("v", v).write("g", g).write("beta", beta);
  c.write("conv_state_out", s.conv_next);
  c.value("p", Value::of_struct(
                   ConvParams{d.T, shape.key_heads, shape.value_heads, d.has_mask, d.has_lengths}));
  c.grid(ceil_div(d.T, 32) + 1, 2 * shape.key_heads + shape.value_heads + 1, d.B).threads(128);
  b.add(std::move(c), "delta conv");

  const Value params =
      Value::of_struct(GatedDeltaParams{d.T, shape.key_heads, shape.value_heads, shape.eps});
  if (scan == Scan::norm) {
    Dispatch n(kernels().at("gated_delta_scan_norm_" + t + "_r2"));
    n.read("q", q).read("k", k).read("v", v).read("g", g).read("beta", beta);
    n.read("state_in", s.state).write("state_out", s.state_next).read("z", s.z);
    n.read("weight", s.norm).write("out", s.out).value("p", params);
    n.grid(shape.value_heads, d.B).threads(512);
    b.add(std::move(n), "delta scan");
    return;
  }
  SlotId y = b.scratch(name + "y", 4 * rows * shape.value_heads * 128);
  Dispatch r(kernels().at((scan == Scan::block ? "gated_delta_scan_block_" : "gated_delta_scan_") +
                          t + "_r2"));
  r.read("q", q).read("k", k).read("v", v).read("g", g).read("beta", beta);
  r.read("state_in", s.state).write("state_out", s.state_next).write("y", y);
  r.value("p", params).grid(128 / 32, shape.value_heads, d.B).threads(128);
  b.add(std::move(r), "delta scan");
  const int norm_rows = static_cast<int>(rows) * shape.value_heads;
  Dispatch n(kernels().at("gated_norm_" + t));
  n.read("y", y).read("z", s.z).read("weight", s.norm).write("out", s.out);
  n.value("rows", int32_t{norm_rows}).value("eps", shape.eps);
  n.grid(ceil_div(norm_rows, 4)).threads(128);
  b.add(std::move(n), "delta norm");
}

std::shared_ptr<LayerProgram> gated_delta_program(Target target, Type t,
                                                  const GatedDeltaShape& shape,
                                                  const GatedDeltaRows& d,
                                                  const LayerOptions& options) {
  Builder b("gated_delta", target, t);
  b.form = options;
  const size_t rows = size_t(d.B) * d.T;
  const size_t conv_bytes = b.size(size_t(d.B) * 3 * shape.channels());
  const size_t state_bytes = 4 * size_t(d.B) * shape.value_heads * 128 * 128;
  GatedDeltaSlots s;
  s.qkv = b.input("qkv", b.size(rows * shape.channels()));
  s.z = b.input("z", b.size(rows * shape.value_heads * 128));
  s.b = b.input("b", b.size(rows * shape.value_heads));
  s.a = b.input("a", b.size(rows * shape.value_heads));
  s.conv_weight = b.weight("conv1d.weight", b.size(size_t(shape.channels()) * 4));
  s.A_log = b.weight("A_log", 4 * size_t(shape.value_heads));
  s.dt_bias = b.weight("dt_bias", b.size(shape.value_heads));
  s.norm = b.weight("norm.weight", b.size(128));
  std::vector<SlotId> inputs{s.qkv, s.z, s.b, s.a, s.conv_weight, s.A_log, s.dt_bias, s.norm};
  auto given = [&](bool has, const char* name, size_t bytes) {
    if (has) {
      inputs.push_back(b.input(name, bytes));
      return inputs.back();
    }
    std::vector<char> zeros(bytes, 0);
    return b.table(name, zeros.data(), bytes);
  };
  s.conv_state = given(d.has_conv_state, "conv_state", conv_bytes);
  s.state = given(d.has_state, "state", state_bytes);
  if (d.has_mask) {
    s.mask = given(true, "mask", rows);
  }
  if (d.has_lengths) {
    s.lengths = given(true, "lengths", 4 * size_t(d.B));
  }
  s.out = b.output("out", b.size(rows * shape.value_heads * 128));
  s.conv_next = b.output("conv_state_next", conv_bytes);
  s.state_next = b.output("state_next", state_bytes);
  const bool masked = d.has_mask || d.has_lengths;
  add_gated_delta(b, gated_delta_form(target, d.B * d.T, masked), shape, d, s, "");
  return finished(b, inputs, {s.out, s.conv_next, s.state_next});
}

void gated_delta_pipelines(Target target, Type t, Pipelines& out) {
  const std::string dtype = suffix(t);
  add_pipeline(out, "gated_delta_conv_rows_" + dtype, {});
  if (scan_for(target) == Scan::norm) {
    add_pipeline(out, "gated_delta_scan_norm_" + dtype + "_r2", {});
  } else {
    add_pipeline(out, "gated_delta_scan_" + dtype + "_r2", {});
    add_pipeline(out, "gated_norm_" + dtype, {});
  }
}

// ---- One row

void add_gated_delta_row(Builder& b, const GatedDeltaShape& shape, const GatedDeltaSlots& s,
                         const std::string& name, const StepOptions& options) {
  auto constants = [&](int simdgroups) -> Constants {
    return {{"kKeyHeads", int32_t{shape.key_heads}},
            {"kValueHeads", int32_t{shape.value_heads}},
            {"kGatedDeltaSimdgroups", int32_t{simdgroups}},
            {"kGatedDeltaEps", shape.eps}};
  };
  if (options.fuse_delta) {
    int simdgroups = 16;
    override_field(simdgroups, options.tiles, "delta step.simdgroups");
    if (simdgroups != 8 && simdgroups != 16 && simdgroups != 32) {
      throw std::invalid_argument("delta step: no kernel for " + std::to_string(simdgroups) +
                                  " simdgroups; 8, 16 and 32 have one");
    }
    Dispatch d(kernels().at("gated_delta_step_" + suffix(b.t)));
    set_constants(d, constants(simdgroups));
    d.read("qkv", s.qkv)
        .read("z", s.z)
        .read("b", s.b)
        .read("a", s.a)
        .read("conv_state", s.conv_state);
    d.read("conv_weight", s.conv_weight).read("a_log", s.A_log).read("dt_bias", s.dt_bias);
    d.read("norm_weight", s.norm).read("state", s.state).write("conv_state_out", s.conv_next);
    d.write("state_out", s.state_next).write("out", s.out).in_place("state", "state_out");
    d.grid(shape.value_heads).threads(32 * simdgroups);
    b.add(std::move(d), "delta step");
    return;
  }
  constexpr int kSimdgroups = 8;
  const int inner = shape.value_heads * shape.value_dim;
  SlotId hat = b.scratch(name + "hat", b.size(shape.channels()));
  SlotId y = b.scratch(name + "y32", 4 * size_t(inner));
  Dispatch c(kernels().at("gated_delta_conv_step_" + suffix(b.t)));
  set_constants(c, constants(kSimdgroups));
  c.read("qkv", s.qkv).read("conv_state", s.conv_state).read("conv_weight", s.conv_weight);
  c.write("conv_state_out", s.conv_next).write("hat", hat);
  c.grid(2 * shape.key_heads + shape.value_heads).threads(kHeadDim);
  b.add(std::move(c), "delta conv");
  Dispatch d(kernels().at("gated_delta_delta_step_" + suffix(b.t)));
  set_constants(d, constants(kSimdgroups));
  d.read("hat", hat).read("b", s.b).read("a", s.a).read("a_log", s.A_log);
  d.read("dt_bias", s.dt_bias)
      .read("state", s.state)
      .write("state_out", s.state_next)
      .write("y", y);
  d.in_place("state", "state_out");
  d.grid(kHeadDim / (4 * kSimdgroups), shape.value_heads).threads(32 * kSimdgroups);
  b.add(std::move(d), "delta update");
  Dispatch n(kernels().at("gated_delta_gated_norm_" + suffix(b.t)));
  set_constants(n, constants(kSimdgroups));
  n.read("y", y).read("z", s.z).read("norm_weight", s.norm).write("out", s.out);
  n.grid(shape.value_heads).threads(kHeadDim);
  b.add(std::move(n), "delta norm");
}

}  // namespace lily
