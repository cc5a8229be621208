// Weights as MLX packs them, and how they come out. With quant_mma.h, which makes pairs for
// NVIDIA's tensor cores, this file alone knows how the bits of a format lie.
//
// Affine codes of `bits` bits (4, 6 or 8), lowest bits first, in rows of little-endian words; codes of
// 6 bits cross words, 16 of them take three. A value is scale * code + bias of its group. bits = 16:
// values of A, without scales. `bits` is always a function constant or a template argument, so that a
// kernel holds one format's code.
//
// Three forms: code by code for products of several rows and for embeddings (CodeRun), unit by unit
// for products of one row (UnitX), pairs on tensor cores (quant_mma.h). A new format needs each.
#pragma once

#include "common.h"
#include "params.h"

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
  if (bits == 6) {  // 12 or 24 bytes a run, aligned no better
    for (int i = 0; i < CODES * bits / 32; ++i) {
      run.words[i / 4][i % 4] = ((const device uint*)p)[i];
    }
    return;
  }
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
  const int shift = i * bits % 32;
  if (shift + bits > 32) {
    const uint above = run.words[(word + 1) / 4][(word + 1) % 4] << (32 - shift);
    return ((run.words[word / 4][word % 4] >> shift) | above) & ((1u << bits) - 1u);
  }
  return (run.words[word / 4][word % 4] >> shift) & ((1u << bits) - 1u);
}

// Code k + i of a row, k a multiple of 8, i below 8.
METAL_FUNC uint code_in(const device uint* row, int k, int i, int bits) {
  if (bits == 6) {  // eight codes start on a byte, which need not start a word
    const device uchar* eight = (const device uchar*)row + k * bits / 8;
    const int byte = i * bits / 8;
    const int shift = i * bits % 8;
    const uint above = shift + bits > 8 ? uint(eight[byte + 1]) << 8 : 0u;
    return ((uint(eight[byte]) | above) >> shift) & ((1u << bits) - 1u);
  }
  const device uint* first = row + k * bits / 32;
  return (first[i * bits / 32] >> (i * bits % 32)) & ((1u << bits) - 1u);
}

// ---------------------------------------------------------------- unit by unit, for products of
// one row
//
// A unit is what a lane loads at once: 16 bytes, which are 32 codes of 4 bits, 16 of 8 bits or 8
// values of A, or 12 bytes, which are 16 codes of 6 bits. Unpacking limits a GEMV once its loads are wide, and shifts and conversions are the slow
// part of it. So a code is masked into the mantissa of a float whose exponent makes the value c +
// code exactly (c = 16 for bits 19..22, 256 for bits 15..18, 15..20 or 15..22): one shift serves two 4-bit
// codes, one mask-and-or gives the float, no conversion is needed. The sum starts at -c * sum(x),
// which takes c out again; the sums of x come with x, once for all rows. Each float is exact; the
// fp32 sum carries c * x besides code * x, which costs up to 7e-6 of sum |w x| (seen, K = 64),
// where A = bfloat rounds to 2e-3.

constant constexpr uint kExponent16 = 0x41800000u;   // 16.0f
constant constexpr uint kExponent256 = 0x43800000u;  // 256.0f

// The units of a row of `depth` values.
METAL_FUNC int units_in(int depth, int bits) {
  return depth / unit_codes(bits);
}

METAL_FUNC uint4 unit_at(const device uint* w, int unit, int bits) {
  if (bits == 6) {
    const device uint* three = w + 3 * unit;
    return uint4(three[0], three[1], three[2], 0u);
  }
  return ((const device uint4*)w)[unit];
}

// The values of x that meet one unit, and the sums over its even and odd positions.
template <int BITS>
struct UnitX {
  float x[unit_codes(BITS)];
  float even;
  float odd;
  uint exponent;  // runtime_exponent(even)
};

// kExponent256 as a value that a compiler does not know: with it in a register, mask-and-or is one
// instruction on an NVIDIA GPU, while two literals make it two. A NaN in x is a NaN in the product
// whatever the exponent.
METAL_FUNC uint runtime_exponent(float sum) {
  return sum == sum ? kExponent256 : 0u;
}

