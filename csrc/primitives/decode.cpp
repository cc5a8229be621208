#include "primitives/decode.h"

#include <algorithm>
#include <cstring>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "primitives/decode_host.h"
#include "run.h"

namespace lily {
namespace {

// What a step of the CPU reference needs of one layer: plain pointers, valid until the task has
// run.
struct LayerBuffers {
  void* first;
  void* second;
  const void* old_conv;  // the conv state is read while its successor is written
  int capacity;
};

const void* pointer(const mx::array& a) {
  return a.data<char>();
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
          l.shape.top_k,
          l.shape.normalize};
}

// One token through the model with the layer primitives' own reference functions, so that both
// paths agree bit for bit.
void run_reference(const DecodePlan& plan, const std::vector<LayerBuffers>& buffers, int position,
                   const uint32_t* token, float* logits, uint32_t* next) {
  const Type t = type_of(plan.dtype, "activations");
  const int hidden = plan.model.embedding.cols();
  auto row = [&](int n) { return std::vector<char>(int64_t(n) * size_of(t)); };
  auto h = row(hidden), x = row(hidden), y = row(hidden);

  reference::embed(matrix_of(plan.model.embedding), t, token, 1, h.data());
  for (size_t i = 0; i < plan.model.layers.size(); ++i) {
    const Layer<Weights>& layer = plan.model.layers[i];
    const LayerBuffers& cache = buffers[i];
    reference::rms_norm(t, h.data(), type(*layer.input_norm), pointer(*layer.input_norm),
                        plan.model.eps, 1, hidden, x.data());
    if (layer.delta) {
      const GatedDelta<Weights>& d = *layer.delta;
      const int channels = d.qkv.rows(), inner = d.shape.value_heads * d.shape.value_dim;
      auto qkv = row(channels), z = row(inner), b = row(d.shape.value_heads),
           a = row(d.shape.value_heads), out = row(inner);
      reference::project({{matrix_of(d.qkv), t, qkv.data(), channels},
                          {matrix_of(d.z), t, z.data(), inner},
                          {matrix_of(d.b), t, b.data(), d.shape.value_heads},
                          {matrix_of(d.a), t, a.data(), d.shape.value_heads}},
                         t, x.data(), hidden, 1);
      reference::DeltaShape shape{t,
                                  1,
                                  1,
                                  d.shape.key_heads,
                                  d.shape.value_heads,
                                  d.shape.key_dim,
                                  d.shape.value_dim,
                                  d.shape.conv_width,
                                  d.shape.eps};
      reference::DeltaWeights w{type(*d.conv),     pointer(*d.conv), type(*d.A_log),
                                pointer(*d.A_log), type(*d.dt_bias), pointer(*d.dt_bias),
                                type(*d.norm),     pointer(*d.norm)};
      reference::DeltaInputs in{qkv.data(), z.data(), b.data(), a.data()};
      in.conv_state = cache.old_conv;
      in.state = static_cast<const float*>(cache.second);
      reference::gated_delta(shape, w, in, cache.first, static_cast<float*>(cache.second),
                             out.data());
      reference::project({{matrix_of(d.out), t, y.data(), hidden}}, t, out.data(), inner, 1);
    } else {
      const Attention<Weights>& l = *layer.attention;
      const int D = l.shape.head_dim, inner = l.shape.heads * D, kv = l.shape.kv_heads * D;
      auto q_gate = row(2 * inner), k = row(kv), v = row(kv), q = row(inner), out = row(inner);
      reference::project({{matrix_of(l.q), t, q_gate.data(), 2 * inner},
                          {matrix_of(l.k), t, k.data(), kv},
                          {matrix_of(l.v), t, v.data(), kv}},
                         t, x.data(), hidden, 1);
      reference::AttentionShape shape{t,
                                      1,
                                      1,
                                      l.shape.heads,
                                      l.shape.kv_heads,
                                      D,
                                      l.shape.rotary,
                                      l.shape.base,
                                      l.shape.eps,
                                      type(*l.q_norm)};
      const int64_t head_stride = int64_t(cache.capacity) * D;
      const int32_t offset = position;
      reference::attention_prepare(shape, q_gate.data(), k.data(), pointer(*l.q_norm),
                                   pointer(*l.k_norm), &offset, q.data(),
                                   at(t, cache.first, int64_t(position) * D), head_stride);
      for (int head = 0; head < l.shape.kv_heads; ++head) {
        std::memcpy(at(t, cache.second, head * head_stride + int64_t(position) * D),
                    at(t, v.data(), int64_t(head) * D), D * size_of(t));
      }
      reference::KeyValues all{cache.first, cache.second, 0, head_stride, D,
                               0,           head_stride,  D, position + 1};
      reference::attend(shape, q.data(), all, {}, q_gate.data(), out.data());
      reference::project({{matrix_of(l.out), t, y.data(), hidden}}, t, out.data(), inner, 1);
    }
    reference::add(t, h.data(), y.data(), hidden, h.data());
    reference::rms_norm(t, h.data(), type(*layer.post_norm), pointer(*layer.post_norm),
                        plan.model.eps, 1, hidden, x.data());
    reference::moe(moe_weights(layer.moe, t), x.data(), 1, y.data());
    reference::add(t, h.data(), y.data(), hidden, h.data());
  }
  reference::rms_norm(t, h.data(), type(*plan.model.norm), pointer(*plan.model.norm),
                      plan.model.eps, 1, hidden, x.data());
  const int vocabulary = plan.model.head.rows();
  std::vector<float> own;
  if (logits == nullptr) {
    own.resize(vocabulary);
    logits = own.data();
  }
  reference::project({{matrix_of(plan.model.head), Type::f32, logits, vocabulary}}, t, x.data(),
                     hidden, 1);
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
  DecodeStep(mx::Stream s, std::shared_ptr<DecodeState> state, int position)
      : Primitive(s), state_(std::move(state)), position_(position) {}

  const char* name() const override {
    return "LilyDecodeStep";
  }

  void eval_cpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    for (auto& o : out) {
      allocate(o);
    }
    std::lock_guard<std::mutex> lock(state_->mutex_);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    const DecodePlan& plan = *state_->plan_;
    std::vector<LayerBuffers> buffers;
    std::vector<StepCaches> caches;
    // Every allocation comes before the first change of the state: a step that fails leaves it as
    // it was.
    std::vector<Successor> successors;
    for (size_t i = 0; i < plan.model.layers.size(); ++i) {
      successors.push_back(plan.model.layers[i].delta ? delta_successor(encoder, i)
                                                      : attention_successor(encoder, i));
    }
    std::vector<int> capacities;
    for (size_t i = 0; i < successors.size(); ++i) {
      const auto& keys = successors[i].first ? successors[i].first : state_->layers_[i].first;
      capacities.push_back(plan.model.layers[i].delta ? 0 : keys->shape(2));
    }
    auto run = host_step(plan, capacities, out.size() > 1);
    for (size_t i = 0; i < successors.size(); ++i) {
      auto& [first, second] = state_->layers_[i];
      Successor& next = successors[i];
      for (auto [slot, replacement] :
           {std::pair{&first, &next.first}, std::pair{&second, &next.second}}) {
        if (*replacement) {
          if (*slot) {
            encoder.add_temporary(**slot);
          }
          *slot = std::move(*replacement);
        }
      }
      buffers.push_back({first->data<char>(), second->data<char>(),
                         next.old_conv ? pointer(*next.old_conv) : nullptr, capacities[i]});
      caches.push_back({*first, *second, std::move(next.old_conv)});
      state_->copied_bytes_ += next.copied;
      state_->grown_bytes_ += next.grown;
    }
    if (run) {
      run_on_host(stream(), run, state_, caches, position_, in[0], out[0],
                  out.size() > 1 ? &out[1] : nullptr);
      return;
    }
    float* logits = out.size() > 1 ? out[1].data<float>() : nullptr;
    // The state object, not its buffers, is kept alive: a buffer's use count stays 1 while only we
    // hold it.
    encoder.dispatch([state = state_, buffers = std::move(buffers), position = position_,
                      token = in[0].data<uint32_t>(), logits, next = out[0].data<uint32_t>()] {
      run_reference(*state->plan_, buffers, position, token, logits, next);
    });
  }

