#include "programs/metal_host.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <type_traits>

#ifdef LILY_METAL
#include "backend/metal.h"
#endif
#ifdef LILY_CUDA
#include "backend/cuda_layers.h"
#endif
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "programs/layer_programs.h"
#include "selection.h"

namespace lily {
namespace {

// Vectors are loaded with this alignment by code that was compiled for it.
#ifdef LILY_CUDA
constexpr size_t kAlignment = 16;
#else
constexpr size_t kAlignment = 8;
#endif

// Compiled pipelines and their encoder. Steps hold it by shared_ptr, so that it may be replaced.
class Executor {
 public:
  explicit Executor(MetalHostOptions o)
      : options(std::move(o)), encoder_(options.runtime, options.host) {}

  // Compiles what the Program needs and this executor does not have.
  void prepare(const Program& program) {
    for (const Pipeline& p : program.pipelines()) {
      {
        std::lock_guard lock(mutex_);
        if (known_.count(p.key) != 0) {
          continue;
        }
      }
      auto [library, stub] = options.compile(p);
      std::lock_guard lock(mutex_);
      encoder_.add(p.key, library, stub);
      known_.insert(p.key);
    }
  }

  void encode(const Program& program, const Bindings& bindings) {
    std::lock_guard lock(mutex_);
    encoder_.encode(program, bindings);
  }

  const MetalHostOptions options;

 private:
  std::mutex mutex_;
  HostEncoder encoder_;
  std::set<std::string> known_;
};

struct Global {
  std::mutex mutex;
  std::shared_ptr<Executor> executor;
  HostCounts counts;
  std::map<std::string, std::shared_ptr<const LayerProgram>> programs;
};

Global& global() {
  static Global g;
  return g;
}

std::shared_ptr<Executor> executor() {
  Global& g = global();
  std::lock_guard lock(g.mutex);
  return g.executor;
}

void count(const std::string& kind, const std::string& kernel, const std::string& reason) {
  Global& g = global();
  std::lock_guard lock(g.mutex);
  ++g.counts[{kind, kernel, reason}];
}

bool refuse(const std::string& kind, const std::string& reason) {
  count(kind, "reference", reason);
  return false;
}

// Whether kernels are chosen as for an NVIDIA GPU: there, or on the Metal host that stands in for
// it.
bool for_nvidia(mx::Stream s) {
  if (s.device == mx::Device::gpu) {
#ifdef LILY_CUDA
    return true;
#else
    return false;
#endif
  }
  std::shared_ptr<Executor> host = executor();
  return host && host->options.nvidia;
}

Choice choose(mx::Stream s, const std::string& kind, const Shape& shape) {
  return query(kind, for_nvidia(s) ? "cuda" : "metal", shape);
}

MatrixUnit unit_for(mx::Stream s) {
  return for_nvidia(s) ? MatrixUnit::nvidia : MatrixUnit::simdgroup;
}

// One threadgroup a head leaves most of a large GPU idle: there the norm comes apart, so that more
// can scan.
Scan scan_for(mx::Stream s) {
  return for_nvidia(s) ? Scan::apart : Scan::norm;
}

constexpr size_t kMaxPrograms = 256;

template <typename F>
std::shared_ptr<const LayerProgram> cached(mx::Stream s, std::string key, F build) {
  if (for_nvidia(s)) {
    key += " nvidia";
  }
  Global& g = global();
  {
    std::lock_guard lock(g.mutex);
    auto it = g.programs.find(key);
    if (it != g.programs.end()) {
      return it->second;
    }
  }
  std::shared_ptr<const LayerProgram> program = build();
  std::lock_guard lock(g.mutex);
  if (g.programs.size() >= kMaxPrograms) {
    g.programs.clear();
  }
  g.programs[key] = program;
  return program;
}

// What a Program depends on, as text. No C++ stream: see Program::pipeline_of.
struct Key {
  std::string text;

