#include "backend/cuda_layers.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "backend/cuda.h"
#include "mlx/allocator.h"

namespace lily {
namespace {

namespace mx = mlx::core;

mx::array bytes(size_t n) {
  mx::array a({static_cast<int>(std::max<size_t>(n, 16))}, mx::uint8, nullptr, {});
  a.set_data(mx::allocator::malloc(a.nbytes()));
  a.set_status(mx::array::Status::available);
  return a;
}

// A Program's tables on the device, made once; Programs are cached, so there are few.
std::vector<mx::array> tables_of(const std::shared_ptr<const LayerProgram>& layer) {
  static std::mutex mutex;
  static auto* known =
      new std::map<std::shared_ptr<const LayerProgram>, std::vector<mx::array>>;  // outlives exit
  std::lock_guard<std::mutex> lock(mutex);
  auto [it, is_new] = known->try_emplace(layer);
  if (is_new) {
    for (const Builder::Table& t : layer->tables) {
      mx::array table = bytes(t.data.size());
      check_cuda(cuMemcpyHtoD(reinterpret_cast<CUdeviceptr>(device_pointer(table)), t.data.data(),
                              t.data.size()),
                 "copying a table");
      it->second.push_back(table);
    }
  }
  return it->second;
}

}  // namespace

void run_on_cuda(mx::Stream stream, const std::shared_ptr<const LayerProgram>& layer,
                 const std::vector<mx::array>& in, const std::vector<mx::array>& out) {
  auto& mlx_encoder = mx::cu::get_command_encoder(stream);
  mlx_encoder.device().make_current();
  CudaEncoder encoder(mlx_encoder);
  Bindings bindings(layer->program);
  for (size_t i = 0; i < layer->inputs.size(); ++i) {
    if (layer->inputs[i].index >= 0) {
      bindings.bind(layer->inputs[i], encoder.use(in.at(i)));
    }
  }
  for (size_t i = 0; i < layer->outputs.size(); ++i) {
    bindings.bind(layer->outputs[i], encoder.use(out.at(i)));
  }
  const std::vector<mx::array> tables = tables_of(layer);
  for (size_t i = 0; i < tables.size(); ++i) {
    bindings.bind(layer->tables[i].slot, encoder.use(tables[i]));
  }
  if (layer->program.arena_bytes() > 0) {
    // Parts of the arena depend on each other through MLX's tracking of the whole: in program
    // order.
    mx::array arena = bytes(layer->program.arena_bytes());
    bindings.bind_arena(encoder.use(arena));
    mlx_encoder.add_temporary(arena);
  }
  encoder.encode(layer->program, bindings);
}

bool compiled_for_cuda(const Program& program) {
  return std::all_of(program.pipelines().begin(), program.pipelines().end(),
                     [](const Pipeline& p) { return cuda_kernels().has(p.key); });
}

}  // namespace lily
