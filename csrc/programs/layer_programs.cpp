#include "programs/layer_programs.h"

#include <algorithm>
#include <map>

#include "selection.h"

namespace lily {
namespace {

// What one launch takes of the matrices of a projection: the same format, up to four.
std::vector<std::vector<size_t>> batches(const std::vector<MatrixSlots>& matrices,
                                         bool bits_may_differ) {
  std::vector<std::vector<size_t>> out;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const MatrixDims& m = matrices[i].dims;
    auto fits = [&](const std::vector<size_t>& batch) {
      return batch.size() < 4 && std::all_of(
                                     batch.begin(), batch.end(),
                                     [&](size_t j) {
                                       const MatrixDims& o = matrices[j].dims;
                                       const bool same_group = o.group == m.group;
                                       return bits_may_differ
                                                  ? same_group || o.bits == 0 || m.bits == 0
                                                  : same_group && o.bits == m.bits;
                                     });
    };
    auto it = std::find_if(out.begin(), out.end(), fits);
    if (it == out.end()) {
      out.push_back({i});
    } else {
      it->push_back(i);
    }
  }
  return out;
}

// Sums over lanes of gemv_rows.h: rows held, weight rows a lane, lanes a weight row.
struct RowsTile {
  int most, r, lanes;

  int made() const {
    return 4 * r * (32 / lanes);
  }
};

RowsTile rows_tile(int rows, int depth) {
  RowsTile t{rows <= 4 ? 4 : rows <= 8 ? 8 : 16, 2, 32};
  while (t.lanes > 1 && t.lanes * 16 > depth) {
    t.lanes /= 2;
  }
  return t;
}

// What a threadgroup of a GEMM makes (GemmBlock in gemm_tiles.h), and its threads.
struct GemmBlock {
  int rows, columns, threads;
};

// The blocks of metal/gemm_sync.h, and microseconds that a wave of them takes at K = 2048 on an
// H200 by how many a multiprocessor has, at most as many as fit (`python -m benchmarks gpu_gemm`).
struct SyncBlock {
  GemmBlock block;
  int fit;
  float wave[3];
};
constexpr SyncBlock kSyncBlocks[] = {{{16, 128, 128}, 3, {12, 17, 21}},
                                     {{32, 128, 128}, 3, {18, 25, 32}},
                                     {{64, 256, 256}, 1, {33}}};

float sync_time(const SyncBlock& b, int rows, int columns) {
  const int blocks = ceil_div(rows, b.block.rows) * ceil_div(columns, b.block.columns);
  const int full = b.fit * kMultiprocessors, rest = ceil_div(blocks % full, kMultiprocessors);
  return blocks / full * b.wave[b.fit - 1] + (rest > 0 ? b.wave[rest - 1] : 0.0f);
}

GemmBlock gemm_block(int rows, MatrixUnit unit) {
  if (unit == MatrixUnit::nvidia) {
    for (const SyncBlock& b : kSyncBlocks) {
      if (b.block.rows == rows) {
        return b.block;
      }
    }
  }
  return {rows, 64, 128};
}

// `columns`: weight rows of the whole launch.
GemmBlock gemm_block(int rows, int columns, MatrixUnit unit) {
  if (unit == MatrixUnit::nvidia) {
    const auto* best =
        std::min_element(std::begin(kSyncBlocks), std::end(kSyncBlocks),
                         [&](const SyncBlock& a, const SyncBlock& b) {
                           return sync_time(a, rows, columns) < sync_time(b, rows, columns);
                         });
    return best->block;
  }
  const int least = unit == MatrixUnit::tensor ? 32 : 16;
  return gemm_block(std::max(least, rows <= 16 ? 16 : rows <= 32 ? 32 : 64), unit);
}

std::string unit_prefix(MatrixUnit unit) {
  switch (unit) {
    case MatrixUnit::tensor:
      return "nax_";
    case MatrixUnit::nvidia:
      return "sync_";
    default:
      return "";
  }
}

Constants weight_format(const MatrixDims& m, Type t) {
  return {{"kBits", int32_t{kernel_bits(m, t)}}, {"kGroup", int32_t{m.bits != 0 ? m.group : 32}}};
}

std::string output_suffix(Type t, bool float32) {
  return prefill_suffix(t) + "_" + (float32 ? "fp32" : prefill_suffix(t));
}

struct GemvRowsMultiParams {
  int32_t rows, depth, lanes, n[4];
};
struct QgemmMultiParams {
  int32_t rows, depth, n[4];
};
struct RouteParams {
  int32_t tokens, experts, top_k, renormalise, block_rows, max_blocks;
};
struct MoeRowsParams {
  int32_t hidden, width, top_k, lanes;
};
struct MoeGateUpParams {
  int32_t rows, width, hidden, top_k, grouped;
};
struct MoeDownParams {
  int32_t hidden, width;
};
struct CombineParams {
  int32_t hidden, top_k, has_shared, has_residual;
};
struct ConvParams {
  int32_t tokens, key_heads, value_heads, has_mask, has_lengths;
};
struct GdnParams {
  int32_t tokens, key_heads, value_heads;
  float eps;
};
struct GdnChunkParams {
  int32_t tokens, key_heads, value_heads, blocks;
};
struct AttentionPrepParams {
  int32_t tokens, q_heads, kv_heads, capacity, first_row, offset_stride;
  float eps;
};
struct AttentionGateParams {
  int32_t tokens, q_heads, head_dim, o_batch_stride, o_head_stride, o_token_stride;
};
struct EmbedParams {
  int32_t vocabulary, columns;
};

// The one form that gemv_rows.h and qgemm.h share: up to four matrices side by side.
void add_multi(Builder& b, const std::string& label, const std::string& kernel, Value params,
               const std::vector<MatrixSlots>& matrices, SlotId x, const std::vector<SlotId>& y,
               int groups_x, int groups_y, int threads) {
  Dispatch d(kernels().at(kernel));
  set_constants(d, weight_format(matrices[0].dims, b.t));
  d.read("x", x);
  for (size_t i = 0; i < 4; ++i) {
    const std::string n = std::to_string(i);
    if (i < matrices.size()) {
      read_matrix_always(d, matrices[i], "w" + n, "scales" + n, "biases" + n);
      d.write("y" + n, y[i]);
    } else {
      for (const char* name : {"w", "scales", "biases", "y"}) {
        read_nothing(d, name + n, x);
      }
    }
  }
  d.value("p", std::move(params)).grid(groups_x, groups_y).threads(threads);
  b.add(std::move(d), label);
}

std::shared_ptr<LayerProgram> finished(Builder& b, std::vector<SlotId> inputs,
                                       std::vector<SlotId> outputs) {
  b.program.finish();
  return std::make_shared<LayerProgram>(LayerProgram{
      std::move(b.program), std::move(inputs), std::move(outputs), std::move(b.tables), {}});
}

void append(std::vector<SlotId>& inputs, const MatrixSlots& m) {
  inputs.push_back(m.w);
  if (m.quantized()) {
    inputs.push_back(m.scales);
    inputs.push_back(m.biases);
  }
}

}  // namespace