  Key& operator<<(const std::string& part) {
    text += part;
    return *this;
  }
  Key& operator<<(const char* part) {
    text += part;
    return *this;
  }
  Key& operator<<(char part) {
    text += part;
    return *this;
  }
  Key& operator<<(float value) {
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    return *this << bits;
  }
  template <typename T, typename = std::enable_if_t<std::is_integral_v<T>>>
  Key& operator<<(T value) {
    text += std::to_string(value);
    return *this;
  }
};

std::string key_of(const MatrixDims& m) {
  Key key;
  key << m.experts << 'x' << m.rows << 'x' << m.cols << 'b' << m.bits << 'g' << m.group << ' ';
  return key.text;
}

// ---- Arrays

const char* layout_refusal(const mx::array& a) {
  if (!a.flags().row_contiguous) {
    return "an array is not contiguous";
  }
#ifdef LILY_CUDA  // data() would move the array to where the CPU can read it
  const size_t start = static_cast<size_t>(a.offset());
#else
  const auto start = reinterpret_cast<uintptr_t>(a.data<char>());
#endif
  if (start % kAlignment != 0) {
    return kAlignment == 8 ? "an array does not start at a multiple of 8 bytes"
                           : "an array does not start at a multiple of 16 bytes";
  }
  return nullptr;
}

std::string layout_refusal(const std::vector<mx::array>& arrays) {
  for (const mx::array& a : arrays) {
    if (const char* reason = layout_refusal(a)) {
      return reason;
    }
  }
  return "";
}

void bind(Bindings& b, SlotId slot, const mx::array& a) {
  auto* base = static_cast<char*>(const_cast<mx::array&>(a).buffer().raw_ptr());
  Buffer buffer{reinterpret_cast<uint64_t>(base), base, a.buffer_size()};
  b.bind(slot, buffer, static_cast<size_t>(a.data<char>() - base));
}

void bind(Bindings& b, const Builder::Table& table) {
  void* p = const_cast<char*>(table.data.data());
  b.bind(table.slot, {reinterpret_cast<uint64_t>(p), p, table.data.size()});
}

MatrixDims dims_of(const mx::array& w, Format f) {
  MatrixDims m;
  m.rows = w.shape(-2);
  m.cols = f.bits == 0 ? w.shape(-1) : w.shape(-1) * (32 / f.bits);
  m.bits = f.bits;
  m.group = f.group;
  m.experts = w.ndim() == 3 ? w.shape(0) : 1;
  return m;
}

MatrixDims dims_of(const Weight& w) {
  return dims_of(w.weight, {w.bits, w.group});
}

// The matrices at in[cursor ...]; empty where the scales or plain elements are not of dtype `t`.
std::optional<std::vector<MatrixDims>> matrices_of(const host::Arrays& in, size_t cursor,
                                                   const std::vector<Format>& formats,
                                                   mx::Dtype t) {
  std::vector<MatrixDims> out;
  for (const Format& f : formats) {
    const mx::array& typed = f.bits == 0 ? in.at(cursor) : in.at(cursor + 1);
    if (typed.dtype() != t) {
      return std::nullopt;
    }
    out.push_back(dims_of(in.at(cursor), f));
    cursor += f.bits == 0 ? 1 : 3;
  }
  return out;
}

const char* name_of(mx::Dtype t) {
  return t == mx::bfloat16 ? "bfloat16" : t == mx::float16 ? "float16" : "float32";
}

void describe(Shape& shape, const std::vector<MatrixDims>& matrices) {
  for (const MatrixDims& m : matrices) {
    shape.numbers["bits"].push_back(m.bits);
    shape.numbers["columns"].push_back(m.cols);
    if (m.bits != 0) {
      shape.numbers["group"].push_back(m.group);
      shape.words["mode"] = {"affine"};
    }
  }
}

int64_t rows_of(const mx::array& x) {
  return x.shape(-1) == 0 ? 0 : static_cast<int64_t>(x.size()) / x.shape(-1);
}

// ---- Queueing

std::shared_ptr<char> make_arena(size_t bytes, bool checked) {
  const size_t size = (std::max<size_t>(bytes, 1) + 255) / 256 * 256;
  std::shared_ptr<char> arena(static_cast<char*>(std::aligned_alloc(256, size)), std::free);
  if (!arena) {
    throw std::bad_alloc();
  }
  if (checked) {  // NaN, so that what is read without having been written shows
    std::memset(arena.get(), 0xff, size);
  }
  return arena;
}

// Runs the Program on the stream's thread. `owner` keeps it and its tables alive.
void queue(mx::Stream s, const std::shared_ptr<Executor>& run, std::shared_ptr<const void> owner,
           const Program& program, Bindings bindings) {
  run->prepare(program);
  std::shared_ptr<char> arena;
  if (program.arena_bytes() > 0) {
    arena = make_arena(program.arena_bytes(), run->options.host.checked);
    bindings.bind_arena(
        {reinterpret_cast<uint64_t>(arena.get()), arena.get(), program.arena_bytes()});
  }
  mx::cpu::get_command_encoder(s).dispatch([run, owner = std::move(owner), arena,
                                            bindings = std::move(bindings),
                                            &program] { run->encode(program, bindings); });
}

#if defined(LILY_METAL) || defined(LILY_CUDA)
constexpr bool kHasGpu = true;
#else
constexpr bool kHasGpu = false;
#endif

// Programs run on a GPU, and on the CPU while the switch is on.
bool active(mx::Stream s) {
  return s.device == mx::Device::gpu ? kHasGpu : executor() != nullptr;
}

bool run_layer(mx::Stream s, const std::string& kind, const std::string& kernel,
               const std::shared_ptr<const LayerProgram>& layer, const host::Arrays& in,
               const host::Arrays& out) {
#ifdef LILY_METAL
  if (s.device == mx::Device::gpu) {
    run_on_metal(s, layer, in, out);
    return true;
  }
#endif
#ifdef LILY_CUDA
  if (s.device == mx::Device::gpu) {
    run_on_cuda(s, layer, in, out);
    count(kind, kernel, "");
    return true;
  }
#endif
  Bindings b(layer->program);
  for (size_t i = 0; i < layer->inputs.size(); ++i) {
    bind(b, layer->inputs[i], in.at(i));
  }
  for (size_t i = 0; i < layer->outputs.size(); ++i) {
    bind(b, layer->outputs[i], out.at(i));
  }
  for (const Builder::Table& t : layer->tables) {
    bind(b, t);
  }
  queue(s, executor(), layer, layer->program, std::move(b));
  count(kind, kernel, "");
  return true;
}

}  // namespace

void set_metal_host(std::optional<MetalHostOptions> options) {
  std::shared_ptr<Executor> fresh;
  if (options) {
    fresh = std::make_shared<Executor>(std::move(*options));
  }
  Global& g = global();
  std::lock_guard lock(g.mutex);
  std::swap(g.executor, fresh);
}

bool metal_host() {
  return executor() != nullptr;
}

HostCounts metal_host_counts() {
  Global& g = global();
  std::lock_guard lock(g.mutex);
  return g.counts;
}

void reset_metal_host_counts() {
  Global& g = global();
  std::lock_guard lock(g.mutex);
  g.counts.clear();
}

namespace host {

bool rms_norm(mx::Stream s, const Arrays& in, Arrays& out, float eps) {
  if (!active(s)) {
    return false;
  }
  const int rows = static_cast<int>(rows_of(in[0])), dim = in[0].shape(-1);
  const mx::Dtype t = in[0].dtype();
  if (t == mx::float32 || in[1].dtype() != t) {
    return refuse("rms_norm", std::string("dtype ") + name_of(t) + " has no kernel");
  }
  if (dim % 4 != 0 || rows == 0) {
    return refuse("rms_norm", "the last axis is no multiple of 4");
  }
  if (std::string reason = layout_refusal(in); !reason.empty()) {
    return refuse("rms_norm", reason);
  }
  Key key;
  key << "rms_norm " << name_of(t) << ' ' << rows << ' ' << dim << ' ' << eps;
  auto layer =
      cached(s, key.text, [&] { return rms_norm_program(type_of(t, "x"), rows, dim, eps); });
  return run_layer(s, "rms_norm", "rms_norm_rows", layer, in, out);
}

bool project(mx::Stream s, const Arrays& in, Arrays& out, const std::vector<Format>& formats) {
  if (!active(s)) {
    return false;
  }
  const char* kind = "project";
  const mx::Dtype t = in[0].dtype();
  const int rows = static_cast<int>(rows_of(in[0]));
  const bool float32 = out[0].dtype() == mx::float32;
  auto matrices = matrices_of(in, 1, formats, t);
  if (!matrices) {
    return refuse(kind, "the weights' dtype is not the activations'");
  }
  Shape shape;
  shape.words["dtype"] = {name_of(t)};
  shape.numbers["rows"] = {rows};
  describe(shape, *matrices);
  Choice choice = choose(s, kind, shape);
  if (choice.kernel.empty()) {
    return refuse(kind, choice.reason.text);
  }
  if (rows == 0) {
    return refuse(kind, "there are no rows");
  }
  for (const std::string& reason :
       {layout_refusal(in), project_refusal(type_of(t, "x"), choice.kernel, *matrices, float32)}) {
    if (!reason.empty()) {
      return refuse(kind, reason);
    }
  }
  Key key;
  key << "project " << name_of(t) << ' ' << rows << ' ' << float32 << ' ';
  for (const MatrixDims& m : *matrices) {
    key << key_of(m);
  }
  auto layer = cached(s, key.text, [&] {
    return project_program(type_of(t, "x"), choice.kernel, rows, *matrices, float32, unit_for(s));
  });
  return run_layer(s, kind, choice.kernel, layer, in, out);
}

bool embed(mx::Stream s, const Arrays& in, Arrays& out, Format format) {
  if (!active(s)) {
    return false;
  }
  const mx::Dtype t = out[0].dtype();
  auto matrices = matrices_of(in, 1, {format}, t);
  const int tokens = static_cast<int>(in[0].size());
  if (!matrices || tokens == 0) {
    return refuse("embed", "the weight's dtype is not the activations'");
  }
  if (std::string reason = layout_refusal(in); !reason.empty()) {
    return refuse("embed", reason);
  }
  Key key;
  key << "embed " << name_of(t) << ' ' << tokens << ' ' << key_of(matrices->at(0));
  auto layer =
      cached(s, key.text, [&] { return embed_program(type_of(t, "x"), tokens, matrices->at(0)); });
  return run_layer(s, "embed", "embed_rows", layer, in, out);
}

bool gated_delta(mx::Stream s, const Arrays& in, Arrays& out, int key_heads, int value_heads,
                 int key_dim, int value_dim, float eps, bool has_conv_state, bool has_state,
                 bool has_mask, bool has_lengths) {
  if (!active(s)) {
    return false;
  }
  const char* kind = "gated_delta";
  const mx::Dtype t = in[0].dtype();
  GatedDeltaDims d{in[0].shape(0), in[0].shape(1), key_heads, value_heads, eps,
                   has_conv_state, has_state,      has_mask,  has_lengths};
  Shape shape;
  shape.words["dtype"] = {name_of(t)};
  shape.words["mask"] = {has_mask || has_lengths ? "bool" : "none"};
  shape.numbers["rows"] = {int64_t{d.B} * d.T};
  shape.numbers["key_dim"] = {key_dim};
  shape.numbers["value_dim"] = {value_dim};
  Choice choice = choose(s, kind, shape);
  if (choice.kernel.empty()) {
    return refuse(kind, choice.reason.text);
  }
  // conv weight, dt_bias, norm weight; A_log is float32 always.
  for (int i : {4, 6, 7}) {
    if (in[i].dtype() != t) {
      return refuse(kind, "a parameter's dtype is not the activations'");
    }
  }
  if (in[5].dtype() != mx::float32) {
    return refuse(kind, "A_log is not float32");
  }
  if (in[4].shape(1) != 4) {
    return refuse(kind, "a convolution of another width than 4 has no kernel");
  }
  if (std::string reason = layout_refusal(in); !reason.empty()) {
    return refuse(kind, reason);
  }
  Key key;
  key << kind << ' ' << name_of(t) << ' ' << d.B << ' ' << d.T << ' ' << key_heads << ' '
      << value_heads << ' ' << eps << has_conv_state << has_state << has_mask << has_lengths;
  auto layer = cached(s, key.text, [&] {
    return gated_delta_program(type_of(t, "qkv"), choice.kernel, d, scan_for(s));
  });
  return run_layer(s, kind, choice.kernel, layer, in, out);
}

bool attention_prepare(mx::Stream s, const Arrays& in, Arrays& out, int heads, int kv_heads,
                       int rotary, float base, float eps) {
  if (!active(s)) {
    return false;
  }
  const char* kind = "attention_prepare";
  const mx::Dtype t = in[0].dtype();
  PrepareDims d{in[0].shape(0), in[0].shape(1), heads, kv_heads,        out[0].shape(3),
                rotary,         base,           eps,   in[4].size() > 1};
  std::string reason = prepare_refusal(type_of(t, "q"), d);
  if (reason.empty() && in[2].dtype() != t) {
    reason = "the norms' dtype is not the activations'";
  }
  if (reason.empty()) {
    reason = layout_refusal(in);
  }
  if (!reason.empty()) {
    return refuse(kind, reason);
  }
  Key key;
  key << kind << ' ' << name_of(t) << ' ' << d.B << ' ' << d.T << ' ' << heads << ' ' << kv_heads
      << ' ' << d.head_dim << ' ' << rotary << ' ' << base << ' ' << eps << ' ' << d.offset_each;
  auto layer = cached(s, key.text, [&] { return attention_prepare_program(type_of(t, "q"), d); });
  return run_layer(s, kind, "attention_prep", layer, in, out);
}

bool attend() {
  return metal_host() &&
         refuse("attend",
                "on a GPU this is mx.fast.scaled_dot_product_attention, MLX's own kernel");
}

namespace {

MoeDims moe_dims(const std::vector<MatrixDims>& m, int top_k, bool normalize) {
  return {m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7], top_k, normalize};
}

}  // namespace

bool moe(mx::Stream s, const Arrays& in, Arrays& out, const std::vector<Format>& formats, int top_k,
         bool normalize) {
  if (!active(s)) {
    return false;
  }
  const char* kind = "moe";
  const mx::Dtype t = in[0].dtype();
  const int rows = static_cast<int>(rows_of(in[0]));
  auto matrices = matrices_of(in, 1, formats, t);
  if (!matrices || rows == 0) {
    return refuse(kind, "the weights' dtype is not the activations'");
  }
  const MoeDims dims = moe_dims(*matrices, top_k, normalize);
  Shape shape;
  shape.words["dtype"] = {name_of(t)};
  shape.numbers["rows"] = {rows};
  shape.numbers["experts"] = {dims.router.rows};
  shape.numbers["top_k"] = {top_k};
  describe(shape, *matrices);
  Choice choice = choose(s, kind, shape);
  if (choice.kernel.empty()) {
    return refuse(kind, choice.reason.text);
  }
  for (const std::string& reason : {layer_moe_refusal(type_of(t, "x"), dims), layout_refusal(in)}) {
    if (!reason.empty()) {
      return refuse(kind, reason);
    }
  }
  Key key;
  key << kind << ' ' << name_of(t) << ' ' << rows << ' ' << top_k << ' ' << normalize << ' ';
  for (const MatrixDims& m : *matrices) {
    key << key_of(m);
  }
  auto layer = cached(s, key.text, [&] {
    return moe_program(type_of(t, "x"), choice.kernel, rows, dims, unit_for(s));
  });
  return run_layer(s, kind, choice.kernel, layer, in, out);
}

}  // namespace host

