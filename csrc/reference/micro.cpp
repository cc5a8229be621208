// See micro.h. LILY_MICRO names this build's table: one per instruction set.
#include "reference/micro.h"

#include <algorithm>

namespace lily {
namespace {

using F = float __attribute__((vector_size(4 * kLanes)));
using I = int32_t __attribute__((vector_size(4 * kLanes)));
using U = uint32_t __attribute__((vector_size(4 * kLanes)));
using U16 = uint16_t __attribute__((vector_size(2 * kLanes)));
using U8 = uint8_t __attribute__((vector_size(kLanes)));

template <typename V>
inline V read(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}

inline void write(float* p, F v) {
  std::memcpy(p, &v, sizeof(F));
}

inline F splat(float x) {
  return F{} + x;
}

template <Type T>
inline F load16(const void* p, int64_t i) {
  if constexpr (T == Type::fp32) {
    return read<F>(static_cast<const float*>(p) + i);
  } else {
    U bits = __builtin_convertvector(read<U16>(static_cast<const uint16_t*>(p) + i), U);
    if constexpr (T == Type::bf16) {
      return (F)(bits << 16);
    } else {
      // Half to float: shift the exponent into place and rescale, which is exact for denormals too.
      F magnitude = (F)((bits & 0x7fffu) << 13) * 0x1p112f;
      U special = (U)((bits & 0x7c00u) == 0x7c00u);
      U m = ((U)magnitude & ~special) | ((((bits & 0x7fffu) << 13) | 0x7f800000u) & special);
      return (F)(m | ((bits & 0x8000u) << 16));
    }
  }
}

inline float sum(F v) {
  float a[kLanes];
  write(a, v);
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) {
      a[i] += a[i + step];
    }
  }
  return a[0];
}

inline F codes_to_float(U8 c) {
  return __builtin_convertvector(__builtin_convertvector(c, I), F);
}

// One element of a half type.
template <Type T>
inline float element(const void* p, int64_t i) {
  return load(T, p, i);
}

// Dequantizes vector v of a row (vector = 16 columns in arranged order).
template <int Bits, Type T>
struct Row {
  const uint8_t* codes;
  const void* scales;
  const void* biases;
  int vectors_per_group;

  Row() = default;
  Row(const Matrix& m, int row)
      : codes(static_cast<const uint8_t*>(m.weight) + row * m.weight_row),
        scales(at(T, m.scales, row * m.scale_row)),
        biases(at(T, m.biases, row * m.scale_row)),
        vectors_per_group(m.group / kLanes) {}

  F scale(int group) const {
    return splat(element<T>(scales, group));
  }
  F bias(int group) const {
    return splat(element<T>(biases, group));
  }
  // Two vectors, v and v + 1, v even.
  void pair(int v, F s, F b, F out[2]) const {
    if constexpr (Bits == 4) {
      U8 c = read<U8>(codes + v / 2 * kLanes);
      out[0] = codes_to_float(c & 15) * s + b;
      out[1] = codes_to_float(c >> 4) * s + b;
    } else {
      out[0] = codes_to_float(read<U8>(codes + v * kLanes)) * s + b;
      out[1] = codes_to_float(read<U8>(codes + (v + 1) * kLanes)) * s + b;
    }
  }
};

template <Type T>
struct Row<0, T> {
  const void* elements;
  int vectors_per_group;

  Row() = default;
  Row(const Matrix& m, int row)
      : elements(static_cast<const char*>(m.weight) + row * m.weight_row),
        vectors_per_group(m.cols / kLanes) {}

  F scale(int) const {
    return F{};
  }
  F bias(int) const {
    return F{};
  }
  void pair(int v, F, F, F out[2]) const {
    out[0] = load16<T>(elements, int64_t(v) * kLanes);
    out[1] = load16<T>(elements, int64_t(v + 1) * kLanes);
  }
};

// Dequantize and multiply in one go: N weight rows, M rows of x.
template <int Bits, Type T, int N, int M>
void fused(const Matrix& m, int row, const float* x, float* y, int64_t ldy) {
  using R = Row<Bits, T>;
  R rows[N];
  for (int r = 0; r < N; ++r) {
    rows[r] = R(m, row + r);
  }
  F acc[N][M] = {};
  const int per_group = rows[0].vectors_per_group;
  const int vectors = m.cols / kLanes;
  for (int v0 = 0, g = 0; v0 < vectors; v0 += per_group, ++g) {
    F s[N], b[N];
    for (int r = 0; r < N; ++r) {
      s[r] = rows[r].scale(g);
      b[r] = rows[r].bias(g);
    }
    for (int v = v0; v < v0 + per_group; v += 2) {
      for (int r = 0; r < N; ++r) {
        F w[2];
        rows[r].pair(v, s[r], b[r], w);
        for (int t = 0; t < M; ++t) {
          const float* xt = x + int64_t(t) * m.cols + v * kLanes;
          acc[r][t] += w[0] * read<F>(xt);
          acc[r][t] += w[1] * read<F>(xt + kLanes);
        }
      }
    }
  }
  for (int t = 0; t < M; ++t) {
    for (int r = 0; r < N; ++r) {
      y[t * ldy + r] = sum(acc[r][t]);
    }
  }
}

