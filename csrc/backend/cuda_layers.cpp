#include "backend/cuda_layers.h"

#include <map>
#include <mutex>

#include "backend/cuda.h"
#include "backend/cuda_memory.h"

namespace lily {
namespace {

namespace mx = mlx::core;

// A Program's tables on the device. They go with the Program, which keeps them.
struct Tables {
  std::vector<mx::array> arrays;
};

const std::vector<mx::array>& tables_of(const LayerProgram& layer) {
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  if (!layer.on_device) {
    auto tables = std::make_shared<Tables>();
    for (const Builder::Table& t : layer.tables) {
      mx::array table = device_bytes(t.data.size());
      check_cuda(cuMemcpyHtoD(reinterpret_cast<CUdeviceptr>(device_pointer(table)), t.data.data(),
                              t.data.size()),
                 "copying a table");
      tables->arrays.push_back(std::move(table));
    }
    layer.on_device = std::move(tables);
  }
  return static_cast<const Tables*>(layer.on_device.get())->arrays;
}

// Scratch of all Programs of a stream, which run one after another.
mx::array arena_of(mx::Stream stream, size_t bytes) {
  static std::mutex mutex;
  static auto* arenas = new std::map<int, mx::array>;  // outlives exit
  std::lock_guard<std::mutex> lock(mutex);
  auto it = arenas->find(stream.index);
  if (it == arenas->end()) {
    it = arenas->emplace(stream.index, device_bytes(bytes)).first;
  } else if (it->second.nbytes() < bytes) {
    it->second = device_bytes(bytes);  // queued work holds the old one
  }
  return it->second;
}

// Which array each slot of a Program stands for.
class Arrays {
 public:
  explicit Arrays(const Program& program) : bindings_(program), of_slot_(program.slots().size()) {}

  void bind(SlotId slot, const mx::array& a) {
    bindings_.bind(slot, device_buffer(a));
    of_slot_[slot.index] = &a;
  }
  void bind_arena(const mx::array& a) {
    bindings_.bind_arena(device_buffer(a));
    arena_ = &a;
  }
  const Bindings& bindings() const {
    return bindings_;
  }

  // MLX orders nodes by what they read and write, and a writer waits for the last writer only. The
  // arena is therefore declared as written by all that touch it, so that nothing overtakes a reader
  // of bytes that are used again.
  void declare(mx::cu::CommandEncoder& encoder, const Dispatch& d) const {
    bool arena = false;
    for (const BufferArgument& a : d.buffers) {
      const mx::array* array = of_slot_[a.slot.index];
      if (array == nullptr) {
        arena = true;
        continue;
      }
      if (reads(a.access)) {
        encoder.set_input_array(*array);
      }
      if (writes(a.access)) {
        encoder.set_output_array(*array);
      }
    }
    if (arena) {
      encoder.set_output_array(*arena_);
    }
  }

 private:
  Bindings bindings_;
  std::vector<const mx::array*> of_slot_;  // null for scratch
  const mx::array* arena_ = nullptr;
};

}  // namespace

void run_on_cuda(mx::Stream stream, const std::shared_ptr<const LayerProgram>& layer,
                 const std::vector<mx::array>& in, const std::vector<mx::array>& out) {
  auto& encoder = mx::cu::get_command_encoder(stream);
  encoder.device().make_current();
  const Program& program = layer->program;
  Arrays arrays(program);
  bind_layer(*layer, in, out, [&](SlotId slot, const mx::array& a) { arrays.bind(slot, a); });
  for (const mx::array& a : out) {
    encoder.add_temporary(a);  // MLX keeps the inputs; an output may lose its last holder
  }
  const std::vector<mx::array>& tables = tables_of(*layer);
  for (size_t i = 0; i < tables.size(); ++i) {
    arrays.bind(layer->tables[i].slot, tables[i]);
    encoder.add_temporary(tables[i]);
  }
  std::optional<mx::array> arena;
  if (program.arena_bytes() > 0) {
    arena = arena_of(stream, program.arena_bytes());
    arrays.bind_arena(*arena);
    encoder.add_temporary(*arena);
  }
  for (int index : arrays.bindings().schedule().order) {
    const Dispatch& d = program.dispatches()[index];
    arrays.declare(encoder, d);
    add_node(encoder, program, arrays.bindings(), d);
  }
}

}  // namespace lily
