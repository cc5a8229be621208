// Runs Programs on an Apple GPU, on MLX's own Metal command encoder.
#pragma once

#include "backend/encoder.h"
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

// The Buffer of an evaluated array: base is its MTL::Buffer, so bind it with the array's offset.
Buffer metal_buffer(const mlx::core::array& a);

}  // namespace lily
