#include "model.h"

#include <algorithm>
#include <stdexcept>

#include "ops/attention.h"
#include "ops/embed_head.h"
#include "ops/gated_delta.h"
#include "ops/linear.h"
#include "ops/moe.h"

namespace lily {

StepOptions step_options(Target target) {
  StepOptions o;
  if (target == Target::cuda) {
    o.logits = true;
    o.mma = true;
    o.fuse_route = false;
    o.ahead = 8192;  // more would take memory from the experts
  }
  return o;
}

Choice step_kernel(Target target, const ModelSpec& model) {
  const Type t = model.t;
  Choice c = first_refusal(check_activations(target, t), check_matrix(target, t, model.embedding),
                           check_matrix(target, t, model.head),
                           check_vector(target, t, model.norm, "norm.weight"));
  auto fits = [&](const std::vector<MatrixSpec>& matrices, bool float32) {
    Choice products = check_matrices(target, t, matrices);
    const std::string reason =
        products && target != Target::cpu ? gemv_refusal(matrices, float32) : "";
    return reason.empty() ? products : refused(ReasonCode::out_of_range, reason + ".");
  };
  for (size_t i = 0; i < model.layers.size() && c; ++i) {
    const LayerSpec& l = model.layers[i];
    c = first_refusal(check_vector(target, t, l.input_norm, "input_layernorm.weight"),
                      check_vector(target, t, l.post_norm, "post_attention_layernorm.weight"),
                      moe_step_kernel(target, t, l.moe));
    if (c && l.delta) {
      const GatedDelta<Specs>& d = *l.delta;
      c = first_refusal(gated_delta_step_kernel(target, t, d), fits({d.qkv, d.z, d.b, d.a}, false),
                        fits({d.out}, false));
    } else if (c) {
      const Attention<Specs>& a = l.attention.value();
      c = first_refusal(attention_step_kernel(target, t, a), fits({a.q, a.k, a.v}, false),
                        fits({a.out}, false));
    }
    if (!c) {
      c.reason = "layer " + std::to_string(i) + ": " + c.reason;
    }
  }
  c = first_refusal(c, fits({model.head}, true));
  return c ? chosen(target == Target::cpu ? "reference" : "decode_step") : c;
}

namespace {

bool wide_out(const MatrixSpec& m) {
  return m.bits == 4 && m.cols == 4096;
}

// Tall enough for blocks of four rows (gemv_tile), with which nine simdgroups were measured.
bool tall_in(const Attention<Specs>& a) {
  return a.q.rows + a.k.rows + a.v.rows >= 4096;
}

// Where 132 multiprocessors of 64K registers want other threads than an Apple GPU: as many
// threadgroups as multiprocessors, or a small multiple of it that fits at once, all with the same
// work. A second wave that is nearly empty costs as much as a full one. Only for what was measured:
// the shapes of Qwen3.6-35B-A3B.
TileFields nvidia_tiles(const ModelSpec& model, bool fuse_projections) {
  if (model.embedding.cols != 2048) {
    return {};
  }
  TileFields tiles = {
      {"experts up.r", 1}, {"experts up.simdgroups", 12}, {"argmax.simdgroups", 16}};
  auto insert_out = [&](const std::string& label) {
    tiles.insert(
        {{label + ".r", 4}, {label + ".u", 1}, {label + ".split", 4}, {label + ".simdgroups", 16}});
  };
  auto all = [&](auto&& holds) {
    return std::all_of(model.layers.begin(), model.layers.end(), holds);
  };
  if (fuse_projections &&
      all([](const LayerSpec& l) { return !l.attention || tall_in(*l.attention); })) {
    tiles.insert({{"attention in.u", 1}, {"attention in.simdgroups", 9}});
  }
  if (all([](const LayerSpec& l) {
        return l.moe.router.bits == 8 && l.moe.shared_router.bits != 4;
      })) {
    tiles.insert(
        {{"router.r", 2}, {"router.u", 1}, {"router.split", 4}, {"router.simdgroups", 16}});
  }
  if (all([](const LayerSpec& l) { return !l.delta || wide_out(l.delta->out); })) {
    insert_out("delta out");
  }
  if (all([](const LayerSpec& l) { return !l.attention || wide_out(l.attention->out); })) {
    insert_out("attention out");
  }
  return tiles;
}

// The loop over a model's layers: one row through its caches (a step), or the rows of a prompt
// chunk.
class ModelBuilder {
 public:
  // rows 0: a step.
  ModelBuilder(Target target, const ModelSpec& model, int rows, const StepOptions& options)
      : model_(model),
        is_step_(rows == 0),
        rows_(std::max(rows, 1)),
        o_(options),
        b_(rows == 0 ? "decode step" : "prompt chunk", target, model.t) {
    if (target == Target::cuda) {
      const TileFields tiles = nvidia_tiles(model, o_.fuse_projections);
      o_.tiles.insert(tiles.begin(), tiles.end());  // given ones stay
    }
  }

