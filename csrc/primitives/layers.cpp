#include "primitives/layers.h"

#include <algorithm>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "ops/attention.h"
#include "ops/embed_head.h"
#include "ops/gated_delta.h"
#include "ops/linear.h"
#include "ops/moe.h"
#include "run.h"

namespace lily {
namespace {

using Arrays = std::vector<mx::array>;

[[noreturn]] void fail(const char* op, const std::string& text) {
  throw std::invalid_argument(std::string(op) + ": " + text);
}

int64_t rows_of(const mx::array& x) {
  return x.shape(-1) == 0 ? 0 : static_cast<int64_t>(x.size()) / x.shape(-1);
}

mx::cpu::CommandEncoder& encoder(mx::Stream s) {
  return mx::cpu::get_command_encoder(s);
}

class RmsNorm : public Primitive {
 public:
  RmsNorm(mx::Stream s, float eps) : Primitive(s), eps_(eps) {}

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    if (run_program(in, out)) {
      return;
    }
    encoder(stream()).dispatch(
        [t = type_of(in[0].dtype(), "x"), x = in[0].data<char>(),
         wt = type_of(in[1].dtype(), "weight"), w = in[1].data<char>(), eps = eps_,
         rows = rows_of(in[0]), dim = in[0].shape(-1),
         y = out[0].data<char>()] { reference::rms_norm(t, x, wt, w, eps, rows, dim, y); });
  }
  const char* name() const override {
    return "LilyRmsNorm";
  }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    return {in[0].shape()};
  }

 protected:
  bool run_program(const Arrays& in, Arrays& out) override {
    const Target target = target_of(stream());
    if (target == Target::cpu) {
      return false;
    }
    const Type t = type_of(in[0].dtype(), "x");
    const int rows = static_cast<int>(rows_of(in[0])), dim = in[0].shape(-1);
    return run_layer(
        stream(), "rms_norm", rms_norm_kernel(target, t, spec_of(in[1])),
        Key() << name_of(t) << rows << dim << eps_,
        [&](auto&) { return rms_norm_program(target, t, rows, dim, eps_); }, in, out);
  }

 private:
  float eps_;
};

class Project : public Primitive {
 public:
  Project(mx::Stream s, std::vector<Format> formats) : Primitive(s), formats_(std::move(formats)) {}

  void eval_cpu(const Arrays& in, Arrays& out) override {
    for (auto& o : out) {
      allocate(o);
    }
    if (run_program(in, out)) {
      return;
    }
    std::vector<reference::Product> products;
    size_t cursor = 1;
    for (size_t i = 0; i < formats_.size(); ++i) {
      Matrix m = matrix_at(in, cursor, formats_[i]);
      products.push_back({m, type_of(out[i].dtype(), "output"), out[i].data<char>(), m.rows});
    }
    encoder(stream()).dispatch([products = std::move(products), t = type_of(in[0].dtype(), "x"),
                                x = in[0].data<char>(), cols = in[0].shape(-1),
                                rows = rows_of(in[0])] {
      reference::project(products, t, x, cols, static_cast<int>(rows));
    });
  }
  const char* name() const override {
    return "LilyProject";
  }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    std::vector<mx::Shape> shapes;
    size_t cursor = 1;
    for (const Format& f : formats_) {
      mx::Shape shape = in[0].shape();
      shape.back() = in[cursor].shape(0);
      shapes.push_back(shape);
      cursor += f.bits == 0 ? 1 : 3;
    }
    return shapes;
  }

 protected:
  bool run_program(const Arrays& in, Arrays& out) override {
    const Target target = target_of(stream());
    if (target == Target::cpu) {
      return false;
    }
    const Type t = type_of(in[0].dtype(), "x");
    const int rows = static_cast<int>(rows_of(in[0]));
    const bool float32 = out[0].dtype() == mx::float32;
    const std::vector<MatrixSpec> matrices = specs_at(in, 1, formats_);
    Key key;
    key << name_of(t) << rows << float32;
    for (const MatrixSpec& m : matrices) {
      key << m;
    }
    return run_layer(
        stream(), "project", linear_kernel(target, t, matrices, rows, float32), key,
        [&](auto& o) { return linear_program(target, t, rows, matrices, float32, o); }, in, out);
  }

 private:
  std::vector<Format> formats_;
};

