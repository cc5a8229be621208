#include "primitives/decode.h"

#include <algorithm>
#include <cstring>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "primitives/successors.h"
#include "programs/metal_host.h"

namespace lily {
namespace {

// What a step of the CPU reference needs of one layer: plain pointers, valid until the task has
// run.
struct LayerBuffers {
  void* first;
  void* second;
  const void* old_conv;  // of a DeltaNet layer: read while its successor, `first`, is written
  int capacity;
};

const void* pointer(const mx::array& a) {
  return a.data<char>();
}

void* writable(const mx::array& a) {
  return const_cast<mx::array&>(a).data<char>();
}

Type type(const mx::array& a) {
  return type_of(a.dtype(), "a weight");
}

reference::MoeWeights moe_weights(const MoeLayer& l, Type t) {
  return {t,
          matrix_of(l.router),
          matrix_of(l.gate),
          matrix_of(l.up),
          matrix_of(l.down),
          matrix_of(l.shared_gate),
          matrix_of(l.shared_up),
          matrix_of(l.shared_down),
          matrix_of(l.shared_router),
          l.top_k,
          l.normalize};
}

// One token through the model with the layer primitives' own reference functions, so that both
// paths agree bit for bit.
void run_reference(const DecodePlan& plan, const std::vector<LayerBuffers>& buffers, int position,
                   const uint32_t* token, float* logits, uint32_t* next) {
  const Type t = type_of(plan.dtype, "activations");
  const int hidden = plan.embedding.cols();
  auto row = [&](int n) { return std::vector<char>(int64_t(n) * size_of(t)); };
  auto h = row(hidden), x = row(hidden), y = row(hidden);

  reference::embed(matrix_of(plan.embedding), t, token, 1, h.data());
  for (size_t i = 0; i < plan.layers.size(); ++i) {
    const DecodeLayer& layer = plan.layers[i];
    const LayerBuffers& cache = buffers[i];
    reference::rms_norm(t, h.data(), type(layer.input_norm), pointer(layer.input_norm), plan.eps, 1,
                        hidden, x.data());
    if (layer.delta) {
      const DeltaLayer& d = *layer.delta;
      const int channels = d.qkv.rows(), inner = d.value_heads * d.value_dim;
      auto qkv = row(channels), z = row(inner), b = row(d.value_heads), a = row(d.value_heads),
           out = row(inner);
      reference::project({{matrix_of(d.qkv), t, qkv.data(), channels},
                          {matrix_of(d.z), t, z.data(), inner},
                          {matrix_of(d.b), t, b.data(), d.value_heads},
                          {matrix_of(d.a), t, a.data(), d.value_heads}},
                         t, x.data(), hidden, 1);
      reference::DeltaShape shape{
          t, 1, 1, d.key_heads, d.value_heads, d.key_dim, d.value_dim, d.conv.shape(1), d.norm_eps};
      reference::DeltaWeights w{type(d.conv),     pointer(d.conv), type(d.A_log),
                                pointer(d.A_log), type(d.dt_bias), pointer(d.dt_bias),
                                type(d.norm),     pointer(d.norm)};
      reference::DeltaInputs in{qkv.data(), z.data(), b.data(), a.data()};
      in.conv_state = cache.old_conv;
      in.state = static_cast<const float*>(cache.second);
      reference::gated_delta(shape, w, in, cache.first, static_cast<float*>(cache.second),
                             out.data());
      reference::project({{matrix_of(d.out), t, y.data(), hidden}}, t, out.data(), inner, 1);
    } else {
      const AttentionLayer& l = *layer.attention;
      const int D = l.head_dim, inner = l.heads * D, kv = l.kv_heads * D;
      auto q_gate = row(2 * inner), k = row(kv), v = row(kv), q = row(inner), out = row(inner);
      reference::project({{matrix_of(l.q), t, q_gate.data(), 2 * inner},
                          {matrix_of(l.k), t, k.data(), kv},
                          {matrix_of(l.v), t, v.data(), kv}},
                         t, x.data(), hidden, 1);
      reference::AttentionShape shape{t, 1,        1,           l.heads,    l.kv_heads,
                                      D, l.rotary, l.rope_base, l.norm_eps, type(l.q_norm)};
      const int64_t head_stride = int64_t(cache.capacity) * D;
      const int32_t offset = position;
      reference::attention_prepare(shape, q_gate.data(), k.data(), pointer(l.q_norm),
                                   pointer(l.k_norm), &offset, q.data(),
                                   at(t, cache.first, int64_t(position) * D), head_stride);
      for (int head = 0; head < l.kv_heads; ++head) {
        std::memcpy(at(t, cache.second, head * head_stride + int64_t(position) * D),
                    at(t, v.data(), int64_t(head) * D), D * size_of(t));
      }
      reference::KeyValues all{cache.first, cache.second, 0, head_stride, D,
                               0,           head_stride,  D, position + 1};
      reference::attend(shape, q.data(), all, {}, q_gate.data(), out.data());
      reference::project({{matrix_of(l.out), t, y.data(), hidden}}, t, out.data(), inner, 1);
    }
    reference::add(t, h.data(), y.data(), hidden, h.data());
    reference::rms_norm(t, h.data(), type(layer.post_norm), pointer(layer.post_norm), plan.eps, 1,
                        hidden, x.data());
    reference::moe(moe_weights(layer.moe, t), x.data(), 1, y.data());
    reference::add(t, h.data(), y.data(), hidden, h.data());
  }
  reference::rms_norm(t, h.data(), type(plan.final_norm), pointer(plan.final_norm), plan.eps, 1,
                      hidden, x.data());
  const int vocabulary = plan.head.rows();
  std::vector<float> own;
  if (logits == nullptr) {
    own.resize(vocabulary);
    logits = own.data();
  }
  reference::project({{matrix_of(plan.head), Type::f32, logits, vocabulary}}, t, x.data(), hidden,
                     1);
  *next = reference::argmax(logits, vocabulary);
}

}  // namespace

int grown_capacity(int capacity, int needed) {
  constexpr int kBlock = 256;
  const int wanted = std::max(needed, capacity + capacity / 8);
  return (wanted + kBlock - 1) / kBlock * kBlock;
}

#if !defined(LILY_CUDA) && !defined(LILY_METAL)
std::unique_ptr<GpuDecode> make_gpu_decode(const DecodePlan&) {
  throw std::runtime_error(
      "lily_mlx: the decode step has no GPU backend in this build; load the model with "
      "engine=\"stock\"");
}
#endif

class DecodeStep : public Primitive {
 public:
  DecodeStep(mx::Stream s, std::shared_ptr<const DecodePlan> plan,
             std::shared_ptr<DecodeState> state, int position)
      : Primitive(s), plan_(std::move(plan)), state_(std::move(state)), position_(position) {}