// ---- Projections

std::string project_refusal(Type t, const std::string& kernel,
                            const std::vector<MatrixDims>& matrices, bool float32) {
  if (kernel == "gemv") {
    for (const MatrixDims& m : matrices) {
      std::string reason = gemv_refusal(t, {m}, float32);
      if (!reason.empty()) {
        return reason;
      }
    }
  }
  return "";
}

void add_project(Builder& b, const std::string& label, const std::string& kernel, int rows,
                 SlotId x, const std::vector<MatrixSlots>& matrices, const std::vector<SlotId>& y,
                 bool float32, MatrixUnit unit) {
  const bool one_row = kernel == "gemv";
  for (const std::vector<size_t>& batch : batches(matrices, one_row)) {
    std::vector<MatrixSlots> w;
    std::vector<SlotId> to;
    for (size_t i : batch) {
      w.push_back(matrices[i]);
      to.push_back(y[i]);
    }
    const int depth = w[0].dims.cols;
    if (one_row) {
      GemvOptions options;
      options.float32 = float32;
      add_gemv(b, label, w, x, to, options);
    } else if (kernel == "gemv_rows") {
      const RowsTile tile = rows_tile(rows, depth);
      GemvRowsMultiParams p{rows, depth, tile.lanes, {}};
      int groups = 0;
      for (size_t i = 0; i < w.size(); ++i) {
        p.n[i] = w[i].dims.rows;
        groups += ceil_div(p.n[i], tile.made());
      }
      add_multi(b, label,
                "gemv_rows_multi_" + output_suffix(b.t, float32) + "_m" + std::to_string(tile.most),
                Value::of_struct(p), w, x, to, groups, 1, 128);
    } else {
      int columns = 0;
      for (const MatrixSlots& m : w) {
        columns += m.dims.rows;
      }
      const GemmBlock block = gemm_block(rows, columns, unit);
      QgemmMultiParams p{rows, depth, {}};
      int groups = 0;
      for (size_t i = 0; i < w.size(); ++i) {
        p.n[i] = w[i].dims.rows;
        groups += ceil_div(p.n[i], block.columns);
      }
      add_multi(b, label,
                unit_prefix(unit) + "qgemm_multi_" + output_suffix(b.t, float32) + "_m" +
                    std::to_string(block.rows),
                Value::of_struct(p), w, x, to, groups, ceil_div(rows, block.rows), block.threads);
    }
  }
}

