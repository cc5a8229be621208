// The one description of a layer and of a model.
//
// Each struct is a template over what stands for a weight. K::Matrix and K::Vector are arrays in a
// plan, shapes and formats where kernels are chosen, slots in a Program. `visit` names the members
// once, in the order in which a Program's weights are bound.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reference/types.h"

namespace lily {

// Shape and format of a weight: [rows, cols] or [experts, rows, cols].
struct MatrixSpec {
  int rows = 0;
  int cols = 0;
  int bits = 0;   // 0: plain elements
  int group = 0;  // columns that share a scale, 0 for plain elements
  int experts = 1;
  Type t = Type::bf16;          // of scales and biases, or of plain elements
  std::string mode = "affine";  // of the quantization

  bool operator==(const MatrixSpec&) const = default;
};

struct VectorSpec {
  int size = 0;
  Type t = Type::bf16;

  bool operator==(const VectorSpec&) const = default;
};

struct Specs {
  using Matrix = MatrixSpec;
  using Vector = VectorSpec;
};

// A member's name in its struct, and its path in mlx-lm's module.
struct Member {
  const char* field;
  const char* path;
};

struct GatedDeltaShape {
  int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;
  int conv_width = 0;
  float eps = 0.0f;  // of the gated norm

  int channels() const {
    return 2 * key_heads * key_dim + value_heads * value_dim;
  }
  bool operator==(const GatedDeltaShape&) const = default;
};

template <typename K>
struct GatedDelta {
  typename K::Matrix qkv, z, b, a, out;
  typename K::Vector conv, A_log, dt_bias, norm;
  GatedDeltaShape shape;

  template <typename F, typename... L>
  static void visit(F&& f, L&... l) {
    f(Member{"qkv", "in_proj_qkv"}, l.qkv...);
    f(Member{"z", "in_proj_z"}, l.z...);
    f(Member{"b", "in_proj_b"}, l.b...);
    f(Member{"a", "in_proj_a"}, l.a...);
    f(Member{"out", "out_proj"}, l.out...);
    f(Member{"conv", "conv1d.weight"}, l.conv...);
    f(Member{"A_log", "A_log"}, l.A_log...);
    f(Member{"dt_bias", "dt_bias"}, l.dt_bias...);
    f(Member{"norm", "norm.weight"}, l.norm...);
  }
  bool operator==(const GatedDelta&) const = default;
};

struct AttentionShape {
  int heads = 0, kv_heads = 0, head_dim = 0;
  int rotary = 0;     // dims turned
  float base = 0.0f;  // of the rotary frequencies
  float eps = 0.0f;   // of the q and k norms

  bool operator==(const AttentionShape&) const = default;
};

template <typename K>
struct Attention {
  typename K::Matrix q, k, v, out;
  typename K::Vector q_norm, k_norm;
  AttentionShape shape;

  template <typename F, typename... L>
  static void visit(F&& f, L&... l) {
    f(Member{"q", "q_proj"}, l.q...);
    f(Member{"k", "k_proj"}, l.k...);
    f(Member{"v", "v_proj"}, l.v...);
    f(Member{"out", "o_proj"}, l.out...);
    f(Member{"q_norm", "q_norm.weight"}, l.q_norm...);
    f(Member{"k_norm", "k_norm.weight"}, l.k_norm...);
  }
  bool operator==(const Attention&) const = default;
};

struct MoeShape {
  int top_k = 0;
  bool normalize = false;  // the kept probabilities are divided by their sum

  bool operator==(const MoeShape&) const = default;
};

template <typename K>
struct Moe {
  typename K::Matrix router, gate, up, down, shared_gate, shared_up, shared_down, shared_router;
  MoeShape shape;