  const char* name() const override {
    return "LilyDecodeStep";
  }

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    step(out, [&](const std::shared_ptr<Successors>& next) { queue_cpu(next, in[0], out); });
  }

  void eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    step(out, [&](const std::shared_ptr<Successors>& next) {
      if (!state_->gpu_) {
        state_->gpu_ = make_gpu_decode(*plan_);
      }
      state_->gpu_->step(state_->layers_, next, position_, in[0], out, stream());
    });
  }

 private:
  // The state changes once all is queued: a step that throws leaves it as it was.
  template <typename Queue>
  void step(std::vector<mx::array>& out, Queue queue) {
    for (auto& o : out) {
      allocate(o);
    }
    std::lock_guard<std::mutex> lock(state_->mutex_);
    auto next = std::make_shared<Successors>();
    next->plan = plan_;
    next->state = state_;
    queue(next);
    next->commit(state_->layers_);
    state_->copied_bytes_ += next->copied;
    state_->grown_bytes_ += next->grown;
  }

  void queue_cpu(const std::shared_ptr<Successors>& next, const mx::array& token,
                 std::vector<mx::array>& out) {
    // Each task keeps `next`, not the buffers: a buffer's use count stays 1 while only we hold it.
    auto& encoder = mx::cpu::get_command_encoder(stream());
    next->make(
        state_->layers_, position_, [](const mx::array& a) { return a.is_donatable(); },
        [&](mx::Shape shape, mx::Dtype dtype, const std::optional<mx::array>& source, int rows) {
          mx::array a = fresh(std::move(shape), dtype);
          encoder.dispatch([next, to = a.data<char>(), row = a.nbytes() / rows, rows,
                            from = source ? source->data<char>() : nullptr,
                            old_row = source ? source->nbytes() / rows : 0] {
            for (int r = 0; r < rows; ++r) {
              if (from != nullptr) {
                std::memcpy(to + r * row, from + r * old_row, old_row);
              }
              std::memset(to + r * row + old_row, 0, row - old_row);
            }
          });
          return a;
        },
        [&](size_t, mx::Shape shape) { return fresh(std::move(shape), plan_->dtype); });
    const std::vector<Successors::Used> used = next->used(state_->layers_);
    const std::vector<int> rows = capacities(used);
    mx::array* logits = out.size() > 1 ? &out[1] : nullptr;
    if (auto run = host::decode_run(*plan_, rows, logits != nullptr)) {
      host::decode_step(stream(), run, next, used, position_, token, out[0], logits);
      return;
    }
    std::vector<LayerBuffers> buffers;
    for (size_t i = 0; i < used.size(); ++i) {
      const auto& [first, second, first_next] = used[i];
      buffers.push_back({writable(first_next != nullptr ? *first_next : *first), writable(*second),
                         pointer(*first), rows[i]});
    }
    encoder.dispatch([next, buffers = std::move(buffers), position = position_,
                      token = token.data<uint32_t>(),
                      logits = logits != nullptr ? logits->data<float>() : nullptr,
                      id = out[0].data<uint32_t>()] {
      run_reference(*next->plan, buffers, position, token, logits, id);
    });
  }

  std::shared_ptr<const DecodePlan> plan_;
  std::shared_ptr<DecodeState> state_;
  int position_;
};

