#include "backend/metal.h"

#include <stdexcept>

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

Buffer metal_buffer(const mlx::core::array& a) {
  const void* buffer = a.buffer().ptr();
  return {reinterpret_cast<uint64_t>(buffer), const_cast<void*>(buffer), a.buffer_size()};
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
