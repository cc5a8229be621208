#include "backend/cuda.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "mlx/backend/cuda/utils.h"

namespace lily {
namespace {

// What a launch of one dispatch needs: pointers to its parameters, which `storage` keeps.
class Parameters {
 public:
  Parameters(const Bindings& bindings, const Dispatch& d) {
    // The entry takes the kernel's buffer arguments in index order: a pointer, or the value itself
    // for a reference.
    std::vector<const ArgumentLayout*> buffers;
    std::vector<int> groups;
    for (const ArgumentLayout& a : d.kernel->arguments) {
      if (a.space == Space::threadgroup) {
        groups.push_back(a.index);
      } else {
        buffers.push_back(&a);
      }
    }
    auto by_index = [](auto* a, auto* b) { return a->index < b->index; };
    std::sort(buffers.begin(), buffers.end(), by_index);
    std::sort(groups.begin(), groups.end());
    for (const ArgumentLayout* a : buffers) {
      const bool by_value = a->space == Space::constant && a->size > 0;  // a reference
      if (by_value) {
        value(d, bindings, *a);
      } else {
        pointer(d, bindings, *a);
      }
    }
    for (size_t i = 0; i < groups.size(); ++i) {
      if (i > 0) {
        const uint32_t offset = shared_bytes_;
        put(&offset, sizeof offset);
      }
      for (const ThreadgroupMemory& t : d.threadgroup) {
        if (t.index == groups[i]) {
          shared_bytes_ += static_cast<uint32_t>((t.bytes + 15) / 16 * 16);
        }
      }
    }
    for (auto& bytes : storage_) {
      pointers_.push_back(bytes.data());
    }
  }

  void** data() {
    return pointers_.data();
  }
  uint32_t shared_bytes() const {
    return shared_bytes_;
  }
  bool operator==(const Parameters& other) const {
    return storage_ == other.storage_ && shared_bytes_ == other.shared_bytes_;
  }

 private:
  void put(const void* data, size_t bytes) {
    const auto* p = static_cast<const char*>(data);
    storage_.emplace_back(p, p + bytes);
  }

  void pointer(const Dispatch& d, const Bindings& bindings, const ArgumentLayout& a) {
    uint64_t address = 0;  // an argument that the constants rule out
    for (const BufferArgument& b : d.buffers) {
      if (b.index == a.index) {
        const Place place = bindings.place(b);
        address = reinterpret_cast<uint64_t>(place.buffer.base) + place.offset;
      }
    }
    put(&address, sizeof address);
  }

  void value(const Dispatch& d, const Bindings& bindings, const ArgumentLayout& a) {
    for (const ScalarArgument& s : d.scalars) {
      if (s.index == a.index) {
        const auto& bytes = bindings.scalar(s.scalar).bytes;
        return put(bytes.data(), bytes.size());
      }
    }
    for (const ValueArgument& v : d.values) {
      if (v.index == a.index) {
        return put(v.value.bytes.data(), v.value.bytes.size());
      }
    }
    for (const BufferArgument& b : d.buffers) {
      if (b.index == a.index) {
        throw std::runtime_error("kernel '" + d.kernel->name + "' takes '" + a.name +
                                 "' by value on this backend; a buffer was bound to it");
      }
    }
    const std::vector<char> none(std::max<size_t>(a.size, 4));
    put(none.data(), none.size());
  }

  std::vector<std::vector<char>> storage_;
  std::vector<void*> pointers_;
  uint32_t shared_bytes_ = 0;
};

// Above this, a kernel must be told that it may use the memory.
constexpr uint32_t kSharedByDefault = 48 << 10;

void allow_shared(CUfunction f, uint32_t bytes, const std::string& name) {
  if (bytes > kSharedByDefault) {
    check_cuda(cuFuncSetAttribute(f, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                  static_cast<int>(bytes)),
               "shared memory of " + name);
  }
}

}  // namespace

void check_cuda(CUresult result, const std::string& what) {
  if (result != CUDA_SUCCESS) {
    const char* text = nullptr;
    cuGetErrorString(result, &text);
    throw std::runtime_error("lily_mlx, NVIDIA: " + what + ": " +
                             (text != nullptr ? text : "unknown error"));
  }
}

int device_attribute(CUdevice_attribute attribute, const std::string& what) {
  CUdevice device;
  int value = 0;
  check_cuda(cuCtxGetDevice(&device), "asking for the GPU");
  check_cuda(cuDeviceGetAttribute(&value, attribute, device), what);
  return value;
}

char* device_pointer(const mlx::core::array& a) {
  return static_cast<char*>(mlx::core::gpu_ptr<void>(a));
}

Buffer device_buffer(const mlx::core::array& a) {
  return {reinterpret_cast<uint64_t>(a.buffer().ptr()), device_pointer(a), a.nbytes()};
}

namespace {

// What a kernel writes where it waits (metal/host/include/dependent_launch): a comment in PTX for
// sm_80, made into instructions where the GPU has them.
const std::string kMark = "// ahead: ";
const std::string kTarget = ".target sm_80";

// Whether this process's GPU can start a kernel before the one it depends on has ended.
bool starts_ahead() {
  return device_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                          "asking for the GPU's architecture") >= 9;
}

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at)) {
    text.replace(at, from.size(), to);
    at += to.size();
  }
}

}  // namespace