std::vector<const mx::array*> DecodePlan::arrays() const {
  std::vector<const mx::array*> all;
  auto add_weight = [&](const Weight& w) {
    all.push_back(&w.weight);
    if (w.bits != 0) {
      all.push_back(&*w.scales);
      all.push_back(&*w.biases);
    }
  };
  add_weight(embedding);
  for (const DecodeLayer& layer : layers) {
    all.push_back(&layer.input_norm);
    all.push_back(&layer.post_norm);
    if (layer.delta) {
      const DeltaLayer& d = *layer.delta;
      for (auto* w : {&d.qkv, &d.z, &d.b, &d.a, &d.out}) {
        add_weight(*w);
      }
      for (auto* a : {&d.conv, &d.A_log, &d.dt_bias, &d.norm}) {
        all.push_back(a);
      }
    } else {
      const AttentionLayer& l = *layer.attention;
      for (auto* w : {&l.q, &l.k, &l.v, &l.out}) {
        add_weight(*w);
      }
      all.push_back(&l.q_norm);
      all.push_back(&l.k_norm);
    }
    for (auto* w : layer.moe.weights()) {
      add_weight(*w);
    }
  }
  all.push_back(&final_norm);
  add_weight(head);
  return all;
}

void DecodePlan::prepare() {
  const int hidden = embedding.cols();
  auto fail = [](const std::string& text) { throw std::invalid_argument("decode plan: " + text); };
  auto vector = [&](const char* name, const mx::array& a, int n) {
    if (a.ndim() != 1 || a.shape(0) != n) {
      fail(std::string(name) + " has shape " + shape_text(a) + "; [" + std::to_string(n) +
           "] is expected");
    }
  };
  type_of(dtype, "activations");
  for (size_t i = 0; i < layers.size(); ++i) {
    const DecodeLayer& layer = layers[i];
    vector("input_layernorm", layer.input_norm, hidden);
    vector("post_attention_layernorm", layer.post_norm, hidden);
    if (layer.delta) {
      const DeltaLayer& d = *layer.delta;
      const int channels = 2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim;
      for (auto* w : {&d.qkv, &d.z, &d.b, &d.a}) {
        check_columns("decode plan", "a DeltaNet projection", *w, hidden);
      }
      check_columns("decode plan", "out_proj", d.out, d.value_heads * d.value_dim);
      if (d.qkv.rows() != channels || d.z.rows() != d.out.cols() || d.b.rows() != d.value_heads ||
          d.a.rows() != d.value_heads || d.out.rows() != hidden || d.key_dim % 16 != 0 ||
          d.value_dim % 4 != 0 || d.value_heads % d.key_heads != 0) {
        fail("the DeltaNet projections of layer " + std::to_string(i) + " do not fit its heads");
      }
      if (d.conv.ndim() != 3 || d.conv.shape(0) != channels || d.conv.shape(2) != 1) {
        fail("conv1d of layer " + std::to_string(i) + " has shape " + shape_text(d.conv));
      }
      vector("A_log", d.A_log, d.value_heads);
      vector("dt_bias", d.dt_bias, d.value_heads);
      vector("DeltaNet norm", d.norm, d.value_dim);
    } else {
      const AttentionLayer& l = layer.attention.value();
      for (auto* w : {&l.q, &l.k, &l.v}) {
        check_columns("decode plan", "an attention projection", *w, hidden);
      }
      check_columns("decode plan", "o_proj", l.out, l.heads * l.head_dim);
      if (l.q.rows() != 2 * l.heads * l.head_dim || l.k.rows() != l.kv_heads * l.head_dim ||
          l.v.rows() != l.k.rows() || l.out.rows() != hidden || l.heads % l.kv_heads != 0 ||
          l.head_dim % 16 != 0 || l.rotary % 2 != 0 || l.rotary > l.head_dim) {
        fail("the attention projections of layer " + std::to_string(i) + " do not fit its heads");
      }
      vector("q_norm", l.q_norm, l.head_dim);
      vector("k_norm", l.k_norm, l.head_dim);
      if (l.q_norm.dtype() != l.k_norm.dtype()) {
        fail("q_norm and k_norm of layer " + std::to_string(i) + " differ in dtype");
      }
    }
    layer.moe.check(hidden);
  }
  vector("the final norm", final_norm, hidden);
  check_columns("decode plan", "lm_head", head, hidden);
  std::vector<mx::array> all;
  for (const mx::array* a : arrays()) {
    all.push_back(*a);
  }
  mx::eval(all);
  // Throws on a layout that a matrix cannot have, here rather than in the first step.
  check_layout(embedding);
  check_layout(head);
  for (const DecodeLayer& layer : layers) {
    for (auto* a : {&layer.input_norm, &layer.post_norm}) {
      if (!a->flags().row_contiguous) {
        fail("a norm weight is not contiguous");
      }
    }
    for (auto* w : layer.moe.weights()) {
      check_layout(*w);
    }
    if (layer.delta) {
      for (auto* w : {&layer.delta->qkv, &layer.delta->z, &layer.delta->b, &layer.delta->a,
                      &layer.delta->out}) {
        check_layout(*w);
      }
      for (auto* a :
           {&layer.delta->conv, &layer.delta->A_log, &layer.delta->dt_bias, &layer.delta->norm}) {
        if (!a->flags().row_contiguous) {
          fail("a DeltaNet parameter is not contiguous");
        }
      }
    } else {
      for (auto* w :
           {&layer.attention->q, &layer.attention->k, &layer.attention->v, &layer.attention->out}) {
        check_layout(*w);
      }
    }
  }
}

