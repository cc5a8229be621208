#include "primitives/plan.h"

#include <mutex>

#include "mlx/transforms.h"

namespace lily {
namespace {

[[noreturn]] void fail(const std::string& text) {
  throw std::invalid_argument("decode plan: " + text);
}

void check_size(const std::string& path, const mx::array& a, int n) {
  if (a.ndim() != 1 || a.shape(0) != n) {
    fail(path + " has shape " + shape_text(a) + "; [" + std::to_string(n) + "] is expected");
  }
}

void check_mixer(const GatedDelta<Weights>& d, const std::string& name, int hidden) {
  const GatedDeltaShape& s = d.shape;
  for (auto* w : {&d.qkv, &d.z, &d.b, &d.a}) {
    check_columns("decode plan", "a DeltaNet projection", *w, hidden);
  }
  check_columns("decode plan", "out_proj", d.out, s.value_heads * s.value_dim);
  if (d.qkv.rows() != s.channels() || d.z.rows() != d.out.cols() || d.b.rows() != s.value_heads ||
      d.a.rows() != s.value_heads || d.out.rows() != hidden || s.key_dim % 16 != 0 ||
      s.value_dim % 4 != 0 || s.value_heads % s.key_heads != 0) {
    fail("the projections of " + name + " do not fit its heads");
  }
  if (d.conv->shape() != mx::Shape{s.channels(), s.conv_width, 1}) {
    fail(name + ".conv1d.weight has shape " + shape_text(*d.conv));
  }
  check_size(name + ".A_log", *d.A_log, s.value_heads);
  check_size(name + ".dt_bias", *d.dt_bias, s.value_heads);
  check_size(name + ".norm.weight", *d.norm, s.value_dim);
}

void check_mixer(const Attention<Weights>& a, const std::string& name, int hidden) {
  const AttentionShape& s = a.shape;
  for (auto* w : {&a.q, &a.k, &a.v}) {
    check_columns("decode plan", "an attention projection", *w, hidden);
  }
  check_columns("decode plan", "o_proj", a.out, s.heads * s.head_dim);
  if (a.q.rows() != 2 * s.heads * s.head_dim || a.k.rows() != s.kv_heads * s.head_dim ||
      a.v.rows() != a.k.rows() || a.out.rows() != hidden || s.heads % s.kv_heads != 0 ||
      s.head_dim % 16 != 0 || s.rotary % 2 != 0 || s.rotary > s.head_dim) {
    fail("the projections of " + name + " do not fit its heads");
  }
  check_size(name + ".q_norm.weight", *a.q_norm, s.head_dim);
  check_size(name + ".k_norm.weight", *a.k_norm, s.head_dim);
  if (a.q_norm->dtype() != a.k_norm->dtype()) {
    fail("q_norm and k_norm of " + name + " differ in dtype");
  }
}

}  // namespace

std::vector<const mx::array*> DecodePlan::arrays() const {
  std::vector<const mx::array*> all;
  for_each(model, [&](const std::string&, const auto& x) {
    if constexpr (std::is_same_v<std::decay_t<decltype(x)>, Weight>) {
      all.push_back(&x.weight);
      if (x.bits != 0) {
        all.push_back(&*x.scales);
        all.push_back(&*x.biases);
      }
    } else {
      all.push_back(&*x);
    }
  });
  return all;
}

void DecodePlan::prepare() {
  const int hidden = model.embedding.cols();
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const Layer<Weights>& layer = model.layers[i];
    check_size(layer_name(i) + "input_layernorm.weight", *layer.input_norm, hidden);
    check_size(layer_name(i) + "post_attention_layernorm.weight", *layer.post_norm, hidden);
    if (layer.delta) {
      check_mixer(*layer.delta, layer_name(i) + "linear_attn", hidden);
    } else {
      check_mixer(layer.attention.value(), layer_name(i) + "self_attn", hidden);
    }
    check(layer.moe, hidden);
  }
  check_size("norm.weight", *model.norm, hidden);
  check_columns("decode plan", "lm_head", model.head, hidden);
  std::vector<mx::array> all;
  for (const mx::array* a : arrays()) {
    all.push_back(*a);
  }
  mx::eval(all);
  // Throws on a layout that a matrix cannot have, here rather than in the first step.
  for_each(model, [](const std::string& path, const auto& x) {
    if constexpr (std::is_same_v<std::decay_t<decltype(x)>, Weight>) {
      check_layout(x);
    } else if (!x->flags().row_contiguous) {
      fail(path + " is not contiguous");
    }
  });
}

std::shared_ptr<StepPrograms> programs_of(const DecodePlan& plan, Target target) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (!plan.programs || plan.programs->target != target) {
    plan.programs = std::make_shared<StepPrograms>(target, specs_of(plan.model));
  }
  return plan.programs;
}

}  // namespace lily
