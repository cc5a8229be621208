// The environment switch LILY_MLX_BACKEND=metal-host: on the CPU, primitives run their Programs
// with the Metal kernels, compiled by metal/host, in place of the reference.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/host.h"
#include "primitives/decode.h"
#include "primitives/layers.h"
#include "primitives/successors.h"
#include "programs/decode_program.h"

namespace lily {

struct MetalHostOptions {
  std::string runtime;  // the shared library of metal/host
  HostOptions host;
  // (library, stub) for a pipeline; called without the GIL.
  std::function<std::pair<std::string, std::string>(const Pipeline&)> compile;
  DecodeOptions decode;
  bool nvidia = false;  // layer primitives choose kernels as on an NVIDIA GPU
};

// Switches it on, or off with nullopt. Steps that are queued keep what they were queued with.
void set_metal_host(std::optional<MetalHostOptions> options);
bool metal_host();

// How often each kernel ran, or the reference for a reason, since the last reset: (kind, kernel,
// reason).
using HostCounts = std::map<std::tuple<std::string, std::string, std::string>, int64_t>;
HostCounts metal_host_counts();
void reset_metal_host_counts();

// The plan's Programs, made by the first who asks. From any thread.
std::shared_ptr<DecodePrograms> programs_of(const DecodePlan& plan);

// What primitives ask first. True: the Program has been queued on the stream. False: the switch is
// off, or no kernel serves these arrays, which is counted. Outputs are allocated.
namespace host {

using Arrays = std::vector<mx::array>;

bool rms_norm(mx::Stream s, const Arrays& in, Arrays& out, float eps);
bool project(mx::Stream s, const Arrays& in, Arrays& out, const std::vector<Format>& formats);
bool embed(mx::Stream s, const Arrays& in, Arrays& out, Format format);
bool gated_delta(mx::Stream s, const Arrays& in, Arrays& out, int key_heads, int value_heads,
                 int key_dim, int value_dim, float eps, bool has_conv_state, bool has_state,
                 bool has_mask, bool has_lengths);
bool attention_prepare(mx::Stream s, const Arrays& in, Arrays& out, int heads, int kv_heads,
                       int rotary, float base, float eps);
// Prefill attention is MLX's own on a GPU and the reference here: always false.
bool attend();
bool moe(mx::Stream s, const Arrays& in, Arrays& out, const std::vector<Format>& formats, int top_k,
         bool normalize);

// A decode step's Program, compiled and with its weights bound.
struct DecodeRun;
// Null where the reference runs, which is counted. capacities: rows of each layer's keys, 0 for
// DeltaNet. Changes no cache, so that a kernel that does not compile leaves them as they were.
std::shared_ptr<const DecodeRun> decode_run(const DecodePlan& plan,
                                            const std::vector<int>& capacities, bool with_logits);

// Queues the step, which keeps `caches` until it has run; `used` are its arrays.
void decode_step(mx::Stream s, const std::shared_ptr<const DecodeRun>& run,
                 std::shared_ptr<const Successors> caches,
                 const std::vector<Successors::Used>& used, int position, const mx::array& token,
                 mx::array& next, mx::array* logits);

}  // namespace host
}  // namespace lily
