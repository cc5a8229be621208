// Weights as MLX packs them, and how they come out: the one place that knows a format's bits.
//
// Affine codes of `bits` bits (4 or 8), lowest bits first, in rows of little-endian words; a value is
// scale * code + bias of its group. bits = 16: values of A, without scales. `bits` is always a
// function constant or a template argument, so that a kernel holds one format's code.
#pragma once

#include "common.h"

namespace lily {

// ---------------------------------------------------------------- code by code
//
// A run of codes lies in words of 16 bytes: code 0 in the lowest bits of the first.

// The words that a run of CODES takes when its codes have 16 bits.
template <int CODES>
struct CodeRun {
  uint4 words[CODES / 8];
};

// CODES (16 or more) codes from p on.
template <int CODES>
METAL_FUNC void load_codes(const device uchar* p, int bits, thread CodeRun<CODES>& run) {
  if (CODES * bits < 128) {
    const uint2 few = *(const device uint2*)p;
    run.words[0][0] = few[0];
    run.words[0][1] = few[1];
    return;
  }
  for (int i = 0; i < CODES * bits / 128; ++i) {
    run.words[i] = *(const device uint4*)(p + 16 * i);
  }
}

template <int CODES>
METAL_FUNC uint code_at(thread const CodeRun<CODES>& run, int i, int bits) {
  const int word = i * bits / 32;
  return (run.words[word / 4][word % 4] >> (i * bits % 32)) & ((1u << bits) - 1u);
}

// Code i of those that start with word `first`.
METAL_FUNC uint code_in(const device uint* first, int i, int bits) {
  return (first[i * bits / 32] >> (i * bits % 32)) & ((1u << bits) - 1u);
}

}  // namespace lily