std::shared_ptr<LayerProgram> project_program(Type t, const std::string& kernel, int rows,
                                              const std::vector<MatrixDims>& matrices, bool float32,
                                              MatrixUnit unit) {
  Builder b("project", t);
  SlotId x = b.input("x", b.size(size_t(rows) * matrices[0].cols));
  std::vector<SlotId> inputs{x}, outputs;
  std::vector<MatrixSlots> slots;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const std::string number = std::to_string(i);
    slots.push_back(b.matrix(std::string("w").append(number), matrices[i]));
    append(inputs, slots.back());
    outputs.push_back(b.output(std::string("y").append(number),
                               size_t(rows) * matrices[i].rows * (float32 ? 4 : size_of(t))));
  }
  add_project(b, "project", kernel, rows, x, slots, outputs, float32, unit);
  return finished(b, inputs, outputs);
}

// ---- Norm and embedding

void add_rms_norm(Builder& b, const std::string& label, int rows, int dim, float eps, SlotId x,
                  SlotId weight, SlotId y) {
  Dispatch d(kernels().at("rms_norm_rows_" + prefill_suffix(b.t)));
  d.read("h", x).read("weight", weight).write("x", y);
  d.value("hidden", int32_t{dim}).value("eps", eps).grid(rows).threads(256);
  b.add(std::move(d), label);
}

std::shared_ptr<LayerProgram> rms_norm_program(Type t, int rows, int dim, float eps) {
  Builder b("rms_norm", t);
  SlotId x = b.input("x", b.size(size_t(rows) * dim));
  SlotId weight = b.weight("weight", b.size(dim));
  SlotId y = b.output("y", b.size(size_t(rows) * dim));
  add_rms_norm(b, "rms_norm", rows, dim, eps, x, weight, y);
  return finished(b, {x, weight}, {y});
}

void add_embed(Builder& b, const std::string& label, int count, SlotId ids, const MatrixSlots& m,
               SlotId y) {
  Dispatch d(kernels().at("embed_rows_" + suffix(b.t)));
  set_constants(d, weight_format(m.dims, b.t));
  d.read("ids", ids);
  MatrixSlots rows = m;  // one row a token is moved
  rows.dims.experts = m.dims.rows;
  rows.dims.rows = 1;
  read_matrix_always(d, rows, "w", "scales", "biases", std::min(count, m.dims.rows));
  d.write("out", y).value("p", Value::of_struct(EmbedParams{m.dims.rows, m.dims.cols}));
  d.grid(ceil_div(m.dims.cols, 1024), count).threads(128);
  b.add(std::move(d), label);
}

std::shared_ptr<LayerProgram> embed_program(Type t, int count, const MatrixDims& m) {
  Builder b("embed", t);
  std::vector<SlotId> inputs{b.input("ids", 4 * size_t(count))};
  MatrixSlots slots = b.matrix("embedding", m);
  append(inputs, slots);
  SlotId y = b.output("y", b.size(size_t(count) * m.cols));
  add_embed(b, "embed", count, inputs[0], slots, y);
  return finished(b, inputs, {y});
}

// ---- Gated DeltaNet