class Embed : public Primitive {
 public:
  Embed(mx::Stream s, Format format) : Primitive(s), format_(format) {}

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    if (run_program(in, out)) {
      return;
    }
    size_t cursor = 1;
    Matrix m = matrix_at(in, cursor, format_);
    encoder(stream()).dispatch(
        [m, t = type_of(out[0].dtype(), "output"), ids = in[0].data<uint32_t>(),
         count = static_cast<int64_t>(in[0].size()),
         y = out[0].data<char>()] { reference::embed(m, t, ids, count, y); });
  }
  const char* name() const override {
    return "LilyEmbed";
  }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    mx::Shape shape = in[0].shape();
    shape.push_back(format_.bits == 0 ? in[1].shape(-1) : in[1].shape(-1) * 32 / format_.bits);
    return {shape};
  }

 protected:
  bool run_program(const Arrays& in, Arrays& out) override {
    const Target target = target_of(stream());
    if (target == Target::cpu) {
      return false;
    }
    const Type t = type_of(out[0].dtype(), "output");
    const int count = static_cast<int>(in[0].size());
    const MatrixSpec table = specs_at(in, 1, {format_})[0];
    return run_layer(
        stream(), "embed", embed_kernel(target, t, table), Key() << name_of(t) << count << table,
        [&](auto&) { return embed_program(target, t, count, table); }, in, out);
  }

 private:
  Format format_;
};

// inputs: qkv z b a conv A_log dt_bias norm [conv_state] [state] [mask] [lengths]
class GatedDeltaOp : public Primitive {
 public:
  struct Options {
    GatedDeltaShape shape;
    bool has_conv_state, has_state, has_mask, has_lengths;
  };
  GatedDeltaOp(mx::Stream s, Options o) : Primitive(s), o_(o) {}

  void eval_cpu(const Arrays& in, Arrays& out) override {
    for (auto& a : out) {
      allocate(a);
    }
    if (run_program(in, out)) {
      return;
    }
    reference::DeltaShape shape{type_of(in[0].dtype(), "qkv"),
                                in[0].shape(0),
                                in[0].shape(1),
                                o_.shape.key_heads,
                                o_.shape.value_heads,
                                o_.shape.key_dim,
                                o_.shape.value_dim,
                                o_.shape.conv_width,
                                o_.shape.eps};
    reference::DeltaWeights w{type_of(in[4].dtype(), "conv weight"), in[4].data<char>(),
                              type_of(in[5].dtype(), "A_log"),       in[5].data<char>(),
                              type_of(in[6].dtype(), "dt_bias"),     in[6].data<char>(),
                              type_of(in[7].dtype(), "norm weight"), in[7].data<char>()};
    reference::DeltaInputs x{in[0].data<char>(), in[1].data<char>(), in[2].data<char>(),
                             in[3].data<char>()};
    size_t next = 8;
    if (o_.has_conv_state) {
      x.conv_state = in[next++].data<char>();
    }
    if (o_.has_state) {
      x.state = in[next++].data<float>();
    }
    if (o_.has_mask) {
      x.mask = in[next++].data<bool>();
    }
    if (o_.has_lengths) {
      x.lengths = in[next++].data<int32_t>();
    }
    encoder(stream()).dispatch(
        [shape, w, x, y = out[0].data<char>(), conv = out[1].data<char>(),
         state = out[2].data<float>()] { reference::gated_delta(shape, w, x, conv, state, y); });
  }
  const char* name() const override {
    return "LilyGatedDelta";
  }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    const int B = in[0].shape(0);
    const GatedDeltaShape& d = o_.shape;
    return {{B, in[0].shape(1), d.value_heads * d.value_dim},
            {B, d.conv_width - 1, d.channels()},
            {B, d.value_heads, d.value_dim, d.key_dim}};
  }

 protected:
  bool run_program(const Arrays& in, Arrays& out) override {
    const Target target = target_of(stream());
    if (target == Target::cpu) {
      return false;
    }
    const Type t = type_of(in[0].dtype(), "qkv");
    const GatedDeltaShape& d = o_.shape;
    const GatedDeltaRows rows{in[0].shape(0), in[0].shape(1), o_.has_conv_state,
                              o_.has_state,   o_.has_mask,    o_.has_lengths};
    const GatedDeltaVectors v{spec_of(in[4]), spec_of(in[5]), spec_of(in[6]), spec_of(in[7])};
    Key key;
    key << name_of(t) << rows.B << rows.T << d.key_heads << d.value_heads << d.eps
        << rows.has_conv_state << rows.has_state << rows.has_mask << rows.has_lengths;
    return run_layer(
        stream(), "gated_delta",
        gated_delta_kernel(target, t, d, v, rows.B * rows.T, rows.has_mask || rows.has_lengths),
        key, [&](auto& o) { return gated_delta_program(target, t, d, rows, o); }, in, out);
  }

 private:
  Options o_;
};