// ---- The decode step

static DecodeDims decode_dims(const DecodePlan& plan) {
  DecodeDims dims;
  dims.t = type_of(plan.dtype, "activations");
  dims.embedding = dims_of(plan.embedding);
  dims.head = dims_of(plan.head);
  dims.eps = plan.eps;
  for (const DecodeLayer& layer : plan.layers) {
    LayerDims l;
    if (layer.delta) {
      const DeltaLayer& d = *layer.delta;
      l.delta = DeltaDims{dims_of(d.qkv), dims_of(d.z),    dims_of(d.b),  dims_of(d.a),
                          dims_of(d.out), d.key_heads,     d.value_heads, d.key_dim,
                          d.value_dim,    d.conv.shape(1), d.norm_eps};
    } else {
      const AttentionLayer& a = *layer.attention;
      l.attention =
          AttentionDims{dims_of(a.q), dims_of(a.k), dims_of(a.v), dims_of(a.out), a.heads,
                        a.kv_heads,   a.head_dim,   a.rotary,     a.rope_base,    a.norm_eps};
    }
    std::vector<MatrixDims> m;
    for (const Weight* w : layer.moe.weights()) {
      m.push_back(dims_of(*w));
    }
    l.moe = host::moe_dims(m, layer.moe.top_k, layer.moe.normalize);
    dims.layers.push_back(std::move(l));
  }
  return dims;
}

