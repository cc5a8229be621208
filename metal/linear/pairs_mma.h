// Pairs of 16-bit values in a word, as NVIDIA's tensor cores take them (<nvidia_simdgroup>); for
// PTX alone.
#pragma once

#include "common.h"

namespace lily {

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

}  // namespace lily
