// Device memory for what primitives make on an NVIDIA GPU: MLX exports no allocator but that of
// managed memory, which pages move into at first touch, and which takes a cached device buffer away
// from whatever still runs on it.
#pragma once

#include "mlx/array.h"

namespace lily {

// Gives an output device memory. Whoever queues work on it keeps the array until that has run, as
// MLX does with the inputs of each primitive: the memory serves the next array as soon as nobody
// holds it.
void allocate_on_device(mlx::core::array& out);

// Arrays of device memory, their contents undefined.
mlx::core::array device_array(mlx::core::Shape shape, mlx::core::Dtype dtype);
mlx::core::array device_bytes(size_t bytes);

}  // namespace lily