template <int Bits, Type T>
void unpack_of(const Matrix& m, int row, float* out) {
  Row<Bits, T> r(m, row);
  const int vectors = m.cols / kLanes;
  for (int v0 = 0, g = 0; v0 < vectors; v0 += r.vectors_per_group, ++g) {
    F s = r.scale(g), b = r.bias(g);
    for (int v = v0; v < v0 + r.vectors_per_group; v += 2) {
      F w[2];
      r.pair(v, s, b, w);
      write(out + v * kLanes, w[0]);
      write(out + (v + 1) * kLanes, w[1]);
    }
  }
}

// N dequantized rows in `w` times M rows of x.
template <int N, int M>
void tile_of(const float* w, int cols, const float* x, float* y, int64_t ldy) {
  F acc[N][M] = {};
  for (int k = 0; k < cols; k += kLanes) {
    F wv[N];
    for (int r = 0; r < N; ++r) {
      wv[r] = read<F>(w + int64_t(r) * cols + k);
    }
    for (int t = 0; t < M; ++t) {
      F xv = read<F>(x + int64_t(t) * cols + k);
      for (int r = 0; r < N; ++r) {
        acc[r][t] += wv[r] * xv;
      }
    }
  }
  for (int t = 0; t < M; ++t) {
    for (int r = 0; r < N; ++r) {
      y[t * ldy + r] = sum(acc[r][t]);
    }
  }
}

template <int N>
void tile_rows(const float* w, int cols, const float* x, int T, float* y, int64_t ldy) {
  int t = 0;
  for (; t + 4 <= T; t += 4) {
    tile_of<N, 4>(w, cols, x + int64_t(t) * cols, y + t * ldy, ldy);
  }
  for (; t < T; ++t) {
    tile_of<N, 1>(w, cols, x + int64_t(t) * cols, y + t * ldy, ldy);
  }
}

// A run-time value made a template argument.
template <typename Body>
void with_count(int count, Body&& body) {
  switch (count) {
    case 1:
      return body.template operator()<1>();
    case 2:
      return body.template operator()<2>();
    case 3:
      return body.template operator()<3>();
    default:
      return body.template operator()<4>();
  }
}

template <typename Body>
void with_type(Type t, Body&& body) {
  switch (t) {
    case Type::fp16:
      return body.template operator()<Type::fp16>();
    case Type::bf16:
      return body.template operator()<Type::bf16>();
    default:
      return body.template operator()<Type::fp32>();
  }
}

template <typename Body>
void with_format(const Matrix& m, Body&& body) {
  with_type(m.type, [&]<Type T>() {
    if (m.bits == 4) {
      body.template operator()<4, T>();
    } else if (m.bits == 8) {
      body.template operator()<8, T>();
    } else {
      body.template operator()<0, T>();
    }
  });
}

void product(const Matrix& m, int row, int count, const float* x, int T, float* y, int64_t ldy) {
  with_format(m, [&]<int Bits, Type S>() {
    with_count(count, [&]<int N>() {
      if (T == 1) {
        fused<Bits, S, N, 1>(m, row, x, y, ldy);
      } else {
        fused<Bits, S, N, kFusedRows>(m, row, x, y, ldy);
      }
    });
  });
}

void unpack(const Matrix& m, int row, float* out) {
  with_format(m, [&]<int Bits, Type S>() { unpack_of<Bits, S>(m, row, out); });
}

void tile(const float* w, int count, int cols, const float* x, int T, float* y, int64_t ldy) {
  with_count(count, [&]<int N>() { tile_rows<N>(w, cols, x, T, y, ldy); });
}

void arrange(int bits, Type t, const void* x, int cols, float* out) {
  with_type(t, [&]<Type S>() {
    for (int i = 0; i < cols; i += 2 * kLanes) {
      if (bits == 4) {
        for (int j = 0; j < kLanes; ++j) {
          out[i + j] = element<S>(x, i + 2 * j);
          out[i + kLanes + j] = element<S>(x, i + 2 * j + 1);
        }
      } else {
        write(out + i, load16<S>(x, i));
        write(out + i + kLanes, load16<S>(x, i + kLanes));
      }
    }
  });
}

