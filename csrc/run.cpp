#include "run.h"

#include <cstdlib>
#include <cstring>

#include "backend/gpu.h"
#include "mlx/backend/cpu/encoder.h"

namespace lily {
namespace {

// Vectors are loaded with this alignment by code that was compiled for the CPU.
constexpr size_t kHostAlignment = 8;

struct Global {
  std::mutex mutex;
  std::shared_ptr<MetalHost> host;
  RunCounts counts;
  LayerOptions layer_options;
  std::shared_ptr<const StepOptions> step_options =
      std::make_shared<const StepOptions>(lily::step_options(gpu_target()));
  std::map<std::string, std::shared_ptr<const LayerProgram>> programs;
};

Global& global() {
  static Global g;
  return g;
}

std::shared_ptr<const LayerProgram> cached(
    const std::string& key, const std::function<std::shared_ptr<LayerProgram>()>& build) {
  constexpr size_t kMost = 256;
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
  if (g.programs.size() >= kMost) {
    g.programs.clear();
  }
  g.programs[key] = program;
  return program;
}

LayerOptions layer_options() {
  Global& g = global();
  std::lock_guard lock(g.mutex);
  return g.layer_options;
}

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

}  // namespace

// ---- The Metal host

void MetalHost::prepare(const Program& program) {
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

void MetalHost::queue(mx::Stream s, const std::shared_ptr<MetalHost>& host,
                      std::shared_ptr<const void> owner, const Program& program,
                      Bindings bindings) {
  std::shared_ptr<char> arena;
  if (program.arena_bytes() > 0) {
    arena = make_arena(program.arena_bytes(), host->options.host.checked);
    bindings.bind_arena(
        {reinterpret_cast<uint64_t>(arena.get()), arena.get(), program.arena_bytes()});
  }
  mx::cpu::get_command_encoder(s).dispatch(
      [host, owner = std::move(owner), arena, bindings = std::move(bindings), &program] {
        std::lock_guard lock(host->mutex_);
        host->encoder_.encode(program, bindings);
      });
}

void set_metal_host(std::optional<MetalHostOptions> options) {
  std::shared_ptr<MetalHost> fresh;
  if (options) {
    fresh = std::make_shared<MetalHost>(std::move(*options));
  }
  Global& g = global();
  std::lock_guard lock(g.mutex);
  std::swap(g.host, fresh);
}

std::shared_ptr<MetalHost> current_metal_host() {
  Global& g = global();
  std::lock_guard lock(g.mutex);
  return g.host;
}

bool metal_host() {
  return current_metal_host() != nullptr;
}

void bind_on_host(Bindings& b, SlotId slot, const mx::array& a) {
  auto* base = static_cast<char*>(const_cast<mx::array&>(a).buffer().raw_ptr());
  Buffer buffer{reinterpret_cast<uint64_t>(base), base, a.buffer_size()};
  b.bind(slot, buffer, static_cast<size_t>(a.data<char>() - base));
}

void bind_on_host(Bindings& b, const Builder::Table& table) {
  void* p = const_cast<char*>(table.data.data());
  b.bind(table.slot, {reinterpret_cast<uint64_t>(p), p, table.data.size()});
}

// ---- Counts

RunCounts run_counts() {
  Global& g = global();
  std::lock_guard lock(g.mutex);
  return g.counts;
}

void reset_run_counts() {
  Global& g = global();
  std::lock_guard lock(g.mutex);
  g.counts.clear();
}

void count_run(const std::string& kind, const std::string& kernel, const std::string& reason) {
  Global& g = global();
  std::lock_guard lock(g.mutex);
  ++g.counts[{kind, kernel, reason}];
}

// ---- Layers

Target gpu_target() {
  return gpu() != nullptr ? gpu()->target() : Target::cpu;
}

Target target_of(mx::Stream s) {
  if (s.device == mx::Device::gpu) {
    return gpu_target();
  }
  std::shared_ptr<MetalHost> host = current_metal_host();
  return host ? host->options.target : Target::cpu;
}

std::string layout_refusal(const mx::array& a) {
  if (!a.flags().row_contiguous) {
    return "an array is not contiguous";
  }
  const size_t alignment = gpu() != nullptr ? gpu()->alignment() : kHostAlignment;
  const size_t start =
      gpu() != nullptr ? gpu()->start(a) : reinterpret_cast<uintptr_t>(a.data<char>());
  if (start % alignment != 0) {
    return "an array does not start at a multiple of " + std::to_string(alignment) + " bytes";
  }
  return "";
}

void set_gpu_step_options(const StepOptions& options) {
  auto fresh = std::make_shared<const StepOptions>(options);
  Global& g = global();
  std::lock_guard lock(g.mutex);
  g.step_options = std::move(fresh);
}

std::shared_ptr<const StepOptions> gpu_step_options() {
  Global& g = global();
  std::lock_guard lock(g.mutex);
  return g.step_options;
}

void set_layer_options(const LayerOptions& options) {
  Global& g = global();
  std::lock_guard lock(g.mutex);
  g.layer_options = options;
}

Key& Key::operator<<(const std::string& part) {
  text.append(part).append(" ");
  return *this;
}

Key& Key::operator<<(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return *this << std::to_string(bits);
}

Key& Key::operator<<(int value) {
  return *this << std::to_string(value);
}

Key& Key::operator<<(const MatrixSpec& m) {
  return *this << m.experts << m.rows << m.cols << m.bits << m.group;
}

bool run_layer(mx::Stream s, const std::string& kind, const Choice& choice, const Key& key,
               const std::function<std::shared_ptr<LayerProgram>(const LayerOptions&)>& build,
               const std::vector<mx::array>& in, const std::vector<mx::array>& out) {
  std::string reason = choice.reason;
  for (size_t i = 0; i < in.size() && reason.empty(); ++i) {
    reason = layout_refusal(in[i]);
  }
  if (!reason.empty()) {
    count_run(kind, "reference", reason);
    return false;
  }
  if (out[0].size() == 0) {
    return true;
  }
  const LayerOptions o = layer_options();
  const Key form = Key() << o.block_rows << o.dequantize << (o.scan ? int(*o.scan) : -1);
  auto layer = cached(kind + " " + to_string(target_of(s)) + " " + key.text + form.text,
                      [&] { return build(o); });
  count_run(kind, choice.kernel, "");
  if (s.device == mx::Device::gpu) {
    gpu()->run(s, layer, in, out);
    return true;
  }
  std::shared_ptr<MetalHost> host = current_metal_host();
  host->prepare(layer->program);
  Bindings b(layer->program);
  bind_layer(*layer, in, out, [&](SlotId slot, const mx::array& a) { bind_on_host(b, slot, a); });
  for (const Builder::Table& t : layer->tables) {
    bind_on_host(b, t);
  }
  MetalHost::queue(s, host, layer, layer->program, std::move(b));
  return true;
}

}  // namespace lily