// inputs: q_gate k q_norm k_norm offset
class AttentionPrepare : public Primitive {
 public:
  AttentionPrepare(mx::Stream s, lily::AttentionShape shape) : Primitive(s), shape_(shape) {}

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    allocate(out[1]);
    if (run_program(in, out)) {
      return;
    }
    reference::AttentionShape shape{type_of(in[0].dtype(), "q"),
                                    in[0].shape(0),
                                    in[0].shape(1),
                                    shape_.heads,
                                    shape_.kv_heads,
                                    shape_.head_dim,
                                    shape_.rotary,
                                    shape_.base,
                                    shape_.eps,
                                    type_of(in[2].dtype(), "q_norm")};
    encoder(stream()).dispatch([shape, in_q = in[0].data<char>(), in_k = in[1].data<char>(),
                                q_norm = in[2].data<char>(), k_norm = in[3].data<char>(),
                                offset = in[4].data<int32_t>(), broadcast = in[4].size() == 1,
                                q = out[0].data<char>(), k = out[1].data<char>()] {
      std::vector<int32_t> offsets(shape.B);
      for (int b = 0; b < shape.B; ++b) {
        offsets[b] = offset[broadcast ? 0 : b];
      }
      reference::attention_prepare(shape, in_q, in_k, q_norm, k_norm, offsets.data(), q, k,
                                   int64_t(shape.T) * shape.D);
    });
  }
  const char* name() const override {
    return "LilyAttentionPrepare";
  }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    const int B = in[0].shape(0), T = in[0].shape(1), D = shape_.head_dim;
    return {{B, shape_.heads, T, D}, {B, shape_.kv_heads, T, D}};
  }

 protected:
  bool run_program(const Arrays& in, Arrays& out) override {
    const Target target = target_of(stream());
    if (target == Target::cpu) {
      return false;
    }
    const Type t = type_of(in[0].dtype(), "q");
    const AttentionRows rows{in[0].shape(0), in[0].shape(1), in[4].size() > 1};
    Key key;
    key << name_of(t) << rows.B << rows.T << rows.offset_each << shape_.heads << shape_.kv_heads
        << shape_.rotary << shape_.base << shape_.eps;
    return run_layer(
        stream(), "attention_prepare",
        attention_kernel(target, t, shape_, spec_of(in[2]), spec_of(in[3]), "none"), key,
        [&](auto&) { return attention_prepare_program(target, t, shape_, rows); }, in, out);
  }

 private:
  lily::AttentionShape shape_;
};

// inputs: q keys values q_gate [mask]
class Attend : public Primitive {
 public:
  Attend(mx::Stream s, bool causal, bool has_mask)
      : Primitive(s), causal_(causal), has_mask_(has_mask) {}

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    if (metal_host()) {
      count_run("attend", "reference",
                "on a GPU this is mx.fast.scaled_dot_product_attention, MLX's own kernel");
    }
    const auto &q = in[0], &k = in[1], &v = in[2];
    if (k.strides(3) != 1 || v.strides(3) != 1) {
      fail(name(), "keys and values must be contiguous along head_dim; use mx.contiguous");
    }
    reference::AttentionShape shape{type_of(q.dtype(), "q"),
                                    q.shape(0),
                                    q.shape(2),
                                    q.shape(1),
                                    k.shape(1),
                                    q.shape(3),
                                    0,
                                    0.0f,
                                    0.0f,
                                    Type::f32};
    reference::KeyValues kv{k.data<char>(), v.data<char>(), k.strides(0),
                            k.strides(1),   k.strides(2),   v.strides(0),
                            v.strides(1),   v.strides(2),   k.shape(2)};
    reference::Mask mask{nullptr, 0, 0, causal_};
    if (has_mask_) {
      mask.data = in[4].data<bool>();
      mask.row = in[4].shape(-1);
      mask.batch = in[4].shape(0) == 1 ? 0 : int64_t(in[4].shape(2)) * in[4].shape(3);
    }
    encoder(stream()).dispatch(
        [shape, kv, mask, qp = q.data<char>(), gate = in[3].data<char>(), y = out[0].data<char>()] {
          reference::attend(shape, qp, kv, mask, gate, y);
        });
  }
  const char* name() const override {
    return "LilyAttend";
  }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    return {{in[0].shape(0), in[0].shape(2), in[0].shape(1) * in[0].shape(3)}};
  }

 private:
  bool causal_, has_mask_;
};