// D / 16 vectors of one row of state, for the dims in use (128: 8 vectors) and any other multiple
// of 16.
template <int V>
void delta_rows(float* state, const float* q, const float* k, const float* v, float gate,
                float beta, int Dk, int Dv, float* y) {
  const int n = V > 0 ? V : Dk / kLanes;
  for (int d = 0; d < Dv; ++d) {
    float* row = state + int64_t(d) * Dk;
    F memory = {};
    for (int i = 0; i < n; ++i) {
      F s = read<F>(row + i * kLanes) * gate;
      write(row + i * kLanes, s);
      memory += s * read<F>(k + i * kLanes);
    }
    const float change = (v[d] - sum(memory)) * beta;
    F out = {};
    for (int i = 0; i < n; ++i) {
      F s = read<F>(row + i * kLanes) + read<F>(k + i * kLanes) * change;
      write(row + i * kLanes, s);
      out += s * read<F>(q + i * kLanes);
    }
    y[d] = sum(out);
  }
}

void delta(float* state, const float* q, const float* k, const float* v, float gate, float beta,
           int Dk, int Dv, float* y) {
  if (Dk == 128) {
    delta_rows<8>(state, q, k, v, gate, beta, Dk, Dv, y);
  } else {
    delta_rows<0>(state, q, k, v, gate, beta, Dk, Dv, y);
  }
}

template <Type T>
void scores_of(const void* keys, int64_t key_stride, int count, const float* q, int heads, int D,
               float* s, int64_t lds) {
  for (int j = 0; j < count; ++j) {
    const void* key = at(T, keys, j * key_stride);
    int h = 0;
    for (; h + 4 <= heads; h += 4) {
      F acc[4] = {};
      for (int i = 0; i < D; i += kLanes) {
        F kv = load16<T>(key, i);
        for (int r = 0; r < 4; ++r) {
          acc[r] += kv * read<F>(q + int64_t(h + r) * D + i);
        }
      }
      for (int r = 0; r < 4; ++r) {
        s[(h + r) * lds + j] = sum(acc[r]);
      }
    }
    for (; h < heads; ++h) {
      F acc = {};
      for (int i = 0; i < D; i += kLanes) {
        acc += load16<T>(key, i) * read<F>(q + int64_t(h) * D + i);
      }
      s[h * lds + j] = sum(acc);
    }
  }
}

void scores(Type t, const void* keys, int64_t key_stride, int count, const float* q, int heads,
            int D, float* s, int64_t lds) {
  with_type(t, [&]<Type T>() { scores_of<T>(keys, key_stride, count, q, heads, D, s, lds); });
}

template <Type T, int H>
void mix_heads(const void* values, int64_t value_stride, int count, const float* p, int64_t ldp,
               const float* scale, int D, float* o) {
  for (int i = 0; i < D; i += kLanes) {
    F acc[H];
    for (int h = 0; h < H; ++h) {
      acc[h] = read<F>(o + int64_t(h) * D + i) * scale[h];
    }
    for (int j = 0; j < count; ++j) {
      F v = load16<T>(values, j * value_stride + i);
      for (int h = 0; h < H; ++h) {
        acc[h] += v * p[h * ldp + j];
      }
    }
    for (int h = 0; h < H; ++h) {
      write(o + int64_t(h) * D + i, acc[h]);
    }
  }
}

template <Type T>
void mix_of(const void* values, int64_t value_stride, int count, const float* p, int64_t ldp,
            const float* scale, int heads, int D, float* o) {
  int h = 0;
  for (; h + 4 <= heads; h += 4) {
    mix_heads<T, 4>(values, value_stride, count, p + h * ldp, ldp, scale + h, D,
                    o + int64_t(h) * D);
  }
  for (; h < heads; ++h) {
    mix_heads<T, 1>(values, value_stride, count, p + h * ldp, ldp, scale + h, D,
                    o + int64_t(h) * D);
  }
}

void mix(Type t, const void* values, int64_t value_stride, int count, const float* p, int64_t ldp,
         const float* scale, int heads, int D, float* o) {
  with_type(t,
            [&]<Type T>() { mix_of<T>(values, value_stride, count, p, ldp, scale, heads, D, o); });
}

#define LILY_STRING_(x) #x
#define LILY_STRING(x) LILY_STRING_(x)

}  // namespace

extern const Micro LILY_MICRO;
const Micro LILY_MICRO = {arrange, product, unpack, tile,
                          delta,   scores,  mix,    LILY_STRING(LILY_MICRO)};

}  // namespace lily
