// Runs Programs on an NVIDIA GPU: the Metal kernels, compiled ahead of time to PTX, through the
// driver.
//
// A CudaGraph is a Program and its bindings instantiated once, which each step launches again on
// MLX's stream. Layer primitives (cuda_layers.h) add their dispatches to MLX's own graph.
#pragma once

#include <cuda.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "backend/encoder.h"
#include "mlx/array.h"
#include "mlx/backend/cuda/device.h"

namespace lily {

// The compiled kernels: the PTX of each pipeline, loaded into the driver on first use.
class CudaKernels {
 public:
  // `key`: Pipeline::key. The driver gets a text when its first function is asked for; equal texts
  // are one module.
  void add(const std::string& key, const std::string& text, const std::string& entry);
  bool has(const std::string& key) const {
    return entries_.count(key) != 0;
  }
  struct Kernel {
    CUfunction function = nullptr;
    bool ahead = false;    // waits for the kernels before it by itself, so it may be started early
    int most_threads = 0;  // of a threadgroup: its registers decide
  };
  // Throws std::runtime_error naming the kernel when it was not compiled or the driver refuses it.
  Kernel at(const Pipeline& pipeline);

 private:
  struct Module {
    CUmodule handle = nullptr;
    bool ahead = false;
  };
  using Modules = std::map<std::string, Module>;  // by text
  struct Entry {
    Modules::value_type* module;
    std::string name;
    Kernel kernel;
  };
  void load(const Entry& entry);

  std::mutex mutex_;
  std::map<std::string, Entry> entries_;
  Modules modules_;
};

CudaKernels& cuda_kernels();

// Adds a dispatch to MLX's graph. The caller has told the encoder which arrays it reads and writes.
void add_node(mlx::core::cu::CommandEncoder& encoder, const Program& program,
              const Bindings& bindings, const Dispatch& d);

// A Program with everything bound, as an executable CUDA graph whose edges are its true
// dependencies. A kernel that waits by itself (wait_for_previous in metal/common.h) is started
// while the only one that it depends on still runs, on GPUs that can.
class CudaGraph {
 public:
  // With `label`, only the dispatches of that label, one after another: for timing them.
  CudaGraph(const Program& program, const Bindings& bindings, const std::string* label = nullptr);
  ~CudaGraph();
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  void launch(CUstream stream);
  // Launches from now on run this Program with these bindings; a launch that is queued or running
  // stays as it was. False, and nothing changed, where the Program has other edges.
  bool rebind(const Program& program, const Bindings& bindings);
  size_t size() const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// The device memory behind an evaluated array, and its Buffer.
char* device_pointer(const mlx::core::array& a);
Buffer device_buffer(const mlx::core::array& a);

void check_cuda(CUresult result, const std::string& what);

// An attribute of the GPU of this thread's context; `what` is for the error.
int device_attribute(CUdevice_attribute attribute, const std::string& what);

}  // namespace lily
