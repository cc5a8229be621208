// quant.h's formats as pairs of A, as NVIDIA's tensor cores take them; for PTX alone.
#pragma once

#include <nvidia_simdgroup>

#include "linear/pairs_mma.h"
#include "quant.h"

namespace lily {

// Codes of 4 bits as pairs of A that hold base + code exactly, base a power of two, by setting them
// into a mantissa.
METAL_FUNC float base_value(bfloat) {
  return 128.0f;
}
METAL_FUNC float base_value(half) {
  return 1024.0f;
}
METAL_FUNC uint pair_base(bfloat) {
  return 0x43004300u;  // 128, 128
}
METAL_FUNC uint pair_minus_base(bfloat) {
  return 0xc300c300u;
}
METAL_FUNC uint pair_one(bfloat) {
  return 0x3f803f80u;
}
METAL_FUNC uint pair_base(half) {
  return 0x64006400u;  // 1024, 1024
}
METAL_FUNC uint pair_minus_base(half) {
  return 0xe400e400u;
}
METAL_FUNC uint pair_one(half) {
  return 0x3c003c00u;
}

// Codes i and i + 4 of a word's eight, i at most 3.
template <typename A>
METAL_FUNC uint base_and_codes(uint word, int i) {
  return nvidia::select_bits(word >> (4 * i), 0x000f000fu, pair_base(A(0.0f)));
}

// Eight values, two a word in their order, as pairs (0, 4), (1, 5), (2, 6), (3, 7): as codes of 4
// bits come out of a word, halves at 0 and 16, 4 and 20, ...
METAL_FUNC uint4 pair_halves(uint4 x) {
  return uint4(lower_halves(x[0], x[2]), upper_halves(x[0], x[2]), lower_halves(x[1], x[3]),
               upper_halves(x[1], x[3]));
}

// Codes 8 j to 8 j + 7 of a run as pairs of A (0, 4), (1, 5), (2, 6), (3, 7), scaled and rounded
// once.
template <typename A, int CODES>
METAL_FUNC uint4 dequantize_pairs(thread const CodeRun<CODES>& run, int j, int bits, A scale,
                                  A bias) {
  if (bits > 8) {
    return pair_halves(run.words[j]);
  }
  uint4 pairs;
  if (bits == 4) {
    const uint word = run.words[j / 4][j % 4];
    const uint scales = pair_of(scale);
    const uint biases = pair_of(bias);
#pragma clang loop unroll(full)
    for (int i = 0; i < 4; ++i) {
      const uint set = base_and_codes<A>(word, i);
      const uint code = nvidia::fma_pair(set, pair_one(A(0.0f)), pair_minus_base(A(0.0f)), A(0.0f));
      pairs[i] = nvidia::fma_pair(code, scales, biases, A(0.0f));
    }
    return pairs;
  }
#pragma clang loop unroll(full)
  for (int i = 0; i < 4; ++i) {
    const int at = 8 * j + i;
    const A low = A(fma(float(code_at(run, at, bits)), float(scale), float(bias)));
    const A high = A(fma(float(code_at(run, at + 4, bits)), float(scale), float(bias)));
    pairs[i] = uint(as_type<ushort>(low)) | uint(as_type<ushort>(high)) << 16;
  }
  return pairs;
}

}  // namespace lily