void add_gated_delta(Builder& b, const std::string& kernel, const GatedDeltaDims& d,
                     const GatedDeltaSlots& s, const std::string& name, Scan scan) {
  if (kernel == "gdn_step") {
    DeltaDims step;
    step.key_heads = d.key_heads;
    step.value_heads = d.value_heads;
    step.eps = d.eps;
    add_delta_step(b, step, s.qkv, s.z, s.b, s.a, s.conv_weight, s.A_log, s.dt_bias, s.norm,
                   s.conv_state, s.conv_next, s.state, s.state_next, s.out);
    return;
  }
  const size_t rows = size_t(d.B) * d.T;
  SlotId q = b.scratch(name + "q", b.size(rows * d.key_heads * 128));
  SlotId k = b.scratch(name + "k", b.size(rows * d.key_heads * 128));
  SlotId v = b.scratch(name + "v", b.size(rows * d.value_heads * 128));
  SlotId g = b.scratch(name + "g", 4 * rows * d.value_heads);
  SlotId beta = b.scratch(name + "beta", 4 * rows * d.value_heads);
  const std::string t = prefill_suffix(b.t);

  Dispatch c(kernels().at("conv_prefill_" + t));
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
  c.value("p",
          Value::of_struct(ConvParams{d.T, d.key_heads, d.value_heads, d.has_mask, d.has_lengths}));
  c.grid(ceil_div(d.T, 32) + 1, 2 * d.key_heads + d.value_heads + 1, d.B).threads(128);
  b.add(std::move(c), "delta conv");

  const Value params = Value::of_struct(GdnParams{d.T, d.key_heads, d.value_heads, d.eps});
  if (scan == Scan::norm) {
    Dispatch n(kernels().at("gdn_scan_norm_" + t + "_r2"));
    n.read("q", q).read("k", k).read("v", v).read("g", g).read("beta", beta);
    n.read("state_in", s.state).write("state_out", s.state_next).read("z", s.z);
    n.read("weight", s.norm).write("out", s.out).value("p", params);
    n.grid(d.value_heads, d.B).threads(512);
    b.add(std::move(n), "delta scan");
    return;
  }
  SlotId y = b.scratch(name + "y", 4 * rows * d.value_heads * 128);
  if (scan == Scan::chunk) {
    const int blocks = ceil_div(d.T, 32);
    const size_t squares = size_t(d.B) * d.value_heads * blocks;
    SlotId inverse = b.scratch(name + "inverse", 4 * squares * 32 * 32);
    SlotId mix = b.scratch(name + "mix", 4 * squares * 32 * 32);
    SlotId decay = b.scratch(name + "log_decay", 4 * squares * 32);
    const Value chunk = Value::of_struct(GdnChunkParams{d.T, d.key_heads, d.value_heads, blocks});
    Dispatch p(kernels().at("gdn_chunk_prepare_" + t));
    p.read("q", q).read("k", k).read("g", g).read("beta", beta).write("inverse", inverse);
    p.write("mix", mix).write("log_decay", decay).value("p", chunk);
    p.grid(blocks, d.value_heads, d.B).threads(128);
    b.add(std::move(p), "delta chunk prepare");
    Dispatch r(kernels().at("gdn_chunk_scan_" + t));
    r.read("q", q).read("k", k).read("v", v).read("beta", beta).read("inverse", inverse);
    r.read("mix", mix).read("log_decay", decay).read("state_in", s.state);
    r.write("state_out", s.state_next).write("y", y).value("p", chunk);
    r.grid(128 / 16, d.value_heads, d.B).threads(128);
    b.add(std::move(r), "delta scan");
  } else {
    const std::string form = scan == Scan::block ? "gdn_scan_block_" : "gdn_scan_";
    Dispatch r(kernels().at(form + t + "_r2"));
    r.read("q", q).read("k", k).read("v", v).read("g", g).read("beta", beta);
    r.read("state_in", s.state).write("state_out", s.state_next).write("y", y);
    r.value("p", params).grid(128 / 32, d.value_heads, d.B).threads(128);
    b.add(std::move(r), "delta scan");
  }
  const int norm_rows = static_cast<int>(rows) * d.value_heads;
  Dispatch n(kernels().at("gated_norm_" + t));
  n.read("y", y).read("z", s.z).read("weight", s.norm).write("out", s.out);
  n.value("rows", int32_t{norm_rows}).value("eps", d.eps);
  n.grid(ceil_div(norm_rows, 4)).threads(128);
  b.add(std::move(n), "delta norm");
}

std::shared_ptr<LayerProgram> gated_delta_program(Type t, const std::string& kernel,
                                                  const GatedDeltaDims& d, Scan scan) {
  Builder b("gated_delta", t);
  const size_t rows = size_t(d.B) * d.T;
  const size_t conv_bytes = b.size(size_t(d.B) * 3 * d.channels());
  const size_t state_bytes = 4 * size_t(d.B) * d.value_heads * 128 * 128;
  GatedDeltaSlots s;
  s.qkv = b.input("qkv", b.size(rows * d.channels()));
  s.z = b.input("z", b.size(rows * d.value_heads * 128));
  s.b = b.input("b", b.size(rows * d.value_heads));
  s.a = b.input("a", b.size(rows * d.value_heads));
  s.conv_weight = b.weight("conv1d.weight", b.size(size_t(d.channels()) * 4));
  s.A_log = b.weight("A_log", 4 * size_t(d.value_heads));
  s.dt_bias = b.weight("dt_bias", b.size(d.value_heads));
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
  s.out = b.output("out", b.size(rows * d.value_heads * 128));
  s.conv_next = b.output("conv_state_next", conv_bytes);
  s.state_next = b.output("state_next", state_bytes);
  add_gated_delta(b, kernel, d, s, "", scan);
  return finished(b, inputs, {s.out, s.conv_next, s.state_next});
}

// ---- Attention

std::string prepare_refusal(Type t, const PrepareDims& d) {
  const std::string name = "attention_prep_" + prefill_suffix(t) + "_d" +
                           std::to_string(d.head_dim) + "_r" + std::to_string(d.rotary);
  if (t == Type::f32 || !kernels().has(name)) {
    return "no kernel " + name;
  }
  return "";
}

