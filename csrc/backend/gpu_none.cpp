#include "backend/gpu.h"

namespace lily {

const Gpu* gpu() {
  return nullptr;
}

}  // namespace lily