  std::shared_ptr<StepProgram> step(const std::vector<int>& capacities) {
    capacities_ = capacities;
    token_ = b_.input("token", 4);
    position_ = b_.input("position", 4);
    weights_ = convert_model<Slots>(model_, b_.weight_slots());
    SlotId h = hidden("h");
    b_.phase = "embedding";
    add_embed_row(b_, token_, weights_.embedding, h);
    h = add_layers(h);
    b_.phase = "head";
    next_ = b_.output("next", 4);
    std::optional<SlotId> logits;
    if (o_.logits) {
      logits = b_.output("logits", 4 * size_t(model_.head.rows));
    }
    std::optional<SlotId> norm = weights_.norm;
    if (!o_.fuse_norm) {
      SlotId x = hidden("x");
      add_norm_row(b_, width(), model_.eps, h, weights_.norm, x);
      h = x;
      norm.reset();
    }
    add_head_row(b_, weights_.head, norm, model_.eps, h, next_, logits, o_);
    if (o_.serial_levels) {
      b_.program.make_serial();
    }
    b_.program.finish();
    check_tiles();
    auto out = std::make_shared<StepProgram>(std::move(b_.program));
    out->weights = std::move(b_.weights);
    out->tables = std::move(b_.tables);
    out->caches = std::move(caches_);
    out->token = token_;
    out->position = position_;
    out->next = next_;
    out->logits = logits.value_or(SlotId{});
    return out;
  }

  std::shared_ptr<LayerProgram> chunk(const LayerOptions& options) {
    b_.form = options;
    capacities_.assign(model_.layers.size(), 0);
    SlotId ids = b_.input("ids", 4 * size_t(rows_));
    position_ = b_.input("offset", 4);
    weights_.embedding = b_.matrix("embed_tokens", model_.embedding);
    for (size_t l = 0; l < model_.layers.size(); ++l) {
      weights_.layers.push_back(convert_layer<Slots>(
          model_.layers[l], layer_name(l), [this](const std::string& path, const auto& spec) {
            // The layers' own norms are MLX's.
            constexpr bool is_matrix = std::is_same_v<std::decay_t<decltype(spec)>, MatrixSpec>;
            using Slot = std::conditional_t<is_matrix, MatrixSlots, SlotId>;
            const bool is_mlx = path.find("layernorm") != std::string::npos;
            return is_mlx ? Slot{} : b_.weight_slots()(path, spec);
          }));
    }
    SlotId h = to_mlx("h", width());
    b_.phase = "embedding";
    add_embed(b_, "embedding", rows_, ids, weights_.embedding, h);
    add_layers(h);
    return finished(b_, {}, {});
  }

 private:
  int width() const {
    return model_.embedding.cols;
  }
  // A row a token, of activations.
  SlotId rows(const std::string& name, int values) {
    return b_.scratch(name, b_.size(size_t(rows_) * values));
  }
  SlotId hidden(const std::string& name) {
    return rows(name, width());
  }
  // What ops of MLX's make of a prompt chunk, and what they read.
  SlotId from_mlx(const std::string& name, int values) {
    return b_.input(name, b_.size(size_t(rows_) * values));
  }
  SlotId to_mlx(const std::string& name, int values) {
    return b_.output(name, b_.size(size_t(rows_) * values));
  }