void add_attention_prepare(Builder& b, const PrepareDims& d, SlotId q_gate, SlotId k,
                           std::optional<SlotId> v, SlotId q_norm, SlotId k_norm, SlotId offset,
                           SlotId q_out, SlotId k_out, std::optional<SlotId> v_out) {
  const size_t rows = size_t(d.B) * d.T;
  const std::vector<float> f = rotary_frequencies(d.rotary, d.base);
  SlotId frequencies;
  auto it = std::find_if(b.tables.begin(), b.tables.end(), [&](const Builder::Table& x) {
    return b.program.slots()[x.slot.index].name == "rotary frequencies";
  });
  frequencies =
      it == b.tables.end() ? b.table("rotary frequencies", f.data(), 4 * f.size()) : it->slot;
  Dispatch p(kernels().at("attention_prep_" + prefill_suffix(b.t) + "_d" +
                          std::to_string(d.head_dim) + "_r" + std::to_string(d.rotary)));
  p.read("qg", q_gate).traffic({b.size(rows * d.heads * d.head_dim), {}, 0});
  p.read("k", k);
  if (v) {
    p.read("v", *v);
  } else {
    read_nothing(p, "v", k);
  }
  p.read("q_norm", q_norm).read("k_norm", k_norm).read("inv_freq", frequencies);
  p.read("offset", offset).write("q_out", q_out).write("k_cache", k_out);
  if (v_out) {
    p.write("v_cache", *v_out);
  } else {
    read_nothing(p, "v_cache", k);  // without v no threadgroup reaches it
  }
  p.value("p", Value::of_struct(
                   AttentionPrepParams{d.T, d.heads, d.kv_heads, d.T, 0, d.offset_each, d.eps}));
  const int heads = d.heads + (v ? 2 : 1) * d.kv_heads;
  p.grid(ceil_div(d.T, 4), heads, d.B).threads(128);
  b.add(std::move(p), "attention prepare");
}

std::shared_ptr<LayerProgram> attention_prepare_program(Type t, const PrepareDims& d) {
  Builder b("attention_prepare", t);
  const size_t rows = size_t(d.B) * d.T;
  SlotId q_gate = b.input("q_gate", b.size(rows * d.heads * d.head_dim * 2));
  SlotId k = b.input("k", b.size(rows * d.kv_heads * d.head_dim));
  SlotId q_norm = b.weight("q_norm.weight", b.size(d.head_dim));
  SlotId k_norm = b.weight("k_norm.weight", b.size(d.head_dim));
  SlotId offset = b.input("offset", 4 * size_t(d.offset_each ? d.B : 1));
  SlotId q_out = b.output("q", b.size(rows * d.heads * d.head_dim));
  SlotId k_out = b.output("keys", b.size(rows * d.kv_heads * d.head_dim));
  add_attention_prepare(b, d, q_gate, k, std::nullopt, q_norm, k_norm, offset, q_out, k_out,
                        std::nullopt);
  return finished(b, {q_gate, k, q_norm, k_norm, offset}, {q_out, k_out});
}

void add_attention_gate(Builder& b, int B, int T, int heads, int head_dim, SlotId o, SlotId q_gate,
                        SlotId out) {
  const int width = heads * head_dim;
  Dispatch d(kernels().at("attention_gate_" + prefill_suffix(b.t)));
  d.read("o", o).read("qg", q_gate).traffic({b.size(size_t(B) * T * width), {}, 0});
  d.write("out", out);
  d.value("p", Value::of_struct(
                   AttentionGateParams{T, heads, head_dim, width * T, T * head_dim, head_dim}));
  d.grid(ceil_div(T * width, 1024), 1, B).threads(256);
  b.add(std::move(d), "attention gate");
}

// ---- Experts

std::string layer_moe_refusal(Type, const MoeDims& m) {
  if (m.router.rows > 512 || m.top_k > 16) {
    return std::to_string(m.router.rows) + " experts with top_k " + std::to_string(m.top_k) +
           "; up to 512 and 16 have a kernel";
  }
  if (m.gate.rows % 32 != 0 || m.shared_gate.rows % 32 != 0 || m.gate.cols % 4 != 0) {
    return "expert widths must be multiples of 32";
  }
  if (m.gate.bits != m.up.bits || m.gate.group != m.up.group ||
      m.shared_gate.bits != m.shared_up.bits || m.shared_gate.group != m.shared_up.group) {
    return "gate_proj and up_proj differ in bits or group size";
  }
  return "";
}

