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

// Whether an array's memory may be written in place: nobody else holds it, and it is MLX's or from
// here. The caller holds the array object alone. (MLX's own question, is_donatable, is answered no
// for memory that is not its allocator's.)
bool held_alone(const mlx::core::array& a);

// Arrays of device memory, their contents undefined.
mlx::core::array device_array(mlx::core::Shape shape, mlx::core::Dtype dtype);
mlx::core::array device_bytes(size_t bytes);

}  // namespace lily