  SlotId add_layers(SlotId h) {
    for (size_t i = 0; i < model_.layers.size(); ++i) {
      const Layer<Slots>& layer = weights_.layers[i];
      b_.layer = static_cast<int>(i);
      const std::string name = layer_name(i);
      if (layer.delta) {
        b_.phase = "gated_delta";
        h = add_delta(*layer.delta, layer.input_norm, name + "linear_attn.", h);
      } else {
        b_.phase = "attention";
        h = add_attention(*layer.attention, layer.input_norm, capacities_.at(i),
                          name + "self_attn.", h);
      }
      b_.phase = "moe";
      h = add_experts(layer, i, name + "mlp.", h);
    }
    b_.layer = -1;
    return h;
  }

  // Products of norm(h); `x`, where given, gets norm(h).
  void add_in(const std::string& label, const std::string& name, SlotId h, SlotId norm,
              const std::vector<MatrixSlots>& matrices, const std::vector<SlotId>& y, bool float32,
              std::optional<SlotId> x = std::nullopt) {
    if (!is_step_) {
      add_products(label, from_mlx(name + "norm", width()), matrices, y, float32);
      return;
    }
    GemvOptions options;
    options.float32 = float32;
    options.eps = model_.eps;
    options.tiles = o_.tiles;
    options.mma = o_.mma && label == "delta in";  // others are faster lane by lane
    if (o_.fuse_norm) {
      options.norm = norm;
      options.row = x;
    } else {
      SlotId normed = x ? *x : hidden(name + "x");
      add_norm_row(b_, width(), model_.eps, h, norm, normed);
      h = normed;
    }
    if (o_.fuse_projections) {
      add_gemv(b_, label, matrices, h, y, options);
      return;
    }
    for (size_t i = 0; i < matrices.size(); ++i) {
      add_gemv(b_, label, {matrices[i]}, h, {y[i]}, options);
      options.row.reset();
    }
  }

  void add_products(const std::string& label, SlotId x, const std::vector<MatrixSlots>& matrices,
                    const std::vector<SlotId>& y, bool float32) {
    const Choice choice = linear_kernel(b_.target, b_.t, specs_of(matrices), rows_, float32);
    if (!choice) {
      throw std::invalid_argument(label + ": " + choice.reason);
    }
    add_linear(b_, label, choice.kernel, rows_, x, matrices, y, float32);
  }

  // h + W y.
  SlotId add_out(const std::string& label, const std::string& name, const MatrixSlots& w, SlotId y,
                 SlotId h) {
    if (!is_step_) {
      add_products(label, y, {w}, {to_mlx(name + "y", width())}, false);
      return {};  // the residual is MLX's
    }
    SlotId next = hidden(name + "h");
    GemvOptions options;
    options.tiles = o_.tiles;
    if (o_.fuse_residual) {
      options.residual = h;
      add_gemv(b_, label, {w}, y, {next}, options);
      return next;
    }
    SlotId product = hidden(name + "y");
    add_gemv(b_, label, {w}, y, {product}, options);
    add_residual(b_, width(), h, product, next);
    return next;
  }