// sum(code * x) over one unit.
METAL_FUNC float dot_codes(uint4 q, thread const UnitX<4>& v) {
  const uint exponent256 = v.exponent;
  const uint exponent16 = v.exponent - (kExponent256 - kExponent16);
  float even = -256.0f * v.even;
  float odd = -16.0f * v.odd;
  for (int j = 0; j < 4; ++j) {
    const uint u = q[j];
    const uint a = u << 15;
    const uint b = u << 7;
    const uint c = u >> 1;
    const uint d = u >> 9;
    even = fma(as_type<float>((a & 0x00078000u) | exponent256), v.x[8 * j], even);
    odd = fma(as_type<float>((a & 0x00780000u) | exponent16), v.x[8 * j + 1], odd);
    even = fma(as_type<float>((b & 0x00078000u) | exponent256), v.x[8 * j + 2], even);
    odd = fma(as_type<float>((b & 0x00780000u) | exponent16), v.x[8 * j + 3], odd);
    even = fma(as_type<float>((c & 0x00078000u) | exponent256), v.x[8 * j + 4], even);
    odd = fma(as_type<float>((c & 0x00780000u) | exponent16), v.x[8 * j + 5], odd);
    even = fma(as_type<float>((d & 0x00078000u) | exponent256), v.x[8 * j + 6], even);
    odd = fma(as_type<float>((d & 0x00780000u) | exponent16), v.x[8 * j + 7], odd);
  }
  return even + odd;
}

METAL_FUNC float dot_codes(uint4 q, thread const UnitX<8>& v) {
  float even = -256.0f * v.even;
  float odd = -256.0f * v.odd;
  for (int j = 0; j < 4; ++j) {
    const uint u = q[j];
    even = fma(as_type<float>(((u << 15) & 0x007f8000u) | v.exponent), v.x[4 * j], even);
    odd = fma(as_type<float>(((u << 7) & 0x007f8000u) | v.exponent), v.x[4 * j + 1], odd);
    even = fma(as_type<float>(((u >> 1) & 0x007f8000u) | v.exponent), v.x[4 * j + 2], even);
    odd = fma(as_type<float>(((u >> 9) & 0x007f8000u) | v.exponent), v.x[4 * j + 3], odd);
  }
  return even + odd;
}

METAL_FUNC float dot_codes(uint4 q, thread const UnitX<6>& v) {
  // Four codes in the low 24 bits of a word.
  const uint4 fours =
      uint4(q[0], (q[0] >> 24) | (q[1] << 8), (q[1] >> 16) | (q[2] << 16), q[2] >> 8);
  float even = -256.0f * v.even;
  float odd = -256.0f * v.odd;
  for (int j = 0; j < 4; ++j) {
    const uint u = fours[j];
    even = fma(as_type<float>(((u << 15) & 0x001f8000u) | v.exponent), v.x[4 * j], even);
    odd = fma(as_type<float>(((u << 9) & 0x001f8000u) | v.exponent), v.x[4 * j + 1], odd);
    even = fma(as_type<float>(((u << 3) & 0x001f8000u) | v.exponent), v.x[4 * j + 2], even);
    odd = fma(as_type<float>(((u >> 3) & 0x001f8000u) | v.exponent), v.x[4 * j + 3], odd);
  }
  return even + odd;
}

// acc + the unit's share of the row's product with x.
template <typename A, int BITS>
METAL_FUNC float add_unit(uint4 q, A scale, A bias, thread const UnitX<BITS>& v, float acc) {
  return fma(float(scale), dot_codes(q, v), fma(float(bias), v.even + v.odd, acc));
}

// Unquantized rows: the unit holds values of A.
template <typename A>
METAL_FUNC float add_unit(uint4 q, A, A, thread const UnitX<16>& v, float acc) {
  float w[8];
  widen(q, w, A(0.0f));
  float even = acc;
  float odd = 0.0f;
  for (int i = 0; i < 8; i += 2) {
    even = fma(w[i], v.x[i], even);
    odd = fma(w[i + 1], v.x[i + 1], odd);
  }
  return even + odd;
}

// CALL(BITS) for the format that `bits` names.
#define LILY_BY_BITS(bits, CALL) \
  if (bits == 4) {               \
    CALL(4)                      \
  } else if (bits == 6) {        \
    CALL(6)                      \
  } else if (bits == 8) {        \
    CALL(8)                      \
  } else {                       \
    CALL(16)                     \
  }

}  // namespace lily