bool makes_logits(Member m) {
  return std::string(m.path) == "gate" || std::string(m.path) == "shared_expert_gate";
}

// inputs: x [logits shared_logit], then weights; with logits those of experts alone
class MoeOp : public Primitive {
 public:
  MoeOp(mx::Stream s, std::vector<Format> formats, MoeShape shape, bool has_logits)
      : Primitive(s), formats_(std::move(formats)), shape_(shape), has_logits_(has_logits) {}

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    if (run_program(in, out)) {
      return;
    }
    if (has_logits_) {
      fail("moe", "the reference makes its own logits; give none");
    }
    reference::MoeWeights w;
    w.t = type_of(in[0].dtype(), "x");
    size_t cursor = 1, i = 0;
    for (Matrix* m : {&w.router, &w.gate, &w.up, &w.down, &w.shared_gate, &w.shared_up,
                      &w.shared_down, &w.shared_router}) {
      *m = matrix_at(in, cursor, formats_[i++]);
    }
    w.top_k = shape_.top_k;
    w.normalize = shape_.normalize;
    encoder(stream()).dispatch(
        [w, x = in[0].data<char>(), rows = rows_of(in[0]), y = out[0].data<char>()] {
          reference::moe(w, x, static_cast<int>(rows), y);
        });
  }
  const char* name() const override {
    return "LilyMoe";
  }
  std::vector<mx::Shape> output_shapes(const Arrays& in) override {
    return {in[0].shape()};
  }

 protected:
  bool run_program(const Arrays& in, Arrays& out) override {
    const Target target = target_of(stream());
    if (target == Target::cpu) {
      return false;
    }
    const Type t = type_of(in[0].dtype(), "x");
    const int rows = static_cast<int>(rows_of(in[0]));
    const std::vector<MatrixSpec> matrices = specs_at(in, has_logits_ ? 3 : 1, formats_);
    Moe<Specs> spec;
    spec.shape = shape_;
    Key key;
    key << name_of(t) << rows << shape_.top_k << shape_.normalize << has_logits_;
    size_t i = 0;
    Moe<Specs>::visit(
        [&](Member member, MatrixSpec& m) {
          if (has_logits_ && makes_logits(member)) {
            const int made = in[member.field == std::string("router") ? 1 : 2].shape(-1);
            m = {made, in[0].shape(-1), 0, 0, 1, t};
          } else {
            m = matrices[i++];
          }
          key << m;
        },
        spec);
    return run_layer(
        stream(), "moe", moe_kernel(target, t, spec, rows), key,
        [&](auto& o) { return moe_program(target, t, rows, spec, o, has_logits_); }, in, out);
  }

 private:
  std::vector<Format> formats_;
  MoeShape shape_;
  bool has_logits_;
};

void check_ndim(const char* op, const char* what, const mx::array& a, size_t ndim) {
  if (a.ndim() != ndim) {
    fail(op, std::string(what) + " has shape " + shape_text(a) + "; " + std::to_string(ndim) +
                 " axes are expected");
  }
}

void check_shape(const char* op, const char* what, const mx::array& a, const mx::Shape& expected) {
  if (a.shape() != expected) {
    mx::array want(expected, mx::bool_, nullptr, {});
    fail(op, std::string(what) + " has shape " + shape_text(a) + "; " + shape_text(want) +
                 " is expected");
  }
}

void check_dtype(const char* op, const char* what, const mx::array& a, mx::Dtype dtype) {
  if (a.dtype() != dtype) {
    fail(op, std::string(what) + " has another dtype than the other inputs; cast it with astype");
  }
}

}  // namespace

