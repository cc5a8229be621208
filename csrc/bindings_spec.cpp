#include "bindings_spec.h"

#include <nanobind/stl/optional.h>

#include <stdexcept>

namespace lily {
namespace {

template <typename T>
T field(nb::dict d, const char* name) {
  if (!d.contains(name)) {
    throw std::invalid_argument(std::string("a model's description has no '") + name + "'.");
  }
  return nb::cast<T>(d[name]);
}

// Members of a struct from a dict: `convert(field, object or none, member)`.
template <typename S, typename F>
void read(S& to, nb::dict d, F&& convert) {
  S::visit(
      [&](Member m, auto& x) {
        convert(m.field, d.contains(m.field) ? nb::object(d[m.field]) : nb::none(), x);
      },
      to);
}

// How dicts become specs.
struct ReadSpec {
  Type t;
  void operator()(const char* name, nb::object value, MatrixSpec& x) const {
    if (value.is_none()) {
      throw std::invalid_argument(std::string("a model's description has no '") + name + "'.");
    }
    x = to_matrix(value, t);
  }
  void operator()(const char* name, nb::object value, VectorSpec& x) const {
    if (value.is_none()) {
      x = {0, std::string(name) == "A_log" ? Type::fp32 : t};
    } else {
      auto pair = nb::cast<nb::sequence>(value);
      x = {nb::cast<int>(pair[0]), to_type(nb::cast<std::string>(pair[1]))};
    }
  }
};

// How dicts become weights.
struct ReadWeights {
  void operator()(const char* name, nb::object value, Weight& x) const {
    check(name, value);
    x = nb::cast<Weight>(value);
  }
  void operator()(const char* name, nb::object value, std::optional<mx::array>& x) const {
    check(name, value);
    x = nb::cast<mx::array>(value);
  }
  static void check(const char* name, nb::object value) {
    if (value.is_none()) {
      throw std::invalid_argument(std::string("a model's weights have no '") + name + "'.");
    }
  }
};

template <typename K, typename F>
Model<K> read_model(nb::dict d, F&& convert) {
  Model<K> model;
  model.t = to_type(field<std::string>(d, "dtype"));
  model.eps = field<float>(d, "eps");
  auto one = [&](const char* name, auto& x) {
    convert(name, d.contains(name) ? nb::object(d[name]) : nb::none(), x);
  };
  one("embedding", model.embedding);
  one("norm", model.norm);
  one("head", model.head);
  for (nb::handle h : field<nb::list>(d, "layers")) {
    auto l = nb::cast<nb::dict>(h);
    Layer<K>& layer = model.layers.emplace_back();
    Layer<K>::visit_norms(
        [&](Member m, auto& x) {
          convert(m.field, l.contains(m.field) ? nb::object(l[m.field]) : nb::none(), x);
        },
        layer);
    if (l.contains("delta")) {
      auto delta = field<nb::dict>(l, "delta");
      read(layer.delta.emplace(), delta, convert);
      layer.delta->shape = to_gated_delta_shape(delta);
    } else {
      auto attention = field<nb::dict>(l, "attention");
      read(layer.attention.emplace(), attention, convert);
      layer.attention->shape = to_attention_shape(attention);
    }
    auto moe = field<nb::dict>(l, "moe");
    read(layer.moe, moe, convert);
    layer.moe.shape = {field<int>(moe, "top_k"), field<bool>(moe, "normalize")};
  }
  return model;
}

}  // namespace

Type to_type(const std::string& name) {
  for (Type t : {Type::bf16, Type::fp16, Type::fp32}) {
    if (name == name_of(t)) {
      return t;
    }
  }
  throw std::invalid_argument("dtype '" + name + "' is not bfloat16, float16 or float32.");
}

MatrixSpec to_matrix(nb::handle tuple, Type activations) {
  auto x = nb::cast<nb::sequence>(tuple);
  const size_t n = nb::len(x);
  if (n < 5 || n > 7) {
    throw std::invalid_argument(
        "a matrix is not (rows, columns, bits, group, experts), mode and dtype.");
  }
  auto number = [&](int i) { return nb::cast<int>(x[i]); };
  MatrixSpec m{number(0), number(1), number(2), number(3), number(4), activations, "affine"};
  if (n > 5) {
    m.mode = nb::cast<std::string>(x[5]);
  }
  if (n > 6) {
    m.t = to_type(nb::cast<std::string>(x[6]));
  }
  return m;
}

std::vector<MatrixSpec> to_matrices(nb::handle list, Type activations) {
  std::vector<MatrixSpec> out;
  for (nb::handle h : nb::cast<nb::sequence>(list)) {
    out.push_back(to_matrix(h, activations));
  }
  return out;
}

Moe<Specs> to_moe_spec(nb::dict d, Type activations) {
  Moe<Specs> m;
  read(m, d, ReadSpec{activations});
  m.shape = {field<int>(d, "top_k"), field<bool>(d, "normalize")};
  return m;
}

GatedDeltaShape to_gated_delta_shape(nb::dict d) {
  return {field<int>(d, "key_heads"), field<int>(d, "value_heads"), field<int>(d, "key_dim"),
          field<int>(d, "value_dim"), field<int>(d, "conv_width"),  field<float>(d, "eps")};
}

AttentionShape to_attention_shape(nb::dict d) {
  return {field<int>(d, "heads"),  field<int>(d, "kv_heads"), field<int>(d, "head_dim"),
          field<int>(d, "rotary"), field<float>(d, "base"),   field<float>(d, "eps")};
}

ModelSpec to_model_spec(nb::dict d) {
  const Type t = to_type(field<std::string>(d, "dtype"));
  ModelSpec model = read_model<Specs>(d, ReadSpec{t});
  auto size = [](VectorSpec& v, int n) { v.size = v.size == 0 ? n : v.size; };
  const int hidden = model.embedding.cols;
  size(model.norm, hidden);
  for (LayerSpec& l : model.layers) {
    size(l.input_norm, hidden);
    size(l.post_norm, hidden);
    if (l.delta) {
      const GatedDeltaShape& s = l.delta->shape;
      size(l.delta->conv, s.channels() * s.conv_width);
      size(l.delta->A_log, s.value_heads);
      size(l.delta->dt_bias, s.value_heads);
      size(l.delta->norm, s.value_dim);
    } else {
      size(l.attention->q_norm, l.attention->shape.head_dim);
      size(l.attention->k_norm, l.attention->shape.head_dim);
    }
  }
  return model;
}

Model<Weights> to_model_weights(nb::dict d) {
  return read_model<Weights>(d, ReadWeights{});
}

}  // namespace lily