std::shared_ptr<const DecodePlan> DecodeState::plan() const {
  auto plan = plan_.lock();
  if (!plan) {
    throw std::invalid_argument("the weights of these caches are gone; make a new state from them");
  }
  return plan;
}

void DecodeState::put(int layer, std::optional<mx::array> first, std::optional<mx::array> second) {
  const auto plan = this->plan();
  const DecodeLayer& l = plan->layers.at(layer);
  auto check = [&](const std::optional<mx::array>& a, mx::Shape expected, mx::Dtype dtype,
                   const char* what) {
    if (a && (a->shape() != expected || a->dtype() != dtype)) {
      throw std::invalid_argument(std::string("the cache's ") + what + " of layer " +
                                  std::to_string(layer) + " has shape " + shape_text(*a) +
                                  " or a dtype that does not fit the model");
    }
  };
  if (l.delta) {
    const DeltaLayer& d = *l.delta;
    check(first, {1, d.conv.shape(1) - 1, d.qkv.rows()}, plan->dtype, "conv state");
    check(second, {1, d.value_heads, d.value_dim, d.key_dim}, mx::float32, "DeltaNet state");
  } else {
    const AttentionLayer& a = *l.attention;
    const int capacity = first && first->ndim() == 4 ? first->shape(2) : 0;
    check(first, {1, a.kv_heads, capacity, a.head_dim}, plan->dtype, "keys");
    check(second, {1, a.kv_heads, capacity, a.head_dim}, plan->dtype, "values");
    if (first.has_value() != second.has_value()) {
      throw std::invalid_argument("the cache of layer " + std::to_string(layer) +
                                  " has keys without values");
    }
  }
  for (auto* a : {&first, &second}) {
    if (*a) {
      mx::eval(**a);
      if (!(*a)->flags().row_contiguous) {
        *a = mx::contiguous(**a);
        mx::eval(**a);
      }
      // An array object of our own: whoever else holds the memory is counted by the memory then.
      mx::array own((*a)->shape(), (*a)->dtype(), nullptr, {});
      own.copy_shared_buffer(**a);
      own.set_status(mx::array::Status::available);
      *a = std::move(own);
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  layers_[layer] = {std::move(first), std::move(second)};
}

std::pair<std::optional<mx::array>, std::optional<mx::array>> DecodeState::take(int layer) {
  std::lock_guard<std::mutex> lock(mutex_);
  whole_ = false;
  CachePair& pair = layers_.at(layer);
  return {std::exchange(pair.first, std::nullopt), std::exchange(pair.second, std::nullopt)};
}

std::vector<mx::array> decode_step(const std::shared_ptr<DecodeState>& state,
                                   const mx::array& token, const std::optional<mx::array>& ticket,
                                   int position, bool with_logits, mx::StreamOrDevice s_) {
  auto s = mx::to_stream(s_);
  if (!state->whole()) {
    throw std::invalid_argument(
        "decode_step: the caches were given back; make a new state from them");
  }
  if (token.size() != 1) {
    throw std::invalid_argument("decode_step: token has shape " + shape_text(token) +
                                "; it takes one token");
  }
  if (position < 0) {
    throw std::invalid_argument("decode_step: position is " + std::to_string(position) +
                                "; it counts from 0");
  }
  std::vector<mx::array> inputs{mx::astype(token, mx::uint32, s)};
  if (ticket) {
    inputs.push_back(*ticket);
  }
  const auto plan = state->plan();
  auto step = std::make_shared<DecodeStep>(s, plan, state, position);
  std::vector<mx::Shape> shapes{{1, 1}};
  std::vector<mx::Dtype> dtypes{mx::uint32};
  if (with_logits) {
    shapes.push_back({1, 1, plan->head.rows()});
    dtypes.push_back(mx::float32);
  }
  std::vector<mx::array> out;
  if (with_logits) {
    out = mx::array::make_arrays(shapes, dtypes, step, inputs);
  } else {
    out.emplace_back(shapes[0], dtypes[0], step, inputs);
  }
  return out;
}

}  // namespace lily
