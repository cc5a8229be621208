// The reference's inner loops, compiled once per instruction set from one source (micro.cpp)
// and chosen at load time. Each result element is a fixed sequence of operations that does not
// depend on how many rows are computed together, so one pass, chunks and single steps agree bit for
// bit.
#pragma once

#include "reference/types.h"

namespace lily {

// 16 lanes, fp32: the unit of every loop; all dims that enter here are multiples of it.
inline constexpr int kLanes = 16;
// Weight rows computed together.
inline constexpr int kRows = 4;
// Up to this many rows of x, dequantizing twice costs less than a pass through a buffer.
inline constexpr int kFusedRows = 2;

// Where element i of a row stands in fp32 working order: 4-bit codes come as the even, then the odd
// elements of each 32, since a byte holds two neighbours.
inline int arranged_index(int bits, int i) {
  return bits == 4 ? (i & ~31) | ((i & 1) << 4) | ((i & 31) >> 1) : i;
}

struct Micro {
  // x[0..cols) of type t -> fp32 in the order of a matrix's codes: arranged_index(bits, i).
  void (*arrange)(int bits, Type t, const void* x, int cols, float* out);
  // y[t * ldy + r] = sum_k w[row + r, k] x[t, k] for r < count <= kRows and T <= kFusedRows rows of
  // arranged x: each code is dequantized and used at once.
  void (*product)(const Matrix& m, int row, int count, const float* x, int T, float* y,
                  int64_t ldy);
  // Dequantizes one row, arranged, into out[cols]; tile() then multiplies `count` <= kRows such
  // rows by T rows of x, with the same bits as product().
  void (*unpack)(const Matrix& m, int row, float* out);
  void (*tile)(const float* w, int count, int cols, const float* x, int T, float* y, int64_t ldy);
  // One token of the delta rule for one value head: state [Dv, Dk] in place, y [Dv].
  void (*delta)(float* state, const float* q, const float* k, const float* v, float gate,
                float beta, int Dk, int Dv, float* y);
  // Scores of `count` keys for `heads` queries: s[h * lds + j] = q[h] . key[j] (q pre-scaled,
  // fp32).
  void (*scores)(Type t, const void* keys, int64_t key_stride, int count, const float* q, int heads,
                 int D, float* s, int64_t lds);
  // o[h] = o[h] * scale[h] + sum_j p[h * ldp + j] value[j].
  void (*mix)(Type t, const void* values, int64_t value_stride, int count, const float* p,
              int64_t ldp, const float* scale, int heads, int D, float* o);
  const char* name;
};

const Micro& micro();

}  // namespace lily
