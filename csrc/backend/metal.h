// Runs Programs on an Apple GPU, on MLX's own Metal command encoder.
#pragma once

#include "backend/encoder.h"
#include "layer_program.h"
#include "mlx/array.h"
#include "mlx/backend/metal/device.h"

namespace lily {

// Sources are compiled by the OS at first use and cached by MLX under a name that holds their
// content's hash. Barriers stand where the Program's levels rise, and at both ends, since MLX does
// not know what a Program touches. MLX's command buffers do not retain what is bound: the caller
// keeps the arrays alive until the command buffer is done.
class MetalEncoder : public Encoder {
 public:
  explicit MetalEncoder(mlx::core::Stream stream) : stream_(stream) {}
  void encode(const Program& program, const Bindings& bindings) override;

 private:
  mlx::core::Stream stream_;
};

// Binds a slot to an evaluated array.
void bind_metal(Bindings& bindings, SlotId slot, const mlx::core::array& a);

// An array of `bytes` bytes that the CPU may write now and a GPU read later.
mlx::core::array metal_bytes(size_t bytes, const void* data = nullptr);

// Keeps objects alive until the command buffer that is being encoded has run.
void keep_until_done(mlx::core::Stream stream, std::shared_ptr<const void> object);

// Queues a layer primitive's Program.
void run_on_metal(mlx::core::Stream stream, const std::shared_ptr<const LayerProgram>& layer,
                  const std::vector<mlx::core::array>& in,
                  const std::vector<mlx::core::array>& out);

}  // namespace lily