namespace {

// Rows of a block of one expert, by the rows that an expert gets on average.
int expert_rows(int rows, const MoeDims& m, MatrixUnit unit) {
  const int mean = rows * m.top_k / std::max(1, m.router.rows);
  const int block = mean <= 16 ? 16 : mean <= 48 ? 32 : 64;
  return unit == MatrixUnit::tensor ? std::max(block, 32) : block;
}

struct Route {
  SlotId ids, weights, order, offsets, block_map;
  int entries;  // of the block map
};

Route add_route(Builder& b, int rows, int block, const MoeDims& m, SlotId logits,
                const std::string& name) {
  const int experts = m.router.rows, assignments = rows * m.top_k;
  Route r;
  // No more blocks than assignments: of experts that nobody chose there are none. Where a block
  // holds every row there is one an expert.
  r.entries =
      std::min(rows <= block ? experts : ceil_div(assignments, block) + experts, assignments);
  r.ids = b.scratch(name + "ids", 4 * size_t(assignments));
  r.weights = b.scratch(name + "weights", 4 * size_t(assignments));
  r.order = b.scratch(name + "order", 4 * size_t(assignments));
  r.offsets = b.scratch(name + "offsets", 4 * size_t(experts + 1));
  r.block_map = b.scratch(name + "block_map", 8 * size_t(r.entries));
  int epl = 1;
  while (32 * epl < experts) {
    epl *= 2;
  }
  const Value p =
      Value::of_struct(RouteParams{rows, experts, m.top_k, m.normalize, block, r.entries});
  if (rows <= 32) {
    Dispatch d(kernels().at("route_small_e" + std::to_string(epl)));
    d.read("logits", logits).write("ids", r.ids).write("weights", r.weights);
    d.write("order", r.order).write("offsets", r.offsets).write("block_map", r.block_map);
    d.value("p", p).grid(1).threads(256);
    b.add(std::move(d), "route");
    return r;
  }
  const int token_blocks = ceil_div(rows, 32);
  SlotId counts = b.scratch(name + "counts", 4 * size_t(token_blocks) * experts);
  Dispatch top(kernels().at("route_topk_e" + std::to_string(epl)));
  top.read("logits", logits).write("ids", r.ids).write("weights", r.weights);
  top.write("counts", counts).value("p", p).grid(token_blocks).threads(256);
  b.add(std::move(top), "route");
  Dispatch scan(kernels().at("route_scan"));
  scan.read_write("counts", counts).write("offsets", r.offsets).write("block_map", r.block_map);
  scan.value("p", p).grid(1).threads(256);
  b.add(std::move(scan), "route scan");
  Dispatch scatter(kernels().at("route_scatter"));
  scatter.read("ids", r.ids).read("starts", counts).write("order", r.order);
  scatter.value("p", p).grid(token_blocks).threads(256);
  b.add(std::move(scatter), "route scatter");
  return r;
}

}  // namespace

