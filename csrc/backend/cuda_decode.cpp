// The decode step on an NVIDIA GPU: the Program is a CUDA graph, bound to a set of buffers, and
// each step sets the position, copies the token in, launches the graph and copies the results out,
// all on MLX's stream. A sequence that ends leaves its graphs to the next one.
#include <algorithm>
#include <deque>
#include <list>
#include <mutex>
#include <stdexcept>

#include "backend/cuda.h"
#include "backend/cuda_layers.h"
#include "backend/cuda_memory.h"
#include "backend/gpu.h"
#include "backend/planned_decode.h"
#include "model.h"
#include "run.h"

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

// The options for this thread's GPU. What is asked for ahead must stay in its L2 cache, beside all
// that two kernels read meanwhile: a quarter of it at most.
StepOptions suited(StepOptions options) {
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
  void serve(std::shared_ptr<const StepProgram> next_program) {
    if (next_program == program) {
      return;
    }
    program.reset();  // until all of it is there
    forget();
    if (!arena || arena->bytes() < next_program->program.arena_bytes()) {
      arena.emplace(next_program->program.arena_bytes());
    }
    tables.clear();
    for (const auto& table : next_program->tables) {
      DeviceMemory& a = tables.emplace_back(table.data.size());
      // From pageable memory: the call returns when the source has been read.
      check_cuda(cuMemcpyHtoDAsync(a.address(), table.data.data(), table.data.size(), stream),
                 "a table");
    }
    program = std::move(next_program);
  }

  void forget() {
    for (Bound& b : graphs) {
      b.key.clear();
    }
  }

  CUstream stream;  // of the last step
  DeviceMemory token{4}, position{4}, next{4}, logits;
  std::optional<DeviceMemory> arena;
  std::shared_ptr<const StepProgram> program;
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
      : PlannedDecode(plan, "NVIDIA"),
        pool_(StepPool::of(plan)),
        spare_(plan.model.layers.size()) {}

  ~CudaDecode() override {
    if (space_) {
      pool_->put(std::move(space_));
    }
  }

  void step(const std::vector<CachePair>& layers, const std::shared_ptr<Successors>& next,
            int position, const mx::array& token, std::vector<mx::array>& out,
            mx::Stream s) override {
    auto& encoder = mx::cu::get_command_encoder(s);
    encoder.device().make_current();
    // What MLX has queued goes first: from here on its stream is used directly.
    encoder.commit();
    const CUstream stream = encoder.stream();
    // First, so that copies which are queued have their memory also when the step throws. A graph
    // may still be running when another takes its place.
    encoder.add_completed_handler([next = next, token, graphs = std::move(retired_)]() mutable {
      graphs.clear();
      next.reset();
    });
    retired_.clear();

    next->make(
        layers, position, held_alone,
        [&](mx::Shape shape, mx::Dtype dtype, const std::optional<mx::array>& source, int rows) {
          return padded(std::move(shape), dtype, source, rows, stream);
        },
        [&](size_t i, mx::Shape shape) {
          const bool free = spare_[i] && held_alone(*spare_[i]);
          return free ? *spare_[i] : device_array(std::move(shape), plan_.dtype);
        });
    const std::vector<Successors::Used> used = next->used(layers);
    if (capacities_ != capacities(used) || options_ != gpu_step_options()) {
      build(capacities(used), stream);
    }
    CudaGraph& graph = graph_for(used);

    StepSpace& space = *space_;
    space.stream = stream;
    const CUdeviceptr token_out = address(out[0]),
                      logits_out = out.size() > 1 ? address(out[1]) : 0;
    check_cuda(
        cuMemsetD32Async(space.position.address(), static_cast<unsigned>(position), 1, stream),
        "position");
    check_cuda(cuMemcpyAsync(space.token.address(), address(token), 4, stream), "token");
    graph.launch(stream);
    // From here on the caches are written: only a card that is lost fails.
    check_cuda(cuMemcpyAsync(token_out, space.next.address(), 4, stream), "next token");
    if (logits_out != 0) {
      check_cuda(cuMemcpyAsync(logits_out, space.logits.address(), out[1].nbytes(), stream),
                 "logits");
    }
    for (size_t i = 0; i < used.size(); ++i) {
      if (used[i].first_next != nullptr) {
        spare_[i] = *used[i].first;
      }
    }
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
  static mx::array padded(mx::Shape shape, mx::Dtype dtype, const std::optional<mx::array>& source,
                          int rows, CUstream stream) {
    mx::array a = device_array(std::move(shape), dtype);
    if (source && source->nbytes() == a.nbytes()) {
      rows = 1;
    } else {
      check_cuda(cuMemsetD8Async(address(a), 0, a.nbytes(), stream), "clearing a cache");
    }
    for (int r = 0; source && r < rows; ++r) {
      const size_t from = source->nbytes() / rows, to = a.nbytes() / rows;
      check_cuda(cuMemcpyAsync(address(a) + r * to, address(*source) + r * from, from, stream),
                 "copying a cache");
    }
    return a;
  }

  void build(std::vector<int> capacities, CUstream stream) {
    capacities_.clear();
    options_ = gpu_step_options();
    last_bindings_.reset();
    program_ = programs_->at(capacities, suited(*options_));
    if (!space_) {
      space_ = pool_->take(stream);
    }
    if (!space_) {
      space_ = std::make_unique<StepSpace>(stream, 4 * size_t(plan_.model.head.rows()));
    }
    space_->serve(program_);
    capacities_ = std::move(capacities);
  }

  CudaGraph& graph_for(const std::vector<Successors::Used>& used) {
    std::vector<CUdeviceptr> key;
    for (const Successors::Used& u : used) {
      for (const mx::array* a : {u.first, u.second, u.first_next}) {
        key.push_back(a != nullptr ? address(*a) : 0);
      }
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
    bind_weights(*program_, plan_, bind);
    for (size_t i = 0; i < space_->tables.size(); ++i) {
      bindings.bind(program_->tables[i].slot, space_->tables[i].buffer());
    }
    bind_caches(*program_, used, bind);
    bindings.bind(program_->token, space_->token.buffer());
    bindings.bind(program_->position, space_->position.buffer());
    bindings.bind(program_->next, space_->next.buffer());
    bindings.bind(program_->logits, space_->logits.buffer());
    bindings.bind_arena(space_->arena->buffer());
    // The graph used longest ago is bound anew, if its caches are gone or there are enough.
    std::shared_ptr<CudaGraph> graph;
    if (!graphs.empty() && (graphs.back().key.empty() || graphs.size() >= kGraphs)) {
      graph = retired_.emplace_back(std::move(graphs.back().graph));
      graphs.pop_back();
      if (graph->rebind(program_->program, bindings)) {
        retired_.pop_back();
      } else {
        graph.reset();
      }
    }
    if (!graph) {
      graph = std::make_shared<CudaGraph>(program_->program, bindings);
    }
    graphs.push_front({std::move(key), std::move(graph)});
    return *graphs.front().graph;
  }

  std::optional<Bindings> last_bindings_;       // after program_, which it points to
  std::shared_ptr<const StepOptions> options_;  // the ones set when program_ was built
  std::shared_ptr<StepPool> pool_;
  std::unique_ptr<StepSpace> space_;
  std::vector<std::optional<mx::array>> spare_;  // by layer
  std::vector<std::shared_ptr<CudaGraph>> retired_;
};

class CudaGpu : public Gpu {
 public:
  Target target() const override {
    return Target::cuda;
  }
  void allocate(mx::array& out) const override {
    allocate_on_device(out);
  }
  // data() would move the array to where the CPU can read it; buffers start at more than 16 bytes.
  size_t start(const mx::array& a) const override {
    return static_cast<size_t>(a.offset());
  }
  size_t alignment() const override {
    return 16;
  }
  void run(mx::Stream stream, const std::shared_ptr<const LayerProgram>& layer,
           const std::vector<mx::array>& in, const std::vector<mx::array>& out) const override {
    run_on_cuda(stream, layer, in, out);
  }
  std::unique_ptr<GpuDecode> make_decode(const DecodePlan& plan) const override {
    return std::make_unique<CudaDecode>(plan);
  }
};

}  // namespace

const Gpu* gpu() {
  static const CudaGpu cuda;
  return &cuda;
}

}  // namespace lily
