// The decode step on an NVIDIA GPU: the Program is a CUDA graph, bound to a set of buffers, and
// each step sets the position, copies the token in, launches the graph and copies the results out,
// all on MLX's stream. A sequence that ends leaves its graphs to the next one.
#include <algorithm>
#include <deque>
#include <list>
#include <mutex>
#include <stdexcept>

#include "backend/cuda.h"
#include "backend/cuda_memory.h"
#include "backend/planned_decode.h"
#include "programs/decode_program.h"

namespace lily {
namespace {

// The card's own memory, for what never leaves a step: MLX's allocator gives memory that the CPU
// shares, and kernels that start by reading a position over the bus wait for it.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes) : bytes_(std::max<size_t>(bytes, 16)) {
    check_cuda(cuCtxGetCurrent(&context_), "asking for the context");
    check_cuda(cuMemAlloc(&address_, bytes_), std::to_string(bytes_) + " bytes for a decode step");
  }
  // Waits for the card. Also on threads that MLX runs handlers on, where no context is current.
  ~DeviceMemory() {
    cuCtxPushCurrent(context_);
    cuMemFree(address_);
    cuCtxPopCurrent(nullptr);
  }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  CUdeviceptr address() const {
    return address_;
  }
  size_t bytes() const {
    return bytes_;
  }
  Buffer buffer() const {
    return {static_cast<uint64_t>(address_), reinterpret_cast<char*>(address_), bytes_};
  }

 private:
  CUcontext context_ = nullptr;
  CUdeviceptr address_ = 0;
  size_t bytes_;
};

DecodeOptions& set_options() {
  static DecodeOptions options = nvidia_options();
  return options;
}

// The options for this thread's GPU. What is asked for ahead must stay in its L2 cache, beside all
// that two kernels read meanwhile: a quarter of it at most.
DecodeOptions suited(DecodeOptions options) {
  const int l2_bytes =
      device_attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, "asking for the GPU's L2 cache");
  if (options.ahead > l2_bytes / 4 / 1024) {
    options.ahead = 0;
  }
  return options;
}

CUdeviceptr address(const mx::array& a) {
  return reinterpret_cast<CUdeviceptr>(device_pointer(a));
}

// Graphs kept: the conv states alternate between two buffers, so two serve while nothing else
// changes.
constexpr size_t kGraphs = 4;

// What the steps of one sequence run in, whatever its caches. Making two graphs takes the CPU
// longer than a step takes the card, between a prompt and its second token; binding them anew does
// not.
struct StepSpace {
  StepSpace(CUstream stream, size_t logits_bytes) : stream(stream), logits(logits_bytes) {}

  // Memory and tables for a Program. Graphs wait to be bound to it.
  void serve(std::shared_ptr<const DecodeProgram> next_program) {
    if (next_program == program) {
      return;
    }
    program = std::move(next_program);
    forget();
    if (!arena || arena->bytes() < program->program.arena_bytes()) {
      arena.emplace(program->program.arena_bytes());
    }
    tables.clear();
    for (const auto& table : program->tables) {
      DeviceMemory& a = tables.emplace_back(table.data.size());
      // From pageable memory: the call returns when the source has been read.
      check_cuda(cuMemcpyHtoDAsync(a.address(), table.data.data(), table.data.size(), stream),
                 "a table");
    }
  }

  void forget() {
    for (Bound& b : graphs) {
      b.key.clear();
    }
  }

  CUstream stream;  // of the last step
  DeviceMemory token{4}, position{4}, next{4}, logits;
  std::optional<DeviceMemory> arena;
  std::shared_ptr<const DecodeProgram> program;
  std::deque<DeviceMemory> tables;
  struct Bound {
    std::vector<CUdeviceptr> key;  // the caches' addresses; none: bound to caches that are gone
    std::shared_ptr<CudaGraph> graph;
  };
  std::list<Bound> graphs;  // the one used last comes first
};

}  // namespace

