// Other forms of layers' Programs, which ablations measure against the production ones
// (benchmarks/ablate.py).
#pragma once

#include <cstdint>
#include <optional>

namespace lily {

// The forms of the scan: with the norm in the same kernel or apart, and its block-staged form.
enum class Scan : uint8_t { norm, apart, block };

struct LayerOptions {
  int block_rows = 0;        // of a block of one expert in a GEMM; 0: by the rows that there are
  std::optional<Scan> scan;  // by default the target's own
  bool dequantize = false;   // a GEMM's weights become plain elements in dispatches before it

  bool operator==(const LayerOptions&) const = default;
};

}  // namespace lily