  SlotId add_delta(const GatedDelta<Slots>& w, SlotId norm, const std::string& name, SlotId h) {
    const GatedDeltaShape& shape = w.shape;
    const int inner = shape.value_heads * shape.value_dim;
    GatedDeltaSlots s;
    s.conv_weight = w.conv;
    s.A_log = w.A_log;
    s.dt_bias = w.dt_bias;
    s.norm = w.norm;
    const size_t conv_bytes = b_.size(size_t(shape.conv_width - 1) * shape.channels());
    const size_t state_bytes = 4 * size_t(shape.value_heads) * shape.value_dim * shape.key_dim;
    s.conv_state = b_.program.slot(name + "conv_state", SlotKind::cache, conv_bytes);
    s.conv_next = b_.program.slot(name + "conv_state_next", SlotKind::cache, conv_bytes);
    s.state = s.state_next = b_.program.slot(name + "state", SlotKind::cache, state_bytes);
    caches_.push_back({s.conv_state, s.conv_next, s.state});
    s.qkv = rows(name + "qkv", shape.channels());
    s.z = rows(name + "z", inner);
    s.b = rows(name + "b", shape.value_heads);
    s.a = rows(name + "a", shape.value_heads);
    s.out = rows(name + "out", inner);
    add_in("delta in", name, h, norm, {w.qkv, w.z, w.b, w.a}, {s.qkv, s.z, s.b, s.a}, false);
    if (!is_step_) {
      // A primitive of its own, which makes a new state.
      s.state_next = b_.program.slot(name + "state_next", SlotKind::cache, state_bytes);
      GatedDeltaRows prompt;
      prompt.T = rows_;
      add_gated_delta(b_, gated_delta_form(b_.target, rows_, false), shape, prompt, s,
                      name + "delta.");
    } else {
      add_gated_delta_row(b_, shape, s, name, o_);
    }
    return add_out("delta out", name, w.out, s.out, h);
  }

  SlotId add_attention(const Attention<Slots>& w, SlotId norm, int capacity,
                       const std::string& name, SlotId h) {
    const AttentionShape& shape = w.shape;
    const int inner = shape.heads * shape.head_dim, kv = shape.kv_heads * shape.head_dim;
    AttentionSlots s;
    s.q_norm = w.q_norm;
    s.k_norm = w.k_norm;
    s.position = position_;
    if (is_step_) {
      const size_t cache_bytes = b_.size(size_t(capacity) * kv);
      s.keys = b_.program.slot(name + "keys", SlotKind::cache, cache_bytes);
      s.values = b_.program.slot(name + "values", SlotKind::cache, cache_bytes);
      caches_.push_back({s.keys, {}, s.values});
    }
    s.q_gate = rows(name + "q_gate", 2 * inner);
    s.k = rows(name + "k", kv);
    s.v = rows(name + "v", kv);
    add_in("attention in", name, h, norm, {w.q, w.k, w.v}, {s.q_gate, s.k, s.v}, false);
    if (!is_step_) {
      AttentionRows prompt;
      prompt.T = rows_;
      add_attention_prepare(b_, shape, prompt, s.q_gate, s.k, s.q_norm, s.k_norm, s.position,
                            to_mlx(name + "q", inner), to_mlx(name + "keys", kv));
      s.out = from_mlx(name + "out", inner);
    } else {
      s.out = rows(name + "out", inner);
      add_attention_row(b_, shape, s, capacity, name, o_);
    }
    return add_out("attention out", name, w.out, s.out, h);
  }

  SlotId add_experts(const Layer<Slots>& layer, size_t i, const std::string& name, SlotId h) {
    if (!is_step_) {
      add_moe(b_, rows_, layer.moe, from_mlx(name + "norm", width()), to_mlx(name + "y", width()),
              name);
      return {};
    }
    const MoeRow row = moe_row(b_, layer.moe, name);
    add_in("router", name, h, layer.post_norm, {layer.moe.router, layer.moe.shared_router},
           {row.logits, row.shared_logit}, true, row.x);
    const MatrixSlots* ahead = nullptr;
    if (i + 1 < weights_.layers.size()) {
      const Layer<Slots>& next = weights_.layers[i + 1];
      ahead = next.delta ? &next.delta->qkv : &next.attention->q;
    }
    SlotId out = hidden(name + "h");
    add_moe_row(b_, layer.moe, row, name, h, out, ahead, o_);
    return out;
  }