  void eval_gpu(const std::vector<mx::array>& in, std::vector<mx::array>& out) override {
    for (auto& o : out) {
      allocate(o);
    }
    std::lock_guard<std::mutex> lock(state_->mutex_);
    if (!state_->gpu_) {
      state_->gpu_ = make_gpu_decode(*state_->plan_);
    }
    state_->gpu_->step(state_->layers_, position_, in[0], out, stream(), state_->copied_bytes_,
                       state_->grown_bytes_, state_);
  }

 private:
  // The buffers that a layer goes on with; an absent one stays. What it replaces is kept until the
  // step has run.
  struct Successor {
    std::optional<mx::array> first, second;
    std::optional<mx::array> old_conv;
    int64_t copied = 0, grown = 0;
  };

  static mx::array zeros(mx::cpu::CommandEncoder& encoder, mx::Shape shape, mx::Dtype dtype) {
    mx::array a = fresh(std::move(shape), dtype);
    encoder.dispatch([p = a.data<char>(), n = a.nbytes()] { std::memset(p, 0, n); });
    return a;
  }

  // A copy when anybody else holds `a`, or nothing.
  static std::optional<mx::array> unshared(mx::cpu::CommandEncoder& encoder, const mx::array& a,
                                           int64_t& copied) {
    if (a.is_donatable()) {
      return std::nullopt;
    }
    mx::array copy = fresh(a.shape(), a.dtype());
    encoder.dispatch(
        [to = copy.data<char>(), from = pointer(a), n = a.nbytes()] { std::memcpy(to, from, n); });
    copied += static_cast<int64_t>(a.nbytes());
    return copy;
  }

