#include "primitives/layers.h"

#include <algorithm>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "ops/embed_head.h"
#include "ops/linear.h"
#include "ops/moe.h"
#include "run.h"

namespace lily {
namespace {

class RmsNorm : public Primitive {
 public:
  RmsNorm(mx::Stream s, float eps) : Primitive(s), eps_(eps) {}

  void eval_cpu(const Arrays& in, Arrays& out) override {
    allocate(out[0]);
    if (runs_program(in, out)) {
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
  bool run_program(Target target, const Arrays& in, Arrays& out) override {
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
    if (runs_program(in, out)) {
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
  bool run_program(Target target, const Arrays& in, Arrays& out) override {
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
    if (runs_program(in, out)) {
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
  bool run_program(Target target, const Arrays& in, Arrays& out) override {
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
    if (runs_program(in, out)) {
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
  bool run_program(Target target, const Arrays& in, Arrays& out) override {
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