  template <typename F, typename... L>
  static void visit(F&& f, L&... l) {
    f(Member{"router", "gate"}, l.router...);
    f(Member{"gate", "switch_mlp.gate_proj"}, l.gate...);
    f(Member{"up", "switch_mlp.up_proj"}, l.up...);
    f(Member{"down", "switch_mlp.down_proj"}, l.down...);
    f(Member{"shared_gate", "shared_expert.gate_proj"}, l.shared_gate...);
    f(Member{"shared_up", "shared_expert.up_proj"}, l.shared_up...);
    f(Member{"shared_down", "shared_expert.down_proj"}, l.shared_down...);
    f(Member{"shared_router", "shared_expert_gate"}, l.shared_router...);
  }
  bool operator==(const Moe&) const = default;
};

template <typename K>
struct Layer {
  typename K::Vector input_norm, post_norm;
  std::optional<GatedDelta<K>> delta;  // one of these two
  std::optional<Attention<K>> attention;
  Moe<K> moe;

  template <typename F, typename... L>
  static void visit_norms(F&& f, L&... l) {
    f(Member{"input_norm", "input_layernorm.weight"}, l.input_norm...);
    f(Member{"post_norm", "post_attention_layernorm.weight"}, l.post_norm...);
  }
  bool operator==(const Layer&) const = default;
};

template <typename K>
struct Model {
  typename K::Matrix embedding;
  std::vector<Layer<K>> layers;
  typename K::Vector norm;
  typename K::Matrix head;
  Type t = Type::bf16;  // of activations
  float eps = 0.0f;     // of the norms
};

using LayerSpec = Layer<Specs>;
using ModelSpec = Model<Specs>;

inline std::string layer_name(size_t i) {
  return "layers." + std::to_string(i) + ".";
}

// A struct of another kind, each member made by f(path, member).
template <typename To, template <typename> typename S, typename From, typename F>
S<To> convert(const S<From>& from, const std::string& prefix, F&& f) {
  S<To> to;
  to.shape = from.shape;
  S<To>::visit([&](Member m, auto& x, auto& y) { x = f(prefix + m.path, y); }, to, from);
  return to;
}

template <typename To, typename From, typename F>
Layer<To> convert_layer(const Layer<From>& from, const std::string& prefix, F&& f) {
  Layer<To> to;
  Layer<To>::visit_norms([&](Member m, auto& x, auto& y) { x = f(prefix + m.path, y); }, to, from);
  if (from.delta) {
    to.delta = convert<To>(*from.delta, prefix + "linear_attn.", f);
  } else {
    to.attention = convert<To>(*from.attention, prefix + "self_attn.", f);
  }
  to.moe = convert<To>(from.moe, prefix + "mlp.", f);
  return to;
}

template <typename To, typename From, typename F>
Model<To> convert_model(const Model<From>& from, F&& f) {
  Model<To> to;
  to.t = from.t;
  to.eps = from.eps;
  to.embedding = f(std::string("embed_tokens"), from.embedding);
  for (size_t i = 0; i < from.layers.size(); ++i) {
    to.layers.push_back(convert_layer<To>(from.layers[i], layer_name(i), f));
  }
  to.norm = f(std::string("norm.weight"), from.norm);
  to.head = f(std::string("lm_head"), from.head);
  return to;
}

// f(path, member) for every matrix and vector of a model.
template <typename K, typename F>
void for_each(const Model<K>& model, F&& f) {
  f(std::string("embed_tokens"), model.embedding);
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const Layer<K>& l = model.layers[i];
    auto under = [&](const std::string& prefix) {
      return [&f, prefix](Member m, const auto& x) { f(prefix + m.path, x); };
    };
    Layer<K>::visit_norms(under(layer_name(i)), l);
    if (l.delta) {
      GatedDelta<K>::visit(under(layer_name(i) + "linear_attn."), *l.delta);
    } else {
      Attention<K>::visit(under(layer_name(i) + "self_attn."), *l.attention);
    }
    Moe<K>::visit(under(layer_name(i) + "mlp."), l.moe);
  }
  f(std::string("norm.weight"), model.norm);
  f(std::string("lm_head"), model.head);
}

}  // namespace lily