mx::array rms_norm(const mx::array& x, const mx::array& weight, float eps, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  type_of(x.dtype(), "rms_norm: x");
  type_of(weight.dtype(), "rms_norm: weight");
  if (x.ndim() == 0 || weight.ndim() != 1 || weight.shape(0) != x.shape(-1)) {
    fail("rms_norm", "weight " + shape_text(weight) + " does not fit x " + shape_text(x));
  }
  return mx::array(x.shape(), x.dtype(), std::make_shared<RmsNorm>(s, eps),
                   {contiguous(x, s), contiguous(weight, s)});
}

Arrays project(const mx::array& x, const std::vector<Weight>& weights, bool float32_out,
               mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  type_of(x.dtype(), "project: x");
  if (x.ndim() == 0 || weights.empty()) {
    fail("project", "x needs an axis and weights an entry");
  }
  Arrays inputs{contiguous(x, s)};
  std::vector<Format> formats;
  std::vector<mx::Shape> shapes;
  for (const Weight& w : weights) {
    check_columns("project", "a weight", w, x.shape(-1));
    if (w.weight.ndim() != 2) {
      fail("project", "a weight has shape " + shape_text(w.weight) + "; use [rows, cols]");
    }
    formats.push_back(append(w, inputs));
    mx::Shape shape = x.shape();
    shape.back() = w.rows();
    shapes.push_back(shape);
  }
  std::vector<mx::Dtype> dtypes(weights.size(), float32_out ? mx::float32 : x.dtype());
  return mx::array::make_arrays(shapes, dtypes, std::make_shared<Project>(s, formats), inputs);
}

mx::array embed(const mx::array& ids, const Weight& weight, mx::Dtype dtype,
                mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  type_of(dtype, "embed: dtype");
  if (!mx::issubdtype(ids.dtype(), mx::integer)) {
    fail("embed", "ids must be integers");
  }
  Arrays inputs{contiguous(mx::astype(ids, mx::uint32, s), s)};
  Format format = append(weight, inputs);
  mx::Shape shape = ids.shape();
  shape.push_back(weight.cols());
  return mx::array(shape, dtype, std::make_shared<Embed>(s, format), inputs);
}

Arrays gated_delta(const mx::array& qkv, const mx::array& z, const mx::array& b, const mx::array& a,
                   const mx::array& conv_weight, const mx::array& A_log, const mx::array& dt_bias,
                   const mx::array& norm_weight, float eps, int Hk, int Hv, int Dk, int Dv,
                   const std::optional<mx::array>& conv_state,
                   const std::optional<mx::array>& state, const std::optional<mx::array>& mask,
                   const std::optional<mx::array>& lengths, mx::StreamOrDevice s_) {
  const char* op = "gated_delta";
  auto s = mx::to_stream(s_);
  type_of(qkv.dtype(), "gated_delta: qkv");
  check_ndim(op, "qkv", qkv, 3);
  if (Hk < 1 || Hv < 1 || Hv % Hk != 0) {
    fail(op, std::to_string(Hv) + " value heads are no multiple of " + std::to_string(Hk) +
                 " key heads");
  }
  if (Dk % 16 != 0 || Dv % 4 != 0) {
    fail(op, "Dk " + std::to_string(Dk) + " must be a multiple of 16 and Dv " + std::to_string(Dv) +
                 " of 4");
  }
  const int B = qkv.shape(0), T = qkv.shape(1), channels = 2 * Hk * Dk + Hv * Dv;
  if (T < 1) {
    fail(op, "qkv " + shape_text(qkv) + " has no rows");
  }
  check_shape(op, "qkv", qkv, {B, T, channels});
  check_shape(op, "z", z, {B, T, Hv * Dv});
  check_shape(op, "b", b, {B, T, Hv});
  check_shape(op, "a", a, {B, T, Hv});
  check_ndim(op, "conv weight", conv_weight, 3);
  const int width = conv_weight.shape(1);
  check_shape(op, "conv weight", conv_weight, {channels, width, 1});
  check_shape(op, "A_log", A_log, {Hv});
  check_shape(op, "dt_bias", dt_bias, {Hv});
  check_shape(op, "norm weight", norm_weight, {Dv});
  for (auto* x : {&z, &b, &a}) {
    check_dtype(op, "z, b or a", *x, qkv.dtype());
  }
  Arrays in;
  for (auto* x : {&qkv, &z, &b, &a, &conv_weight, &A_log, &dt_bias, &norm_weight}) {
    in.push_back(contiguous(*x, s));
  }
  if (conv_state) {
    check_shape(op, "conv_state", *conv_state, {B, width - 1, channels});
    check_dtype(op, "conv_state", *conv_state, qkv.dtype());
    in.push_back(contiguous(*conv_state, s));
  }
  if (state) {
    check_shape(op, "state", *state, {B, Hv, Dv, Dk});
    check_dtype(op, "state (float32)", *state, mx::float32);
    in.push_back(contiguous(*state, s));
  }
  if (mask) {
    in.push_back(contiguous(mx::broadcast_to(mx::astype(*mask, mx::bool_, s), {B, T}, s), s));
  }
  if (lengths) {
    in.push_back(contiguous(mx::broadcast_to(mx::astype(*lengths, mx::int32, s), {B}, s), s));
  }
  GatedDeltaOp::Options o{{Hk, Hv, Dk, Dv, width, eps},
                          conv_state.has_value(),
                          state.has_value(),
                          mask.has_value(),
                          lengths.has_value()};
  return mx::array::make_arrays({{B, T, Hv * Dv}, {B, width - 1, channels}, {B, Hv, Dv, Dk}},
                                {qkv.dtype(), qkv.dtype(), mx::float32},
                                std::make_shared<GatedDeltaOp>(s, o), in);
}

