#include "backend/host.h"

#include <dlfcn.h>

#include <algorithm>
#include <random>
#include <stdexcept>

#include "backend/metal_host_abi.h"

namespace lily {
namespace {

constexpr uint64_t kMaxFaults = 8;
constexpr int kMaxArguments = 31;

// Libraries stay loaded: kernels may be in use by any encoder.
void* open_library(const std::string& path, int flags) {
  void* library = dlopen(path.c_str(), RTLD_NOW | flags);
  if (!library) {
    throw std::invalid_argument("cannot load " + path + ": " + dlerror() + ".");
  }
  return library;
}

void* symbol(void* library, const std::string& path, const std::string& name) {
  void* found = dlsym(library, name.c_str());
  if (!found) {
    throw std::invalid_argument(path + " has no symbol " + name + ".");
  }
  return found;
}

std::string describe(const msl::Fault& f, const char* words, const Kernel& kernel) {
  std::string out = words;
  if (f.site) {
    out += " at " + std::string(f.site->file) + ":" + std::to_string(f.site->line);
  }
  const ArgumentLayout* argument = kernel.find(f.buffer, false);
  if (argument || f.variable[0]) {
    out += ", byte " + std::to_string(f.byte) + " of " + (argument ? argument->name : f.variable);
  }
  return out + ", thread " + std::to_string(f.thread.thread) + " of threadgroup " +
         std::to_string(f.thread.threadgroup[0]) + "," + std::to_string(f.thread.threadgroup[1]) +
         "," + std::to_string(f.thread.threadgroup[2]);
}

}  // namespace

// The launches of one encode, and which bytes of scratch and outputs have been written in it.
class HostEncoder::Run {
 public:
  Run(HostEncoder& encoder, const Program& program, const Bindings& bindings)
      : encoder_(encoder),
        program_(program),
        bindings_(bindings),
        written_(program.slots().size()) {}

  void dispatch(int index) {
    const Dispatch& d = program_.dispatches()[index];
    const Compiled& compiled = encoder_.compiled_.at(program_.pipelines()[d.pipeline].key);
    void* arguments[kMaxArguments] = {};
    std::vector<msl::Buffer> buffers;
    auto bind = [&](int argument, const void* data, size_t bytes, Access access, uint8_t* written) {
      arguments[argument] = const_cast<void*>(data);
      buffers.push_back({static_cast<char*>(arguments[argument]), bytes, written, argument,
                         reads(access), writes(access), 0});
    };
    for (const BufferArgument& a : d.buffers) {
      Place place = bindings_.place(a);
      bind(a.index, static_cast<char*>(place.buffer.base) + place.offset, a.bytes, a.access,
           written(a));
    }
    for (const ScalarArgument& a : d.scalars) {
      const auto& bytes = bindings_.scalar(a.scalar).bytes;
      bind(a.index, bytes.data(), bytes.size(), Access::read, nullptr);
    }
    for (const ValueArgument& a : d.values) {
      bind(a.index, a.value.bytes.data(), a.value.bytes.size(), Access::read, nullptr);
    }
    for (msl::Buffer& b : buffers) {
      b.shared_writable = std::any_of(buffers.begin(), buffers.end(), [&](const msl::Buffer& o) {
        return o.may_write && o.data < b.data + b.bytes && b.data < o.data + o.bytes;
      });
    }

    std::vector<msl::Traffic> traffic(buffers.size());
    msl::Fault faults[kMaxFaults] = {};
    msl::Launch launch = {};
    launch.stub = reinterpret_cast<decltype(launch.stub)>(compiled.stub);
    launch.arguments = arguments;
    for (int i = 0; i < 3; ++i) {
      launch.grid[i] = bindings_.extent(d.grid_size[i]);
      launch.threadgroup[i] = d.group_size[i];
    }
    for (const ThreadgroupMemory& t : d.threadgroup) {
      launch.threadgroup_bytes[t.index] = static_cast<uint32_t>(t.bytes);
    }
    launch.workers = encoder_.options_.workers;
    launch.checked = encoder_.options_.checked;
    launch.shuffled = encoder_.options_.seed != 0;
    launch.seed = encoder_.options_.seed + static_cast<uint64_t>(index);
    launch.buffers = buffers.data();
    launch.buffer_count = buffers.size();
    launch.variables = static_cast<const msl::Variable*>(compiled.variables);
    launch.variable_count = compiled.variable_count;
    launch.constants = static_cast<const msl::Variable*>(compiled.constants);
    launch.constant_count = compiled.constant_count;
    launch.faults = faults;
    launch.fault_capacity = kMaxFaults;
    launch.traffic = traffic.data();
    reinterpret_cast<void (*)(msl::Launch*)>(encoder_.launch_)(&launch);

    if (launch.fault_count > 0) {
      std::string text = "dispatch " + std::to_string(index) + " '" + d.name + "' of kernel '" +
                         d.kernel->name + "': " + std::to_string(launch.fault_count) + " fault(s)";
      for (uint64_t i = 0; i < std::min(launch.fault_count, kMaxFaults); ++i) {
        text += "\n  " + describe(faults[i], encoder_.words_(faults[i].kind), *d.kernel);
      }
      throw std::runtime_error(text);
    }
    for (size_t i = 0; i < buffers.size(); ++i) {
      encoder_.moved_.push_back(
          {index, buffers[i].index, traffic[i].load_bytes, traffic[i].store_bytes});
    }
  }

