// What every decode kernel uses: conversions, activations, reductions, and products with quantized
// rows.
//
// A is the activation dtype (bfloat or half). Products, sums, gates and states are fp32; a
// value is rounded to A once, by an explicit cast. Nothing here assumes contraction or fast-math:
// where a fused multiply-add matters for speed or for equal bits it is spelt fma().
#pragma once

#include <metal_stdlib>
#if defined(__NVPTX__)
#include <dependent_launch>
#endif

using namespace metal;

namespace lily {

// A divisor from a function constant: front ends check a kernel also while its constants are still
// 0.
METAL_FUNC int at_least_1(int x) {
  return max(x, 1);
}

// Some backends (NVIDIA) start a dispatch of a step while the previous one still runs: when that one
// has waited itself, or even before, where it calls start_next(). What a kernel does before this
// call may read weights, the position and what earlier steps wrote; and, unless the previous dispatch
// calls start_next(), what was written two dispatches before or earlier. It writes nothing.
// Elsewhere a dispatch starts when all of that is there.
METAL_FUNC void wait_for_previous() {
#if defined(__NVPTX__)
  nvidia::wait_for_previous();
#endif
}

// At the start of a kernel whose follower reads nothing of this step before it waits. Small kernels
// would otherwise wait longer for their start than they run.
METAL_FUNC void start_next() {
#if defined(__NVPTX__)
  nvidia::start_next();
#endif
}

// A hint that the 128 bytes around p will be read soon, by whichever kernel: to the L2 cache.
METAL_FUNC void prefetch(device const void* p) {
#if defined(__NVPTX__)
  nvidia::prefetch(p);
#else
  (void)p;
#endif
}

METAL_FUNC float minus_infinity() {
  return -numeric_limits<float>::infinity();
}

// ---------------------------------------------------------------- conversions
//
// Overloads choose by a value of A (its content is not used); x points to fp32 in registers.

// The eight values of one 16-byte word.
METAL_FUNC void widen(uint4 u, thread float* x, bfloat) {
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = as_type<float>(u[i] << 16);
    x[2 * i + 1] = as_type<float>(u[i] & 0xffff0000u);
  }
}

METAL_FUNC void widen(uint4 u, thread float* x, half) {
  for (int i = 0; i < 4; ++i) {
    const half2 v = as_type<half2>(u[i]);
    x[2 * i] = float(v.x);
    x[2 * i + 1] = float(v.y);
  }
}

// The inverse; x holds values that A represents exactly.
METAL_FUNC uint4 narrow(thread const float* x, bfloat) {
  uint4 u;
  for (int i = 0; i < 4; ++i) {
    u[i] = (as_type<uint>(x[2 * i]) >> 16) | (as_type<uint>(x[2 * i + 1]) & 0xffff0000u);
  }
  return u;
}

METAL_FUNC uint4 narrow(thread const float* x, half) {
  uint4 u;
  for (int i = 0; i < 4; ++i) {
    half2 v;
    v.x = half(x[2 * i]);
    v.y = half(x[2 * i + 1]);
    u[i] = as_type<uint>(v);
  }
  return u;
}

// Eight values of A from a 16-byte aligned address.
template <typename A>
METAL_FUNC void load8(device const A* p, thread float* x) {
  widen(*(device const uint4*)p, x, A(0.0f));
}

// ---------------------------------------------------------------- activations

METAL_FUNC float sigmoid(float x) {
  return 1.0f / (1.0f + precise::exp(-x));
}

METAL_FUNC float silu(float x) {
  return x / (1.0f + precise::exp(-x));
}

// log(1 + x) for x >= 0, without losing small x: the rounding of 1 + x is divided out again.
METAL_FUNC float log1p_positive(float x) {
  const float u = 1.0f + x;
  const float d = u - 1.0f;
  return d == 0.0f ? x : precise::log(u) * (x / d);
}

METAL_FUNC float softplus(float x) {
  return max(x, 0.0f) + log1p_positive(precise::exp(-fabs(x)));
}

// ---------------------------------------------------------------- reductions

// Sum over each aligned group of `lanes` lanes (a power of two); every lane gets it, with equal
// bits.
METAL_FUNC float group_sum(float v, int lanes) {
  for (int m = 1; m < lanes; m <<= 1) {
    v += simd_shuffle_xor(v, ushort(m));
  }
  return v;
}

METAL_FUNC float group_max(float v) {
  for (int m = 1; m < 32; m <<= 1) {
    v = max(v, simd_shuffle_xor(v, ushort(m)));
  }
  return v;
}