Arrays attention_prepare(const mx::array& q_gate, const mx::array& k, const mx::array& q_norm,
                         const mx::array& k_norm, const mx::array& offset, int H, int Hkv,
                         int rotary, float base, float eps, mx::StreamOrDevice s_) {
  const char* op = "attention_prepare";
  auto s = mx::to_stream(s_);
  type_of(q_gate.dtype(), "attention_prepare: q");
  check_ndim(op, "q", q_gate, 3);
  check_ndim(op, "k", k, 3);
  if (H < 1 || Hkv < 1 || H % Hkv != 0 || k.shape(2) % Hkv != 0) {
    fail(op, std::to_string(H) + " query heads, " + std::to_string(Hkv) + " KV heads and k " +
                 shape_text(k) + " do not fit each other");
  }
  const int B = q_gate.shape(0), T = q_gate.shape(1), D = k.shape(2) / Hkv;
  if (D % 16 != 0 || rotary % 2 != 0 || rotary < 0 || rotary > D) {
    fail(op, "head_dim " + std::to_string(D) + " must be a multiple of 16 and rotary dims " +
                 std::to_string(rotary) + " even and at most that");
  }
  check_shape(op, "q", q_gate, {B, T, H * D * 2});
  check_shape(op, "k", k, {B, T, Hkv * D});
  check_dtype(op, "k", k, q_gate.dtype());
  check_shape(op, "q_norm", q_norm, {D});
  check_shape(op, "k_norm", k_norm, {D});
  check_dtype(op, "k_norm", k_norm, q_norm.dtype());
  if (offset.size() != 1 && offset.size() != static_cast<size_t>(B)) {
    fail(op, "offset has shape " + shape_text(offset) + " for a batch of " + std::to_string(B));
  }
  Arrays in;
  for (auto* x : {&q_gate, &k, &q_norm, &k_norm}) {
    in.push_back(contiguous(*x, s));
  }
  in.push_back(contiguous(mx::astype(offset, mx::int32, s), s));
  return mx::array::make_arrays(
      {{B, H, T, D}, {B, Hkv, T, D}}, {q_gate.dtype(), q_gate.dtype()},
      std::make_shared<AttentionPrepare>(s, lily::AttentionShape{H, Hkv, D, rotary, base, eps}),
      in);
}