// The spaces of a model's sequences that have ended. From any thread.
class StepPool {
 public:
  // Null: none was last used on this stream, where its steps come before whatever follows.
  std::unique_ptr<StepSpace> take(CUstream stream) {
    std::lock_guard lock(mutex_);
    for (auto it = spaces_.begin(); it != spaces_.end(); ++it) {
      if ((*it)->stream == stream) {
        std::unique_ptr<StepSpace> space = std::move(*it);
        spaces_.erase(it);
        return space;
      }
    }
    return nullptr;
  }

  // Its steps have run.
  void put(std::unique_ptr<StepSpace> space) {
    space->forget();
    std::unique_ptr<StepSpace> oldest;  // freed after the lock
    std::lock_guard lock(mutex_);
    spaces_.push_front(std::move(space));
    if (spaces_.size() > kMost) {
      oldest = std::move(spaces_.back());
      spaces_.pop_back();
    }
  }

  static std::shared_ptr<StepPool> of(const DecodePlan& plan) {
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    if (!plan.steps) {
      plan.steps = std::make_shared<StepPool>();
    }
    return plan.steps;
  }

 private:
  static constexpr size_t kMost = 2;
  std::mutex mutex_;
  std::list<std::unique_ptr<StepSpace>> spaces_;
};

namespace {

class CudaDecode : public PlannedDecode {
 public:
  explicit CudaDecode(const DecodePlan& plan)
      : PlannedDecode(plan, "NVIDIA"), pool_(StepPool::of(plan)), spare_(plan.layers.size()) {}

  ~CudaDecode() override {
    if (space_) {
      pool_->put(std::move(space_));
    }
  }

  void step(std::vector<CachePair>& layers, int position, const mx::array& token,
            std::vector<mx::array>& out, mx::Stream s, int64_t& copied, int64_t& grown,
            std::shared_ptr<void> owner) override {
    auto& encoder = mx::cu::get_command_encoder(s);
    encoder.device().make_current();
    // What MLX has queued goes first: from here on its stream is used directly.
    encoder.commit();
    const CUstream stream = encoder.stream();

    std::vector<mx::array> replaced;  // kept until the step has run
    prepare(layers, position, stream, replaced, copied, grown);
    if (!program_ || capacities_ != capacities(layers) || options_ != set_options()) {
      build(layers, stream);
    }
    std::vector<mx::array> next_conv = spare(layers, replaced);
    CudaGraph& graph = graph_for(layers, next_conv);

    StepSpace& space = *space_;
    space.stream = stream;
    check_cuda(
        cuMemsetD32Async(space.position.address(), static_cast<unsigned>(position), 1, stream),
        "position");
    check_cuda(cuMemcpyAsync(space.token.address(), address(token), 4, stream), "token");
    graph.launch(stream);
    check_cuda(cuMemcpyAsync(address(out[0]), space.next.address(), 4, stream), "next token");
    if (out.size() > 1) {
      check_cuda(cuMemcpyAsync(address(out[1]), space.logits.address(), out[1].nbytes(), stream),
                 "logits");
    }
    for (size_t i = 0, c = 0; i < layers.size(); ++i) {
      if (plan_.layers[i].delta) {
        spare_[i] = *layers[i].first;
        layers[i].first = next_conv[c++];
      }
    }
    replaced.push_back(token);
    // A graph may still be running when another takes its place.
    encoder.add_completed_handler([owner = std::move(owner), kept = std::move(replaced),
                                   graphs = std::move(retired_)]() mutable {
      kept.clear();
      graphs.clear();
    });
    retired_.clear();
  }