std::shared_ptr<DecodePrograms> programs_of(const DecodePlan& plan) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (!plan.programs) {
    plan.programs = std::make_shared<DecodePrograms>(decode_dims(plan));
  }
  return plan.programs;
}

namespace host {

struct DecodeRun {
  std::shared_ptr<Executor> executor;
  std::shared_ptr<const DecodeProgram> program;
  std::shared_ptr<Bindings> weights;
};

}  // namespace host

// A plan's Programs with its weights bound.
struct HostPlan {
  std::mutex mutex;
  std::string refusal;
  std::shared_ptr<Executor> built_for;
  std::map<std::pair<std::vector<int>, bool>, std::shared_ptr<const host::DecodeRun>> runs;
};

namespace host {
namespace {

std::string plan_refusal(const DecodePlan& plan) {
  const std::string& refusal = programs_of(plan)->refusal;  // the plan keeps it
  if (!refusal.empty()) {
    return refusal;
  }
  std::set<const mx::array*> float32, codes;
  for (const DecodeLayer& l : plan.layers) {
    if (l.delta) {
      float32.insert(&l.delta->A_log);
    }
  }
  for (const mx::array* a : plan.arrays()) {
    if (const char* layout = layout_refusal(*a)) {
      return layout;
    }
    const mx::Dtype expected = float32.count(a) != 0 ? mx::float32 : plan.dtype;
    if (a->dtype() != expected && a->dtype() != mx::uint32) {
      return "a weight's dtype is not the activations'";
    }
  }
  return "";
}

std::shared_ptr<HostPlan> host_plan(const DecodePlan& plan) {
  Global& g = global();
  {
    std::lock_guard lock(g.mutex);
    if (plan.host) {
      return plan.host;
    }
  }
  auto made = std::make_shared<HostPlan>();
  made->refusal = plan_refusal(plan);
  std::lock_guard lock(g.mutex);
  plan.host = made;
  return made;
}

}  // namespace

std::shared_ptr<const DecodeRun> decode_run(const DecodePlan& plan,
                                            const std::vector<int>& capacities, bool with_logits) {
  std::shared_ptr<Executor> now = executor();
  if (!now) {
    return nullptr;
  }
  std::shared_ptr<HostPlan> host = host_plan(plan);
  if (!host->refusal.empty()) {
    refuse("decode_step", host->refusal);
    return nullptr;
  }
  std::lock_guard lock(host->mutex);
  if (host->built_for != now) {  // other options
    host->runs.clear();
    host->built_for = now;
  }
  std::shared_ptr<const DecodeRun>& found = host->runs[{capacities, with_logits}];
  if (!found) {
    DecodeOptions options = now->options.decode;
    options.logits = with_logits;
    DecodeRun run{now, programs_of(plan)->at(capacities, options), nullptr};
    now->prepare(run.program->program);
    run.weights = std::make_shared<Bindings>(run.program->program);
    const auto arrays = plan.arrays();
    for (size_t i = 0; i < arrays.size(); ++i) {
      bind(*run.weights, run.program->weights.at(i), *arrays[i]);
    }
    for (const Builder::Table& t : run.program->tables) {
      bind(*run.weights, t);
    }
    found = std::make_shared<const DecodeRun>(std::move(run));
  }
  return found;
}

void decode_step(mx::Stream s, const std::shared_ptr<const DecodeRun>& run,
                 std::shared_ptr<const Successors> caches,
                 const std::vector<Successors::Used>& used, int position, const mx::array& token,
                 mx::array& next, mx::array* logits) {
  const DecodeProgram& p = *run->program;
  Bindings b = *run->weights;
  for (size_t i = 0; i < used.size(); ++i) {
    const DecodeProgram::Caches& slots = p.caches[i];
    bind(b, slots.first, *used[i].first);
    bind(b, slots.second, *used[i].second);
    if (used[i].first_next != nullptr) {
      bind(b, slots.first_next, *used[i].first_next);
    }
  }
  bind(b, p.token, token);
  bind(b, p.next, next);
  if (logits != nullptr) {
    bind(b, p.logits, *logits);
  }
  auto at = std::make_shared<int32_t>(position);
  b.bind(p.position, {reinterpret_cast<uint64_t>(at.get()), at.get(), sizeof(int32_t)});
  using Owners = std::tuple<std::shared_ptr<const DecodeRun>, std::shared_ptr<const Successors>,
                            std::shared_ptr<int32_t>>;
  queue(s, run->executor, std::make_shared<Owners>(run, std::move(caches), at), p.program,
        std::move(b));
  count("decode_step", "decode_step", "");
}

}  // namespace host
}  // namespace lily
