// Layer primitives on an NVIDIA GPU: their Programs as nodes of MLX's own CUDA graph.
#pragma once

#include <memory>
#include <vector>

#include "layer_program.h"
#include "mlx/array.h"
#include "mlx/stream.h"

namespace lily {

// Queues a layer primitive's Program. Everything that its kernels touch lives until they have run.
void run_on_cuda(mlx::core::Stream stream, const std::shared_ptr<const LayerProgram>& layer,
                 const std::vector<mlx::core::array>& in, const std::vector<mlx::core::array>& out);

}  // namespace lily