  std::vector<Timing> profile(mx::Stream s) override {
    if (!last_bindings_) {
      throw std::runtime_error("profile: no step has run yet");
    }
    auto& encoder = mx::cu::get_command_encoder(s);
    encoder.device().make_current();
    encoder.commit();
    const CUstream stream = encoder.stream();
    CUevent begin, end;
    check_cuda(cuEventCreate(&begin, 0), "an event");
    check_cuda(cuEventCreate(&end, 0), "an event");
    std::vector<std::string> labels;
    for (const Dispatch& d : program_->program.dispatches()) {
      if (std::find(labels.begin(), labels.end(), d.name) == labels.end()) {
        labels.push_back(d.name);
      }
    }
    std::vector<Timing> timings;
    for (const std::string& label : labels) {
      CudaGraph graph(program_->program, *last_bindings_, &label);
      float best = 1e30f;
      for (int i = 0; i < 6; ++i) {  // the first warms up
        float ms = 0;
        check_cuda(cuEventRecord(begin, stream), "an event");
        graph.launch(stream);
        check_cuda(cuEventRecord(end, stream), "an event");
        check_cuda(cuEventSynchronize(end), "timing " + label);
        check_cuda(cuEventElapsedTime(&ms, begin, end), "an event");
        best = std::min(best, ms);
      }
      timings.push_back({label, graph.size(), best * 1e-3});
    }
    cuEventDestroy(begin);
    cuEventDestroy(end);
    return timings;
  }

 private:
  // Every cache present, large enough, and ours alone where it is written.
  void prepare(std::vector<CachePair>& layers, int position, CUstream stream,
               std::vector<mx::array>& replaced, int64_t& copied, int64_t& grown) {
    auto zeros = [&](mx::Shape shape, mx::Dtype dtype) {
      mx::array a = device_array(std::move(shape), dtype);
      check_cuda(cuMemsetD8Async(address(a), 0, a.nbytes(), stream), "clearing a cache");
      return a;
    };
    auto own = [&](mx::array& a) {
      if (!held_alone(a)) {
        mx::array copy = device_array(a.shape(), a.dtype());
        check_cuda(cuMemcpyAsync(address(copy), address(a), a.nbytes(), stream),
                   "copying a shared cache");
        copied += static_cast<int64_t>(a.nbytes());
        replaced.push_back(a);
        a = copy;
      }
    };
    for (size_t i = 0; i < layers.size(); ++i) {
      auto& [first, second] = layers[i];
      if (plan_.layers[i].delta) {
        const DeltaLayer& d = *plan_.layers[i].delta;
        if (!first) {
          first = zeros({1, d.conv.shape(1) - 1, d.qkv.rows()}, plan_.dtype);
        }
        if (second) {
          own(*second);
        } else {
          second = zeros({1, d.value_heads, d.value_dim, d.key_dim}, mx::float32);
        }
        continue;
      }
      const AttentionLayer& l = *plan_.layers[i].attention;
      const int capacity = first ? first->shape(2) : 0;
      for (auto* cache : {&first, &second}) {
        if (position < capacity) {
          own(**cache);
          continue;
        }
        mx::array larger =
            zeros({1, l.kv_heads, grown_capacity(capacity, position + 1), l.head_dim}, plan_.dtype);
        if (*cache) {
          const size_t row = (*cache)->nbytes() / l.kv_heads,
                       new_row = larger.nbytes() / l.kv_heads;
          for (int h = 0; h < l.kv_heads; ++h) {
            check_cuda(cuMemcpyAsync(address(larger) + h * new_row, address(**cache) + h * row, row,
                                     stream),
                       "growing a cache");
          }
          grown += static_cast<int64_t>((*cache)->nbytes());
          replaced.push_back(**cache);
        }
        *cache = larger;
      }
    }
  }

  void build(const std::vector<CachePair>& layers, CUstream stream) {
    capacities_ = capacities(layers);
    options_ = set_options();
    last_bindings_.reset();
    program_ = programs_of(plan_)->at(capacities_, suited(options_));
    if (!space_) {
      space_ = pool_->take(stream);
    }
    if (!space_) {
      space_ = std::make_unique<StepSpace>(stream, 4 * size_t(plan_.head.rows()));
    }
    space_->serve(program_);
  }