void CudaKernels::load(const Entry& entry) {
  auto& [text, module] = *entry.module;
  if (module.handle != nullptr) {
    return;
  }
  std::string here = text;
  module.ahead = text.find(kMark) != std::string::npos && starts_ahead();
  if (module.ahead) {
    replace_all(here, kMark, "");
    replace_all(here, kTarget, ".target sm_90");
  }
  check_cuda(cuModuleLoadData(&module.handle, here.c_str()), "loading " + entry.name);
}

void CudaKernels::add(const std::string& key, const std::string& text, const std::string& entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  entries_[key] = {&*modules_.try_emplace(text).first, entry, {}};
}

CudaKernels::Kernel CudaKernels::at(const Pipeline& pipeline) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto it = entries_.find(pipeline.key);
  if (it == entries_.end()) {
    throw std::runtime_error(
        "kernel '" + pipeline.kernel->name +
        "' was not compiled for NVIDIA with these constants (" + pipeline.key +
        "); run python -m lily_mlx.ptx, or load the model with engine=\"stock\"");
  }
  Entry& entry = it->second;
  if (entry.kernel.function == nullptr) {
    load(entry);
    const Module& module = entry.module->second;
    check_cuda(cuModuleGetFunction(&entry.kernel.function, module.handle, entry.name.c_str()),
               "finding " + entry.name);
    entry.kernel.ahead = module.ahead;
    check_cuda(cuFuncGetAttribute(&entry.kernel.most_threads,
                                  CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, entry.kernel.function),
               "asking for the registers of " + entry.name);
  }
  return entry.kernel;
}

CudaKernels& cuda_kernels() {
  static CudaKernels* kernels = new CudaKernels;  // modules go with the process
  return *kernels;
}

namespace {

// One dispatch as a node of a graph. Stays valid when moved.
struct Launch {
  Launch(const Program& program, const Bindings& bindings, const Dispatch& d)
      : parameters(bindings, d) {
    const CudaKernels::Kernel kernel = cuda_kernels().at(program.pipelines()[d.pipeline]);
    ahead = kernel.ahead;
    node.func = kernel.function;
    node.gridDimX = bindings.extent(d.grid_size[0]);
    node.gridDimY = bindings.extent(d.grid_size[1]);
    node.gridDimZ = bindings.extent(d.grid_size[2]);
    node.blockDimX = d.group_size[0];
    node.blockDimY = d.group_size[1];
    node.blockDimZ = d.group_size[2];
    node.sharedMemBytes = parameters.shared_bytes();
    node.kernelParams = parameters.data();
    allow_shared(node.func, node.sharedMemBytes, d.kernel->name);
    if (static_cast<int>(node.blockDimX * node.blockDimY * node.blockDimZ) > kernel.most_threads) {
      throw std::runtime_error("lily_mlx, NVIDIA: kernel '" + d.kernel->name + "' (" + d.name +
                               ") runs with at most " + std::to_string(kernel.most_threads) +
                               " threads a threadgroup on this GPU; choose fewer simdgroups");
    }
  }

  bool operator==(const Launch& o) const {
    return node.func == o.node.func && node.gridDimX == o.node.gridDimX &&
           node.gridDimY == o.node.gridDimY && node.gridDimZ == o.node.gridDimZ &&
           node.blockDimX == o.node.blockDimX && node.blockDimY == o.node.blockDimY &&
           node.blockDimZ == o.node.blockDimZ && parameters == o.parameters;
  }