void add_moe(Builder& b, const std::string& kernel, int rows, const MoeDims& m, const MoeSlots& w,
             SlotId x, SlotId out, const std::string& name, std::optional<SlotId> h,
             MatrixUnit unit) {
  const bool few = kernel == "moe_rows";
  const int hidden = m.gate.cols, width = m.gate.rows, shared_width = m.shared_gate.rows;
  const int assignments = rows * m.top_k, experts = m.router.rows;
  const std::string product = few ? "gemv_rows" : "qgemm";
  const std::string t = prefill_suffix(b.t);
  SlotId logits = b.scratch(name + "logits", 4 * size_t(rows) * experts);
  SlotId shared_logit = b.scratch(name + "shared_logit", 4 * size_t(rows));
  add_project(b, "router", product, rows, x, {w.router, w.shared_router}, {logits, shared_logit},
              true, unit);
  const GemmBlock block =
      few ? GemmBlock{16, 0, 128} : gemm_block(expert_rows(rows, m, unit), unit);
  Route r = add_route(b, rows, block.rows, m, logits, name);

  // What is read at most: experts that somebody can have chosen.
  const int touched = std::min(experts, assignments);
  SlotId act = b.scratch(name + "act", b.size(size_t(assignments) * width));
  SlotId down = b.scratch(name + "down", 4 * size_t(assignments) * hidden);
  const RowsTile up_tile = rows_tile(rows, hidden), down_tile = rows_tile(rows, width);
  const std::string most = "_m" + std::to_string(few ? up_tile.most : block.rows);
  Dispatch u(kernels().at(few ? "moe_gate_up_rows_" + t + most
                              : unit_prefix(unit) + "moe_gate_up_" + t + most));
  set_constants(u, weight_format(m.gate, b.t));
  u.read("x", x);
  read_matrix_always(u, w.gate, "gate", "gate_scales", "gate_biases", touched);
  read_matrix_always(u, w.up, "up", "up_scales", "up_biases", touched);
  u.read("order", r.order).read("offsets", r.offsets).read("block_map", r.block_map);
  u.write("act", act);
  if (few) {
    u.value("p", Value::of_struct(MoeRowsParams{hidden, width, m.top_k, up_tile.lanes}));
    u.grid(ceil_div(width, up_tile.made() / 2), r.entries);
  } else {
    u.value("p", Value::of_struct(MoeGateUpParams{assignments, width, hidden, m.top_k, 1}));
    u.grid(ceil_div(width, block.columns / 2), r.entries);
  }
  u.threads(block.threads);
  b.add(std::move(u), "experts up");

  Dispatch d(
      kernels().at(few ? "moe_down_rows_" + t + most : unit_prefix(unit) + "moe_down_" + t + most));
  set_constants(d, weight_format(m.down, b.t));
  d.read("act", act);
  read_matrix_always(d, w.down, "w", "scales", "biases", touched);
  d.read("order", r.order).read("offsets", r.offsets).read("block_map", r.block_map);
  d.write("down", down);
  if (few) {
    d.value("p", Value::of_struct(MoeRowsParams{hidden, width, m.top_k, down_tile.lanes}));
    d.grid(ceil_div(hidden, down_tile.made()), r.entries);
  } else {
    d.value("p", Value::of_struct(MoeDownParams{hidden, width}));
    d.grid(ceil_div(hidden, block.columns), r.entries);
  }
  d.threads(block.threads);
  b.add(std::move(d), "experts down");

  SlotId shared_act = b.scratch(name + "shared_act", b.size(size_t(rows) * shared_width));
  if (few) {
    // With fp32 products of unrounded weights, as the routed experts have here.
    SlotId gate = b.scratch(name + "shared_gate", 4 * size_t(rows) * shared_width);
    SlotId up = b.scratch(name + "shared_up", 4 * size_t(rows) * shared_width);
    add_project(b, "shared up", product, rows, x, {w.shared_gate, w.shared_up}, {gate, up}, true);
    Dispatch s(kernels().at("swiglu_rows_" + t));
    s.read("gate", gate).read("up", up).write("act", shared_act);
    s.value("count", int32_t{rows * shared_width});
    s.grid(ceil_div(rows * shared_width, 1024)).threads(256);
    b.add(std::move(s), "shared swiglu");
  } else {
    const GemmBlock shared_block = gemm_block(rows, 2 * shared_width, unit);
    Dispatch s(kernels().at(unit_prefix(unit) + "moe_gate_up_" + t + "_m" +
                            std::to_string(shared_block.rows)));
    set_constants(s, weight_format(m.shared_gate, b.t));
    s.read("x", x);
    read_matrix_always(s, w.shared_gate, "gate", "gate_scales", "gate_biases");
    read_matrix_always(s, w.shared_up, "up", "up_scales", "up_biases");
    for (const char* unused : {"order", "offsets", "block_map"}) {
      read_nothing(s, unused, x);
    }
    s.write("act", shared_act);
    s.value("p", Value::of_struct(MoeGateUpParams{rows, shared_width, hidden, 1, 0}));
    s.grid(ceil_div(shared_width, shared_block.columns / 2), ceil_div(rows, shared_block.rows));
    s.threads(shared_block.threads);
    b.add(std::move(s), "shared up");
  }
  SlotId shared_down = b.scratch(name + "shared_down", 4 * size_t(rows) * hidden);
  add_project(b, "shared down", product, rows, shared_act, {w.shared_down}, {shared_down}, true,
              unit);

  Dispatch c(kernels().at("moe_combine_" + t));
  c.read("down", down).read("weights", r.weights).read("shared_down", shared_down);
  c.read("shared_gate", shared_logit);
  if (h) {
    c.read("h", *h);
  } else {
    read_nothing(c, "h", x);
  }
  c.write("out", out);
  c.value("p", Value::of_struct(CombineParams{hidden, m.top_k, 1, h.has_value()}));
  c.grid(rows).threads(256);
  b.add(std::move(c), "combine");
}

std::shared_ptr<LayerProgram> moe_program(Type t, const std::string& kernel, int rows,
                                          const MoeDims& m, MatrixUnit unit) {
  Builder b("moe", t);
  SlotId x = b.input("x", b.size(size_t(rows) * m.gate.cols));
  MoeSlots w = moe_slots(b, "", m);
  SlotId out = b.output("y", b.size(size_t(rows) * m.gate.cols));
  add_moe(b, kernel, rows, m, w, x, out, "", std::nullopt, unit);
  std::vector<SlotId> inputs{x};
  inputs.insert(inputs.end(), b.weights.begin(), b.weights.end());
  return finished(b, inputs, {out});
}

// ---- A whole chunk

