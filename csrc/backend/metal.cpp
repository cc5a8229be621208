#include "backend/metal.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "mlx/allocator.h"

namespace lily {
namespace {

namespace metal = mlx::core::metal;

MTL::DataType data_type(ScalarType t) {
  switch (t) {
    case ScalarType::boolean:
      return MTL::DataTypeBool;
    case ScalarType::int32:
      return MTL::DataTypeInt;
    case ScalarType::uint32:
      return MTL::DataTypeUInt;
    case ScalarType::float32:
      return MTL::DataTypeFloat;
    default:
      throw std::invalid_argument(std::string("a function constant cannot be ") + to_string(t));
  }
}

MTL::ComputePipelineState* compile(metal::Device& device, const Pipeline& pipeline) {
  const Source source = kernels().source(pipeline.kernel->file);
  MTL::Library* library = device.get_library(source.name, [&] { return source.text; });
  metal::MTLFCList constants;
  for (const Constant& c : pipeline.constants) {
    constants.push_back(
        {c.value.bytes.data(), data_type(c.value.type), static_cast<NS::UInteger>(c.id)});
  }
  return device.get_kernel(pipeline.kernel->name, library, pipeline.key, constants);
}

}  // namespace

void bind_metal(Bindings& bindings, SlotId slot, const mlx::core::array& a) {
  const void* buffer = a.buffer().ptr();
  bindings.bind(slot,
                {reinterpret_cast<uint64_t>(buffer), const_cast<void*>(buffer), a.buffer_size()},
                static_cast<size_t>(a.offset()));
}

mlx::core::array metal_bytes(size_t bytes, const void* data) {
  mlx::core::array a({static_cast<int>(std::max<size_t>(bytes, 16))}, mlx::core::uint8, nullptr,
                     {});
  a.set_data(mlx::core::allocator::malloc(a.nbytes()));
  a.set_status(mlx::core::array::Status::available);
  if (data != nullptr) {
    std::memcpy(a.data<char>(), data, bytes);
  }
  return a;
}

void keep_until_done(mlx::core::Stream stream, std::shared_ptr<const void> object) {
  metal::get_command_encoder(stream).get_command_buffer()->addCompletedHandler(
      [object = std::move(object)](MTL::CommandBuffer*) {});
}

void run_on_metal(mlx::core::Stream stream, const std::shared_ptr<const LayerProgram>& layer,
                  const std::vector<mlx::core::array>& in,
                  const std::vector<mlx::core::array>& out) {
  Bindings bindings(layer->program);
  bind_layer(*layer, in, out,
             [&](SlotId slot, const mlx::core::array& a) { bind_metal(bindings, slot, a); });
  auto& encoder = metal::get_command_encoder(stream);
  for (const Builder::Table& t : layer->tables) {
    mlx::core::array table = metal_bytes(t.data.size(), t.data.data());
    bind_metal(bindings, t.slot, table);
    encoder.add_temporary(std::move(table));
  }
  if (layer->program.arena_bytes() > 0) {
    mlx::core::array arena = metal_bytes(layer->program.arena_bytes());
    bindings.bind_arena({reinterpret_cast<uint64_t>(arena.buffer().ptr()), arena.buffer().ptr(),
                         arena.buffer_size()});
    encoder.add_temporary(std::move(arena));
  }
  MetalEncoder(stream).encode(layer->program, bindings);
}

void MetalEncoder::encode(const Program& program, const Bindings& bindings) {
  metal::Device& device = metal::device(stream_.device);
  metal::CommandEncoder& encoder = metal::get_command_encoder(stream_);
  std::vector<MTL::ComputePipelineState*> pipelines;
  for (const Pipeline& p : program.pipelines()) {
    pipelines.push_back(compile(device, p));
  }
  const Schedule& schedule = bindings.schedule();
  int level = -1;
  for (int index : schedule.order) {
    if (schedule.level[index] != level) {
      encoder.barrier();
      level = schedule.level[index];
    }
    const Dispatch& d = program.dispatches()[index];
    encoder.set_compute_pipeline_state(pipelines[d.pipeline]);
    for (const BufferArgument& a : d.buffers) {
      const Place place = bindings.place(a);
      encoder.set_buffer(static_cast<const MTL::Buffer*>(place.buffer.base), a.index,
                         static_cast<int64_t>(place.offset));
    }
    for (const ScalarArgument& a : d.scalars) {
      const std::vector<uint8_t>& bytes = bindings.scalar(a.scalar).bytes;
      encoder.set_bytes(bytes.data(), static_cast<int>(bytes.size()), a.index);
    }
    for (const ValueArgument& a : d.values) {
      encoder.set_bytes(a.value.bytes.data(), static_cast<int>(a.value.bytes.size()), a.index);
    }
    for (const ThreadgroupMemory& t : d.threadgroup) {
      // Metal wants a multiple of 16 bytes.
      encoder.set_threadgroup_memory_length((t.bytes + 15) / 16 * 16, t.index);
    }
    encoder.dispatch_threadgroups(
        MTL::Size(bindings.extent(d.grid_size[0]), bindings.extent(d.grid_size[1]),
                  bindings.extent(d.grid_size[2])),
        MTL::Size(d.group_size[0], d.group_size[1], d.group_size[2]));
  }
  encoder.barrier();
}

}  // namespace lily
