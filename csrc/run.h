// How a primitive's Program runs: on the backend of the stream's GPU, or on the CPU with the Metal
// kernels that metal/host compiled, where the environment switch LILY_MLX_BACKEND=metal-host asks
// for it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/host.h"
#include "choice.h"
#include "layer_options.h"
#include "layer_program.h"
#include "mlx/array.h"
#include "mlx/stream.h"
#include "ops/step_options.h"

namespace lily {

namespace mx = mlx::core;

struct MetalHostOptions {
  std::string runtime;  // the shared library of metal/host
  HostOptions host;
  // (library, stub) for a pipeline; called without the GIL.
  std::function<std::pair<std::string, std::string>(const Pipeline&)> compile;
  StepOptions step;
  Target target = Target::metal;  // whose kernels are run
};

// Switches it on, or off with nullopt. Steps that are queued keep what they were queued with.
void set_metal_host(std::optional<MetalHostOptions> options);
bool metal_host();

// Compiled pipelines and their encoder. Steps hold it by shared_ptr, so that it may be replaced.
class MetalHost {
 public:
  explicit MetalHost(MetalHostOptions o)
      : options(std::move(o)), encoder_(options.runtime, options.host) {}

  // Compiles what the Program needs and this host does not have.
  void prepare(const Program& program);
  // Runs the Program on the stream's thread; it has been prepared. `owner` keeps it and what is
  // bound alive.
  static void queue(mx::Stream s, const std::shared_ptr<MetalHost>& host,
                    std::shared_ptr<const void> owner, const Program& program, Bindings bindings);

  const MetalHostOptions options;

 private:
  std::mutex mutex_;
  HostEncoder encoder_;
  std::set<std::string> known_;
};
std::shared_ptr<MetalHost> current_metal_host();

// The memory of an evaluated array, for a Program on the Metal host.
void bind_on_host(Bindings& b, SlotId slot, const mx::array& a);
void bind_on_host(Bindings& b, const Builder::Table& table);

// How often each kernel ran, or the reference for a reason, since the last reset: (kind, kernel,
// reason).
using RunCounts = std::map<std::tuple<std::string, std::string, std::string>, int64_t>;
RunCounts run_counts();
void reset_run_counts();
void count_run(const std::string& kind, const std::string& kernel, const std::string& reason);

// The GPU that this build has a backend for, Target::cpu where it has none.
Target gpu_target();
// Whose kernels primitives on this stream run; Target::cpu: the reference.
Target target_of(mx::Stream s);

// Why kernels cannot read an array where it lies, empty when they can. Touches no data.
std::string layout_refusal(const mx::array& a);

// How the decode steps of a GPU are built from now on, e.g. to time other forms; never null.
void set_gpu_step_options(const StepOptions& options);
std::shared_ptr<const StepOptions> gpu_step_options();
// How layers' Programs are built from now on, by every device.
void set_layer_options(const LayerOptions& options);

// What a Program depends on, as text.
struct Key {
  std::string text;

  Key& operator<<(const std::string& part);
  Key& operator<<(float value);
  Key& operator<<(int value);
  Key& operator<<(const MatrixSpec& m);
};

// Queues a layer primitive's Program, built at the first use of its key. False: no kernel serves
// these arrays, which is counted. Outputs are allocated.
bool run_layer(mx::Stream s, const std::string& kind, const Choice& choice, const Key& key,
               const std::function<std::shared_ptr<LayerProgram>(const LayerOptions&)>& build,
               const std::vector<mx::array>& in, const std::vector<mx::array>& out);

}  // namespace lily