// Sum over a threadgroup of `simdgroups` simdgroups, in a fixed order; scratch holds one float for
// each. Holds one barrier; the caller puts another before scratch is written again.
METAL_FUNC float threadgroup_sum(float v, threadgroup float* scratch, uint simdgroup, uint lane,
                                 int simdgroups) {
  v = group_sum(v, 32);
  if (lane == 0) {
    scratch[simdgroup] = v;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float t = scratch[0];
  for (int i = 1; i < simdgroups; ++i) {
    t += scratch[i];
  }
  return t;
}

// Greater value first, then lower id: the order of argmax and of the router.
METAL_FUNC bool ranks_before(float value, uint id, float other_value, uint other_id) {
  return value > other_value || (value == other_value && id < other_id);
}

// ---------------------------------------------------------------- products with weight rows
//
// A unit is the 16 bytes that a lane loads at once: 32 codes of 4 bits, 16 of 8 bits, or 8 values
// of A. Unpacking is what limits a GEMV once its loads are wide, and shifts and
// conversions are the slow part of it. So a code is masked into the mantissa of a float whose
// exponent makes the value c + code exactly (c = 16 for bits 19..22, 256 for bits 15..18
// or 15..22): one shift serves two 4-bit codes, one mask-and-or gives the float, no conversion is
// needed. The sum starts at -c * sum(x), which takes c out again; the sums of x come with x, once
// for all rows. Each float is exact; the fp32 sum carries c * x besides code * x, which costs up to
// 7e-6 of sum |w x| (seen, K = 64), where A = bfloat rounds to 2e-3.

constant constexpr uint kExponent16 = 0x41800000u;   // 16.0f
constant constexpr uint kExponent256 = 0x43800000u;  // 256.0f

// CODES values of x that meet one unit, and the sums over its even and odd positions.
template <int CODES>
struct UnitX {
  float x[CODES];
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
METAL_FUNC float dot_codes(uint4 q, thread const UnitX<32>& v) {
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

METAL_FUNC float dot_codes(uint4 q, thread const UnitX<16>& v) {
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

// acc + the unit's share of the row's product with x.
template <typename A>
METAL_FUNC float add_unit(uint4 q, A scale, A bias, thread const UnitX<32>& v, float acc) {
  return fma(float(scale), dot_codes(q, v), fma(float(bias), v.even + v.odd, acc));
}

template <typename A>
METAL_FUNC float add_unit(uint4 q, A scale, A bias, thread const UnitX<16>& v, float acc) {
  return fma(float(scale), dot_codes(q, v), fma(float(bias), v.even + v.odd, acc));
}

// Unquantized rows: the unit holds values of A.
template <typename A, int CODES>
METAL_FUNC float add_unit(uint4 q, A, A, thread const UnitX<CODES>& v, float acc) {
  float w[CODES];
  widen(q, w, A(0.0f));
  float even = acc;
  float odd = 0.0f;
  for (int i = 0; i < CODES; i += 2) {
    even = fma(w[i], v.x[i], even);
    odd = fma(w[i + 1], v.x[i + 1], odd);
  }
  return even + odd;
}

// Loads that stand before this are issued before what follows. Without it NVIDIA's assembler moves
// them to their uses, to save registers, and each then waits for memory by itself.
METAL_FUNC void issue_loads() {
  simdgroup_barrier(mem_flags::mem_none);
}

// Units of R rows, loaded before any is used.
template <typename A, int R, int U>
struct Tile {
  uint4 q[R * U];
  A scale[R * U];
  A bias[R * U];
};

// Loads U units of R rows: units first_unit, first_unit + lanes, ... of each row. `bits` above 8
// means unquantized: no scales. `groups` is groups a row.
template <typename A, int R, int U>
METAL_FUNC void load_tile(thread Tile<A, R, U>& t, device const uint* w, device const A* scales,
                          device const A* biases, thread const int* rows, int units, int groups,
                          int bits, int group, int first_unit, int lanes) {
  device const uint4* w4 = (device const uint4*)w;
  for (int r = 0; r < R; ++r) {
    for (int u = 0; u < U; ++u) {
      t.q[r * U + u] = w4[rows[r] * units + first_unit + u * lanes];
    }
  }
  if (bits <= 8) {
    const int codes = 128 / bits;
    for (int r = 0; r < R; ++r) {
      for (int u = 0; u < U; ++u) {
        const int g = rows[r] * groups + (first_unit + u * lanes) * codes / group;
        t.scale[r * U + u] = scales[g];
        t.bias[r * U + u] = biases[g];
      }
    }
  }
}

// ---------------------------------------------------------------- the row x in threadgroup memory
//
// Pieces of eight values, kept as A, with the sums over even and odd positions of each piece. A
// lane reads the four (two, one) neighbouring pieces of its unit, so pieces are permuted to keep
// the lanes of one read on different banks.

METAL_FUNC int piece_slot(int piece) {
  return piece ^ ((piece >> 3) & 3);
}

template <typename A>
struct StagedRow {
  threadgroup uint4* words;
  threadgroup float2* sums;
};

// x holds values that A represents exactly.
template <typename A>
METAL_FUNC void store_piece(StagedRow<A> row, int piece, thread const float* x) {
  const int slot = piece_slot(piece);
  row.words[slot] = narrow(x, A(0.0f));
  float2 sums;
  sums.x = (x[0] + x[2]) + (x[4] + x[6]);
  sums.y = (x[1] + x[3]) + (x[5] + x[7]);
  row.sums[slot] = sums;
}

// The part of x that meets unit `unit` of a weight row.
template <typename A, int CODES>
METAL_FUNC void load_unit_x(StagedRow<A> row, int unit, thread UnitX<CODES>& v) {
  v.even = 0.0f;
  v.odd = 0.0f;
  for (int i = 0; i < CODES / 8; ++i) {
    const int slot = piece_slot(unit * (CODES / 8) + i);
    widen(row.words[slot], v.x + i * 8, A(0.0f));
    const float2 sums = row.sums[slot];
    v.even += sums.x;
    v.odd += sums.y;
  }
  v.exponent = runtime_exponent(v.even);
}

// acc[r] += the tile's units of row r, times x.
template <typename A, int R, int U, int CODES>
METAL_FUNC void add_tile(thread const Tile<A, R, U>& t, StagedRow<A> x, int first_unit, int lanes,
                         thread float* acc) {
  for (int u = 0; u < U; ++u) {
    UnitX<CODES> v;
    load_unit_x(x, first_unit + u * lanes, v);
    for (int r = 0; r < R; ++r) {
      acc[r] = add_unit(t.q[r * U + u], t.scale[r * U + u], t.bias[r * U + u], v, acc[r]);
    }
  }
}

// Stages K values of h (K a multiple of 8), normalised when `norm`: rnd(h * rsqrt(mean(h^2) + eps)
// * weight), by `simdgroups` simdgroups. A barrier must follow. copy, when not null, gets the
// staged row too. Where `waits`, h is the previous dispatch's result, and the norm's weight, which
// comes from memory while h is in the cache, is asked for before the wait for it.
template <typename A>
METAL_FUNC void stage_pieces(StagedRow<A> row, device const A* h, device const A* weight,
                             device A* copy, int K, bool norm, bool write_copy, float eps,
                             threadgroup float* scratch, uint tid, uint simdgroup, uint lane,
                             int simdgroups, bool waits) {
  const int threads = simdgroups * 32;
  const int pieces = K / 8;
  // The first piece of a thread stays in registers: it is all there is when K <= 8 * threads.
  float x[8];
  float w[8];
  uint4 first_weight;
  const bool has = int(tid) < pieces;
  if (has && norm) {
    first_weight = *(device const uint4*)(weight + tid * 8);
  }
  if (waits) {
    wait_for_previous();
  }
  if (has) {
    load8(h + tid * 8, x);
  }
  float scale = 1.0f;
  if (norm) {
    float squares = 0.0f;
    if (has) {
      for (int i = 0; i < 8; ++i) {
        squares = fma(x[i], x[i], squares);
      }
    }
    for (int p = int(tid) + threads; p < pieces; p += threads) {
      float y[8];
      load8(h + p * 8, y);
      for (int i = 0; i < 8; ++i) {
        squares = fma(y[i], y[i], squares);
      }
    }
    const float sum = threadgroup_sum(squares, scratch, simdgroup, lane, simdgroups);
    scale = precise::rsqrt(sum / float(K) + eps);
  }
  for (int p = int(tid); p < pieces; p += threads) {
    if (p != int(tid)) {
      load8(h + p * 8, x);
    }
    if (norm) {
      if (p == int(tid)) {
        widen(first_weight, w, A(0.0f));
      } else {
        load8(weight + p * 8, w);
      }
      for (int i = 0; i < 8; ++i) {
        x[i] = float(A(x[i] * scale * w[i]));
      }
    }
    store_piece(row, p, x);
    if (write_copy) {
      *(device uint4*)(copy + p * 8) = narrow(x, A(0.0f));
    }
  }
}

// The same by all simdgroups, with the wait and the barrier.
template <typename A>
METAL_FUNC void stage_row(StagedRow<A> row, device const A* h, device const A* weight,
                          device A* copy, int K, bool norm, bool write_copy, float eps,
                          threadgroup float* scratch, uint tid, uint simdgroup, uint lane,
                          int simdgroups) {
  stage_pieces(row, h, weight, copy, K, norm, write_copy, eps, scratch, tid, simdgroup, lane,
               simdgroups, true);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

}  // namespace lily
