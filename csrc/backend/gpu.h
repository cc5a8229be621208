// The GPU that this build runs Programs on: one object, defined by the backend that is compiled in.
#pragma once

#include <memory>
#include <vector>

#include "choice.h"
#include "layer_program.h"
#include "mlx/array.h"
#include "mlx/stream.h"

namespace lily {

class GpuDecode;
struct DecodePlan;

class Gpu {
 public:
  virtual ~Gpu() = default;
  virtual Target target() const = 0;
  // Allocates an output.
  virtual void allocate(mlx::core::array& out) const = 0;
  // Where kernels find an array, up to a multiple of alignment(). Moves no data.
  virtual size_t start(const mlx::core::array& a) const = 0;
  virtual size_t alignment() const = 0;
  // Queues a layer primitive's Program. What its kernels touch lives until they have run.
  virtual void run(mlx::core::Stream stream, const std::shared_ptr<const LayerProgram>& layer,
                   const std::vector<mlx::core::array>& in,
                   const std::vector<mlx::core::array>& out) const = 0;
  virtual std::unique_ptr<GpuDecode> make_decode(const DecodePlan& plan) const = 0;
};

// Null in a build without one.
const Gpu* gpu();

}  // namespace lily