  Successor delta_successor(mx::cpu::CommandEncoder& encoder, size_t i) {
    const GatedDelta<Weights>& d = *state_->plan_->model.layers[i].delta;
    const auto& [conv, delta] = state_->layers_[i];
    const mx::Shape conv_shape{1, d.shape.conv_width - 1, d.qkv.rows()};
    Successor next;
    // The old conv state is only read, so it does not matter who else holds it; its successor is a
    // fresh buffer.
    next.first = fresh(conv_shape, state_->plan_->dtype);
    if (conv) {
      next.old_conv = *conv;
    } else {
      mx::array empty = zeros(encoder, conv_shape, state_->plan_->dtype);
      next.old_conv = empty;
      encoder.add_temporary(std::move(empty));
    }
    next.second = delta
                      ? unshared(encoder, *delta, next.copied)
                      : zeros(encoder, {1, d.shape.value_heads, d.shape.value_dim, d.shape.key_dim},
                              mx::float32);
    return next;
  }

  Successor attention_successor(mx::cpu::CommandEncoder& encoder, size_t i) {
    const Attention<Weights>& l = *state_->plan_->model.layers[i].attention;
    const auto& [keys, values] = state_->layers_[i];
    Successor next;
    const int capacity = keys ? keys->shape(2) : 0;
    if (position_ < capacity) {
      next.first = unshared(encoder, *keys, next.copied);
      next.second = unshared(encoder, *values, next.copied);
      return next;
    }
    const int larger = grown_capacity(capacity, position_ + 1);
    for (auto [old, to] : {std::pair{&keys, &next.first}, std::pair{&values, &next.second}}) {
      *to = zeros(encoder, {1, l.shape.kv_heads, larger, l.shape.head_dim}, state_->plan_->dtype);
      if (*old) {
        const size_t row = (*old)->nbytes() / l.shape.kv_heads,
                     new_row = (*to)->nbytes() / l.shape.kv_heads;
        encoder.dispatch([dst = (*to)->data<char>(), src = pointer(**old), row, new_row,
                          heads = l.shape.kv_heads] {
          for (int h = 0; h < heads; ++h) {
            std::memcpy(dst + h * new_row, static_cast<const char*>(src) + h * row, row);
          }
        });
        next.grown += static_cast<int64_t>((*old)->nbytes());
      }
    }
    return next;
  }

  std::shared_ptr<DecodeState> state_;
  int position_;
};

void DecodeState::put(int layer, std::optional<mx::array> first, std::optional<mx::array> second) {
  const Layer<Weights>& l = plan_->model.layers.at(layer);
  auto check = [&](const std::optional<mx::array>& a, mx::Shape expected, mx::Dtype dtype,
                   const char* what) {
    if (a && (a->shape() != expected || a->dtype() != dtype)) {
      throw std::invalid_argument(std::string("the cache's ") + what + " of layer " +
                                  std::to_string(layer) + " has shape " + shape_text(*a) +
                                  " or a dtype that does not fit the model");
    }
  };
  if (l.delta) {
    const GatedDelta<Weights>& d = *l.delta;
    check(first, {1, d.shape.conv_width - 1, d.qkv.rows()}, plan_->dtype, "conv state");
    check(second, {1, d.shape.value_heads, d.shape.value_dim, d.shape.key_dim}, mx::float32,
          "DeltaNet state");
  } else {
    const Attention<Weights>& a = *l.attention;
    const int capacity = first && first->ndim() == 4 ? first->shape(2) : 0;
    check(first, {1, a.shape.kv_heads, capacity, a.shape.head_dim}, plan_->dtype, "keys");
    check(second, {1, a.shape.kv_heads, capacity, a.shape.head_dim}, plan_->dtype, "values");
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
  auto step = std::make_shared<DecodeStep>(s, state, position);
  std::vector<mx::Shape> shapes{{1, 1}};
  std::vector<mx::Dtype> dtypes{mx::uint32};
  if (with_logits) {
    shapes.push_back({1, 1, state->plan().model.head.rows()});
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