  // Buffers for the conv states that this step writes.
  std::vector<mx::array> spare(const std::vector<CachePair>& layers,
                               std::vector<mx::array>& replaced) {
    std::vector<mx::array> next;
    for (size_t i = 0; i < layers.size(); ++i) {
      if (!plan_.layers[i].delta) {
        continue;
      }
      if (!spare_[i] || !held_alone(*spare_[i])) {
        if (spare_[i]) {
          replaced.push_back(*spare_[i]);
        }
        spare_[i] = device_array(layers[i].first->shape(), layers[i].first->dtype());
      }
      next.push_back(*spare_[i]);
      spare_[i].reset();
    }
    return next;
  }

  CudaGraph& graph_for(const std::vector<CachePair>& layers,
                       const std::vector<mx::array>& next_conv) {
    std::vector<CUdeviceptr> key;
    for (const CachePair& pair : layers) {
      key.push_back(address(*pair.first));
      key.push_back(address(*pair.second));
    }
    for (const mx::array& a : next_conv) {
      key.push_back(address(a));
    }
    auto& graphs = space_->graphs;
    auto it =
        std::find_if(graphs.begin(), graphs.end(), [&](const auto& b) { return b.key == key; });
    if (it != graphs.end()) {
      graphs.splice(graphs.begin(), graphs, it);
      return *it->graph;
    }
    last_bindings_.emplace(program_->program);
    Bindings& bindings = *last_bindings_;
    auto bind = [&](SlotId slot, const mx::array& a) { bindings.bind(slot, device_buffer(a)); };
    const auto arrays = plan_.arrays();
    for (size_t i = 0; i < arrays.size(); ++i) {
      bind(program_->weights[i], *arrays[i]);
    }
    for (size_t i = 0; i < space_->tables.size(); ++i) {
      bindings.bind(program_->tables[i].slot, space_->tables[i].buffer());
    }
    for (size_t i = 0, c = 0; i < layers.size(); ++i) {
      bind(program_->caches[i].first, *layers[i].first);
      bind(program_->caches[i].second, *layers[i].second);
      if (plan_.layers[i].delta) {
        bind(program_->caches[i].first_next, next_conv[c++]);
      }
    }
    bindings.bind(program_->token, space_->token.buffer());
    bindings.bind(program_->position, space_->position.buffer());
    bindings.bind(program_->next, space_->next.buffer());
    bindings.bind(program_->logits, space_->logits.buffer());
    bindings.bind_arena(space_->arena->buffer());
    // The graph used longest ago is bound anew, if its caches are gone or there are enough.
    std::shared_ptr<CudaGraph> graph;
    if (!graphs.empty() && (graphs.back().key.empty() || graphs.size() >= kGraphs)) {
      graph = std::move(graphs.back().graph);
      graphs.pop_back();
      if (!graph->rebind(program_->program, bindings)) {
        retired_.push_back(std::move(graph));
      }
    }
    if (!graph) {
      graph = std::make_shared<CudaGraph>(program_->program, bindings);
    }
    graphs.push_front({std::move(key), std::move(graph)});
    return *graphs.front().graph;
  }

  std::optional<Bindings> last_bindings_;  // after program_, which it points to
  DecodeOptions options_;                  // the ones set when program_ was built
  std::shared_ptr<StepPool> pool_;
  std::unique_ptr<StepSpace> space_;
  std::vector<std::optional<mx::array>> spare_;  // by layer
  std::vector<std::shared_ptr<CudaGraph>> retired_;
};

}  // namespace

void set_cuda_decode_options(const DecodeOptions& options) {
  set_options() = options;
}

std::unique_ptr<GpuDecode> make_gpu_decode(const DecodePlan& plan) {
  return std::make_unique<CudaDecode>(plan);
}

}  // namespace lily