  // Every tile asked for is one of a dispatch that there is.
  void check_tiles() const {
    for (auto& [name, value] : given_) {
      const std::string label = name.substr(0, name.rfind('.'));
      const auto& all = b_.program.dispatches();
      if (std::none_of(all.begin(), all.end(), [&](auto& d) { return d.name == label; })) {
        throw std::invalid_argument("the decode step has no dispatch '" + label +
                                    "' whose threads '" + name + "' could set.");
      }
    }
  }

  const ModelSpec& model_;
  const bool is_step_;
  const int rows_;
  StepOptions o_;
  const TileFields given_ = o_.tiles;
  Builder b_;
  Model<Slots> weights_;
  std::vector<int> capacities_;
  SlotId token_, position_, next_;
  std::vector<StepProgram::Caches> caches_;
};

// One layer of each kind, and the last, whose pick has no next layer to ask for weights of: what a
// model runs, all others run too.
ModelSpec distinct_layers(const ModelSpec& model) {
  ModelSpec few = model;
  few.layers.clear();
  for (size_t i = 0; i + 1 < model.layers.size(); ++i) {
    if (std::find(few.layers.begin(), few.layers.end(), model.layers[i]) == few.layers.end()) {
      few.layers.push_back(model.layers[i]);
    }
  }
  if (!model.layers.empty()) {
    few.layers.push_back(model.layers.back());
  }
  return few;
}

}  // namespace

std::shared_ptr<StepProgram> step_program(Target target, const ModelSpec& model,
                                          const std::vector<int>& capacities,
                                          const StepOptions& options) {
  return ModelBuilder(target, model, 0, options).step(capacities);
}

std::shared_ptr<LayerProgram> chunk_program(Target target, const ModelSpec& model, int rows,
                                            const LayerOptions& options) {
  return ModelBuilder(target, model, rows, step_options(target)).chunk(options);
}

Pipelines step_pipelines(Target target, const ModelSpec& model, const std::vector<int>& capacities,
                         const StepOptions& options) {
  const ModelSpec few = distinct_layers(model);
  Pipelines out;
  for (int capacity : capacities) {
    std::vector<int> each;
    for (const LayerSpec& l : few.layers) {
      each.push_back(l.attention ? capacity : 0);
    }
    const auto program = step_program(target, few, each, options);
    for (const Pipeline& p : program->program.pipelines()) {
      out.emplace(p.key, p);
    }
  }
  return out;
}

Pipelines layer_pipelines(Target target, const ModelSpec& model) {
  Pipelines out;
  const Type t = model.t;
  embed_pipelines(t, model.embedding, out);
  linear_pipelines(target, t, model.head, true, out);
  for (const LayerSpec& l : distinct_layers(model).layers) {
    moe_pipelines(target, t, l.moe, out);
    if (l.delta) {
      for (const MatrixSpec* m :
           {&l.delta->qkv, &l.delta->z, &l.delta->b, &l.delta->a, &l.delta->out}) {
        linear_pipelines(target, t, *m, false, out);
      }
      gated_delta_pipelines(target, t, out);
    } else {
      for (const MatrixSpec* m :
           {&l.attention->q, &l.attention->k, &l.attention->v, &l.attention->out}) {
        linear_pipelines(target, t, *m, false, out);
      }
      attention_pipelines(t, out);
    }
  }
  return out;
}

std::shared_ptr<const StepProgram> StepPrograms::at(const std::vector<int>& capacities,
                                                    const StepOptions& options) {
  constexpr size_t kMost = 8;  // capacities grow by an eighth
  std::lock_guard lock(mutex_);
  auto it = std::find_if(kept_.begin(), kept_.end(), [&](const Kept& k) {
    return k.capacities == capacities && k.options == options;
  });
  if (it != kept_.end()) {
    kept_.splice(kept_.begin(), kept_, it);
  } else {
    kept_.push_front({capacities, options, step_program(target, model, capacities, options)});
    if (kept_.size() > kMost) {
      kept_.pop_back();
    }
  }
  return kept_.front().program;
}

size_t StepPrograms::size() const {
  std::lock_guard lock(mutex_);
  return kept_.size();
}

}  // namespace lily