 private:
  // A flag a byte; null for slots that hold something before the Program runs.
  uint8_t* written(const BufferArgument& a) {
    const Slot& slot = program_.slots()[a.slot.index];
    bool is_empty_at_start = slot.kind == SlotKind::scratch || slot.kind == SlotKind::output;
    if (!encoder_.options_.checked || !is_empty_at_start) {
      return nullptr;
    }
    std::vector<uint8_t>& flags = written_[a.slot.index];
    flags.resize(slot.bytes);
    return flags.data() + a.offset;
  }

  HostEncoder& encoder_;
  const Program& program_;
  const Bindings& bindings_;
  std::vector<std::vector<uint8_t>> written_;  // by slot
};

HostEncoder::HostEncoder(const std::string& runtime, HostOptions options) : options_(options) {
  void* library = open_library(runtime, RTLD_GLOBAL);
  launch_ = symbol(library, runtime, "msl_launch");
  const auto* abi = static_cast<const uint64_t*>(symbol(library, runtime, "msl_abi"));
  if (!std::equal(std::begin(msl::kAbi), std::end(msl::kAbi), abi)) {
    throw std::invalid_argument(runtime +
                                " is of another version of the Metal host than this extension; "
                                "build the extension again from the same checkout.");
  }
  words_ = reinterpret_cast<const char* (*)(uint32_t)>(symbol(library, runtime, "msl_fault_words"));
}

void HostEncoder::add(const std::string& pipeline, const std::string& library,
                      const std::string& stub) {
  void* handle = open_library(library, RTLD_LOCAL);
  Compiled compiled{symbol(handle, library, stub)};
  bool is_checked = dlsym(handle, "__msl_checked") != nullptr;
  if (is_checked != options_.checked) {
    throw std::invalid_argument(library + " was compiled " +
                                (is_checked ? "with checks, the encoder is without."
                                            : "without checks, the encoder needs them."));
  }
  // A file without threadgroup variables, or without tables, has no such symbols.
  auto find = [&](const std::string& name, const void*& first, uint64_t& count) {
    if (const void* n = dlsym(handle, (name + "_count").c_str())) {
      count = *static_cast<const uint64_t*>(n);
      first = symbol(handle, library, name + "s");
    }
  };
  find("__msl_threadgroup_variable", compiled.variables, compiled.variable_count);
  find("__msl_constant", compiled.constants, compiled.constant_count);
  compiled_[pipeline] = compiled;
}

void HostEncoder::encode(const Program& program, const Bindings& bindings) {
  for (const Pipeline& p : program.pipelines()) {
    if (compiled_.count(p.key) == 0) {
      throw std::invalid_argument("the host encoder has no library for pipeline '" + p.key +
                                  "'; give it with add().");
    }
  }
  const Schedule& schedule = bindings.schedule();
  std::vector<int> order = schedule.order;
  if (options_.seed != 0) {
    std::mt19937_64 random(options_.seed);
    std::shuffle(order.begin(), order.end(), random);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return schedule.level[a] < schedule.level[b]; });
  }
  moved_.clear();
  Run run(*this, program, bindings);
  for (int index : order) {
    run.dispatch(index);
  }
}

}  // namespace lily