  Parameters parameters;
  CUDA_KERNEL_NODE_PARAMS node = {};
  bool ahead;
};

}  // namespace

void add_node(mlx::core::cu::CommandEncoder& encoder, const Program& program,
              const Bindings& bindings, const Dispatch& d) {
  Launch launch(program, bindings, d);
  const CUDA_KERNEL_NODE_PARAMS& n = launch.node;
  encoder.add_kernel_node_raw(n.func, dim3(n.gridDimX, n.gridDimY, n.gridDimZ),
                              dim3(n.blockDimX, n.blockDimY, n.blockDimZ), {}, n.sharedMemBytes,
                              n.kernelParams);
}

struct CudaGraph::Parts {
  ~Parts() {
    if (executable != nullptr) {
      cuGraphExecDestroy(executable);
    }
    if (graph != nullptr) {
      cuGraphDestroy(graph);
    }
  }

  CUgraph graph = nullptr;  // its nodes name those of the executable
  CUgraphExec executable = nullptr;
  Schedule schedule;
  std::vector<CUgraphNode> nodes;  // of each dispatch
  std::vector<Launch> launches;    // in the schedule's order
  bool serial = false;             // no kernel starts while the one before runs
};

CudaGraph::CudaGraph(const Program& program, const Bindings& bindings, const std::string* label)
    : parts_(std::make_unique<Parts>()) {
  Parts& p = *parts_;
  check_cuda(cuGraphCreate(&p.graph, 0), "creating a graph");
  p.schedule = bindings.schedule();
  p.serial = program.serial();
  p.nodes.resize(program.dispatches().size());
  CUgraphNode last = nullptr;
  for (int index : p.schedule.order) {
    const Dispatch& d = program.dispatches()[index];
    if (label != nullptr && d.name != *label) {
      continue;
    }
    std::vector<CUgraphNode> before;
    if (label != nullptr) {
      before.assign(last != nullptr ? 1 : 0, last);
    } else {
      for (int i : p.schedule.predecessors[index]) {
        before.push_back(p.nodes[i]);
      }
    }
    const Launch& launch = p.launches.emplace_back(program, bindings, d);
    const bool ahead = launch.ahead && before.size() == 1 && !program.serial();
    check_cuda(cuGraphAddKernelNode(&p.nodes[index], p.graph, before.data(),
                                    ahead ? 0 : before.size(), &launch.node),
               "adding " + d.kernel->name + " (" + d.name + ")");
    if (ahead) {
      CUgraphEdgeData early = {};
      early.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
      early.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC;
      check_cuda(cuGraphAddDependencies_v2(p.graph, before.data(), &p.nodes[index], &early, 1),
                 "letting " + d.kernel->name + " (" + d.name + ") start ahead");
    }
    last = p.nodes[index];
  }
  check_cuda(cuGraphInstantiate(&p.executable, p.graph, 0), "instantiating " + program.name());
}

CudaGraph::~CudaGraph() = default;

size_t CudaGraph::size() const {
  return parts_->launches.size();
}

bool CudaGraph::rebind(const Program& program, const Bindings& bindings) {
  Parts& p = *parts_;
  const Schedule& schedule = bindings.schedule();
  if (schedule.order != p.schedule.order || schedule.predecessors != p.schedule.predecessors ||
      p.launches.size() != schedule.order.size() || program.serial() != p.serial) {
    return false;
  }
  std::vector<Launch> launches;
  launches.reserve(schedule.order.size());
  for (size_t i = 0; i < schedule.order.size(); ++i) {
    launches.emplace_back(program, bindings, program.dispatches()[schedule.order[i]]);
    if (launches[i].ahead != p.launches[i].ahead) {
      return false;
    }
  }
  for (size_t i = 0; i < launches.size(); ++i) {
    if (!(launches[i] == p.launches[i])) {
      check_cuda(cuGraphExecKernelNodeSetParams(p.executable, p.nodes[schedule.order[i]],
                                                &launches[i].node),
                 "binding " + program.name());
      p.launches[i] = std::move(launches[i]);
    }
  }
  return true;
}

void CudaGraph::launch(CUstream stream) {
  check_cuda(cuGraphLaunch(parts_->executable, stream), "launching a graph");
}

}  // namespace lily