mx::array attend(const mx::array& q, const mx::array& keys, const mx::array& values,
                 const mx::array& q_gate, const std::optional<mx::array>& mask, bool causal,
                 mx::StreamOrDevice s_) {
  const char* op = "attend";
  auto s = mx::to_stream(s_);
  type_of(q.dtype(), "attend: q");
  check_ndim(op, "q", q, 4);
  check_ndim(op, "keys", keys, 4);
  const int B = q.shape(0), H = q.shape(1), T = q.shape(2), D = q.shape(3), Hkv = keys.shape(1),
            L = keys.shape(2);
  if (Hkv < 1 || H % Hkv != 0 || D % 16 != 0) {
    fail(op, std::to_string(H) + " query heads must be a multiple of " + std::to_string(Hkv) +
                 " KV heads and head_dim " + std::to_string(D) + " of 16");
  }
  check_shape(op, "keys", keys, {B, Hkv, L, D});
  check_shape(op, "values", values, {B, Hkv, L, D});
  check_shape(op, "q_gate", q_gate, {B, T, H * D * 2});
  for (auto* x : {&keys, &values, &q_gate}) {
    check_dtype(op, "keys, values or q_gate", *x, q.dtype());
  }
  if (causal && T > L) {
    fail(op, std::to_string(T) + " queries over " + std::to_string(L) + " keys cannot be causal");
  }
  Arrays in{contiguous(q, s), keys, values, contiguous(q_gate, s)};
  if (mask) {
    if (mask->dtype() != mx::bool_) {
      fail(op, "the mask must be boolean, true where a key is seen");
    }
    const int batch = mask->ndim() == 4 ? mask->shape(0) : 1;
    in.push_back(contiguous(mx::broadcast_to(*mask, {batch, 1, T, L}, s), s));
  }
  return mx::array({B, T, H * D}, q.dtype(), std::make_shared<Attend>(s, causal, mask.has_value()),
                   in);
}

void check(const MoeLayer& m, int hidden) {
  const char* op = "moe";
  for (auto& [name, w] : {std::pair<const char*, const Weight*>{"router", &m.router},
                          {"gate_proj", &m.gate},
                          {"up_proj", &m.up},
                          {"shared gate_proj", &m.shared_gate},
                          {"shared up_proj", &m.shared_up},
                          {"shared_expert_gate", &m.shared_router}}) {
    check_columns(op, name, *w, hidden);
  }
  const int experts = m.router.rows();
  if (m.shape.top_k < 1 || m.shape.top_k > experts) {
    fail(op, "top_k is " + std::to_string(m.shape.top_k) + " of " + std::to_string(experts) +
                 " experts");
  }
  for (auto* w : {&m.gate, &m.up, &m.down}) {
    if (w->weight.ndim() != 3 || w->experts() != experts) {
      fail(op, "an expert weight has shape " + shape_text(w->weight) + " for " +
                   std::to_string(experts) + " experts");
    }
  }
  check_columns(op, "down_proj", m.down, m.gate.rows());
  check_columns(op, "shared down_proj", m.shared_down, m.shared_gate.rows());
  if (m.up.rows() != m.gate.rows() || m.shared_up.rows() != m.shared_gate.rows() ||
      m.down.rows() != hidden || m.shared_down.rows() != hidden || m.shared_router.rows() != 1) {
    fail(op, "gate_proj, up_proj, down_proj or shared_expert_gate do not fit each other");
  }
}

mx::array moe(const mx::array& x, const MoeLayer& layer, const std::optional<mx::array>& logits,
              const std::optional<mx::array>& shared_logit, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  type_of(x.dtype(), "moe: x");
  if (x.ndim() == 0) {
    fail("moe", "x needs an axis");
  }
  check(layer, x.shape(-1));
  Arrays in{contiguous(x, s)};
  if (logits.has_value() != shared_logit.has_value()) {
    fail("moe", "logits and shared_logit come together");
  }
  if (logits) {
    mx::Shape shape = x.shape();
    for (auto [a, values] : {std::pair(&*logits, layer.router.rows()), {&*shared_logit, 1}}) {
      shape.back() = values;
      check_shape("moe", "logits", *a, shape);
      check_dtype("moe", "logits (float32)", *a, mx::float32);
      in.push_back(contiguous(*a, s));
    }
  }
  std::vector<Format> formats;
  MoeLayer::visit(
      [&](Member m, const Weight& w) {
        if (!logits || !makes_logits(m)) {
          formats.push_back(append(w, in));
        }
      },
      layer);
  auto op = std::make_shared<MoeOp>(s, formats, layer.shape, logits.has_value());
  return mx::array(x.shape(), x.dtype(), std::move(op), in);
}

}  // namespace lily
