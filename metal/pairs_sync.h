// Pairs of 16-bit values in a word, as NVIDIA's tensor cores take them (<nvidia_simdgroup>); for PTX
// alone.
#pragma once

#include "common.h"

namespace lily {

// Codes of 4 bits as pairs of A that hold base + code exactly, base a power of two, by setting them into
// a mantissa.
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

METAL_FUNC uint pair_of(bfloat x) {
  return uint(as_type<ushort>(x)) * 0x10001u;
}
METAL_FUNC uint pair_of(half x) {
  return uint(as_type<ushort>(x)) * 0x10001u;
}

METAL_FUNC uint lower_halves(uint a, uint b) {
  return (a & 0xffffu) | (b << 16);
}
METAL_FUNC uint upper_halves(uint a, uint b) {
  return (a >> 16) | (b & 0xffff0000u);
}

// Eight values, two a word in their order, as pairs (0, 4), (1, 5), (2, 6), (3, 7): as codes of 4 bits come
// out of a word, halves at 0 and 16, 4 and 20, ...
METAL_FUNC uint4 pair_halves(uint4 x) {
  return uint4(
      lower_halves(x[0], x[2]),
      upper_halves(x[0], x[2]),
      lower_halves(x[1], x[3]),
      upper_halves(x[1], x[3]));
}

}  // namespace lily