std::shared_ptr<LayerProgram> prefill_program(const DecodeDims& dims, int tokens, Scan scan,
                                              MatrixUnit unit) {
  Builder b("prefill chunk", dims.t);
  const int hidden = dims.embedding.cols;
  const size_t row_bytes = b.size(size_t(tokens) * hidden);
  const std::string product = tokens == 1 ? "gemv" : tokens <= 16 ? "gemv_rows" : "qgemm";
  SlotId ids = b.input("ids", 4 * size_t(tokens));
  SlotId offset = b.input("offset", 4);
  SlotId h = b.scratch("h", row_bytes);
  b.phase = "embedding";
  add_embed(b, "embedding", tokens, ids, b.matrix("embed_tokens", dims.embedding), h);

  auto residual = [&](const std::string& name, SlotId y) {
    SlotId next = b.scratch(name + "h", row_bytes);
    Dispatch d(kernels().at("add_rows_" + prefill_suffix(b.t)));
    d.read("h", h).read("y", y).write("out", next).value("count", int32_t{tokens * hidden});
    d.grid(ceil_div(tokens * hidden, 1024)).threads(256);
    b.add(std::move(d), "residual");
    h = next;
  };
  for (size_t i = 0; i < dims.layers.size(); ++i) {
    const LayerDims& l = dims.layers[i];
    const std::string name = "layers." + std::to_string(i) + ".";
    b.layer = static_cast<int>(i);
    b.phase = l.delta ? "gated_delta" : "attention";
    SlotId input_norm = b.weight(name + "input_layernorm.weight", b.size(hidden));
    SlotId post_norm = b.weight(name + "post_attention_layernorm.weight", b.size(hidden));
    SlotId x = b.scratch(name + "x", row_bytes), y = b.scratch(name + "y", row_bytes);
    auto rows = [&](const std::string& what, int values) {
      return b.scratch(name + what, b.size(size_t(tokens) * values));
    };
    add_rms_norm(b, "norm", tokens, hidden, dims.eps, h, input_norm, x);
    if (l.delta) {
      const DeltaDims& d = *l.delta;
      DeltaSlots w = delta_slots(b, name + "linear_attn.", d);
      GatedDeltaSlots s;
      s.qkv = rows("qkv", d.qkv.rows);
      s.z = rows("z", d.z.rows);
      s.b = rows("b", d.b.rows);
      s.a = rows("a", d.a.rows);
      s.conv_weight = w.conv;
      s.A_log = w.A_log;
      s.dt_bias = w.dt_bias;
      s.norm = w.norm;
      const size_t conv_bytes = b.size(size_t(3) * d.qkv.rows);
      const size_t state_bytes = 4 * size_t(d.value_heads) * d.value_dim * d.key_dim;
      s.conv_state = b.input(name + "conv_state", conv_bytes);
      s.state = b.input(name + "state", state_bytes);
      s.conv_next = b.output(name + "conv_state_next", conv_bytes);
      s.state_next = b.output(name + "state_next", state_bytes);
      s.out = rows("out", d.z.rows);
      add_project(b, "delta in", product, tokens, x, {w.qkv, w.z, w.b, w.a}, {s.qkv, s.z, s.b, s.a},
                  false, unit);
      GatedDeltaDims g{1, tokens, d.key_heads, d.value_heads, d.eps, true, true, false, false};
      add_gated_delta(b, tokens == 1 ? "gdn_step" : "gdn_scan", g, s, name + "delta.", scan);
      add_project(b, "delta out", product, tokens, s.out, {w.out}, {y}, false, unit);
    } else {
      const AttentionDims& a = *l.attention;
      AttentionSlots w = attention_slots(b, name + "self_attn.", a);
      const int inner = a.heads * a.head_dim, kv = a.kv_heads * a.head_dim;
      SlotId q_gate = rows("q_gate", 2 * inner), k = rows("k", kv), v = rows("v", kv);
      SlotId keys = b.output(name + "new_keys", b.size(size_t(tokens) * kv));
      SlotId values = b.output(name + "new_values", b.size(size_t(tokens) * kv));
      SlotId q = b.output(name + "q", b.size(size_t(tokens) * inner));
      SlotId o = b.input(name + "sdpa", b.size(size_t(tokens) * inner));
      SlotId out = rows("out", inner);
      add_project(b, "attention in", product, tokens, x, {w.q, w.k, w.v}, {q_gate, k, v}, false,
                  unit);
      PrepareDims p{1, tokens, a.heads, a.kv_heads, a.head_dim, a.rotary, a.base, a.eps, false};
      add_attention_prepare(b, p, q_gate, k, v, w.q_norm, w.k_norm, offset, q, keys, values);
      add_attention_gate(b, 1, tokens, a.heads, a.head_dim, o, q_gate, out);
      add_project(b, "attention out", product, tokens, out, {w.out}, {y}, false, unit);
    }
    residual(name + "mixer.", y);
    b.phase = "moe";
    SlotId x2 = b.scratch(name + "x2", row_bytes), y2 = b.scratch(name + "y2", row_bytes);
    add_rms_norm(b, "norm", tokens, hidden, dims.eps, h, post_norm, x2);
    MoeSlots w = moe_slots(b, name + "mlp.", l.moe);
    add_moe(b, tokens <= 16 ? "moe_rows" : "moe_gemm", tokens, l.moe, w, x2, y2, name + "moe.",
            std::nullopt, unit);
    residual(name + "moe.", y2);
  }
  return finished(b, {}, {});
}

}  // namespace lily
