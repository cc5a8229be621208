#include "primitives/decode.h"

#include <algorithm>
#include <cstring>

#include "backend/gpu.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "primitives/decode_host.h"
#include "primitives/successors.h"
#include "run.h"

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
      const reference::DeltaShape shape = reference_shape(t, 1, 1, d.shape);
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
      const reference::AttentionShape shape = reference_shape(t, 1, 1, l.shape, type(*l.q_norm));
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
  reference::project({{matrix_of(plan.model.head), Type::fp32, logits, vocabulary}}, t, x.data(),
                     hidden, 1);
  *next = reference::argmax(logits, vocabulary);
}

}  // namespace

int grown_capacity(int capacity, int needed) {
  constexpr int kBlock = 256;
  const int wanted = std::max(needed, capacity + capacity / 8);
  return (wanted + kBlock - 1) / kBlock * kBlock;
}

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
        state_->gpu_ = require_gpu(name()).make_decode(*plan_);
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
    if (auto run = host_step(*plan_, rows, logits != nullptr)) {
      run_on_host(stream(), run, next, used, position_, token, out[0], logits);
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

std::shared_ptr<const DecodePlan> DecodeState::plan() const {
  auto plan = plan_.lock();
  if (!plan) {
    throw std::invalid_argument("the weights of these caches are gone; make a new state from them");
  }
  return plan;
}

void DecodeState::put(int layer, std::optional<mx::array> first, std::optional<mx::array> second) {
  const auto plan = this->plan();
  const Layer<Weights>& l = plan->model.layers.at(layer);
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
    check(first, {1, d.shape.conv_width - 1, d.qkv.rows()}, plan->dtype, "conv state");
    check(second, {1, d.shape.value_heads, d.shape.value_dim, d.shape.key_dim}, mx::float32,
          "DeltaNet state");
  } else {
    const Attention<Weights>& a = *l.attention;
    const int capacity = first && first->ndim() == 4 ? first->shape(2) : 0;
    check(first, {1, a.shape.kv_heads, capacity, a.shape.head_dim}, plan->dtype, "keys");
    check(second, {1, a.shape.kv_heads, capacity, a.shape.head_dim}, plan->dtype, "values");
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
    shapes.push_back({1, 1, plan->model.head.rows()});
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
