// See micro.h. LILY_MICRO names this build's table: one per instruction set.
#include "reference/micro.h"

#include <algorithm>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace lily {
namespace {

// Lanes of one register. gcc keeps wider vectors in memory, so F is an array of registers.
#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX2__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
constexpr int kParts = kLanes / kNative;

using V = float __attribute__((vector_size(4 * kNative)));
using I = int32_t __attribute__((vector_size(4 * kNative)));
using U = uint32_t __attribute__((vector_size(4 * kNative)));
using U16 = uint16_t __attribute__((vector_size(2 * kNative)));
using U8 = uint8_t __attribute__((vector_size(kNative)));

struct F {
  V part[kParts];
};

template <typename T>
inline T read(const void* p) {
  T v;
  std::memcpy(&v, p, sizeof(T));
  return v;
}

inline F read16(const float* p) {
  F v;
  for (int i = 0; i < kParts; ++i) {
    v.part[i] = read<V>(p + i * kNative);
  }
  return v;
}

inline void write(float* p, const F& v) {
  for (int i = 0; i < kParts; ++i) {
    std::memcpy(p + i * kNative, &v.part[i], sizeof(V));
  }
}

// kNative unsigned numbers as 32-bit ones, by name: gcc 12 converts loaded codes one by one. The
// masked forms do the same as the plain ones, whose undefined operand gcc warns of.
inline I widen(const uint8_t* p) {
#if defined(__AVX512F__)
  return (I)_mm512_maskz_cvtepu8_epi32(0xffff, read<__m128i>(p));
#elif defined(__AVX2__)
  return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#elif defined(__SSE2__)
  const __m128i zero = {};
  return (I)_mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(read<int>(p)), zero), zero);
#else
  return __builtin_convertvector(read<U8>(p), I);
#endif
}

inline I widen(const uint16_t* p) {
#if defined(__AVX512F__)
  return (I)_mm512_maskz_cvtepu16_epi32(0xffff, read<__m256i>(p));
#elif defined(__AVX2__)
  return (I)_mm256_cvtepu16_epi32(read<__m128i>(p));
#elif defined(__SSE2__)
  return (I)_mm_unpacklo_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), __m128i{});
#else
  return __builtin_convertvector(read<U16>(p), I);
#endif
}

inline F splat(float x) {
  F v;
  for (V& part : v.part) {
    part = V{} + x;
  }
  return v;
}

inline F times(const F& a, float b) {
  F v;
  for (int i = 0; i < kParts; ++i) {
    v.part[i] = a.part[i] * b;
  }
  return v;
}

inline void add_product(F& sum, const F& a, const F& b) {
  for (int i = 0; i < kParts; ++i) {
    sum.part[i] += a.part[i] * b.part[i];
  }
}

inline void add_product(F& sum, const F& a, float b) {
  for (int i = 0; i < kParts; ++i) {
    sum.part[i] += a.part[i] * b;
  }
}

inline V half_to_float(U bits) {
  // Shift the exponent into place and rescale, which is exact for denormals too.
  V magnitude = (V)((bits & 0x7fffu) << 13) * 0x1p112f;
  U special = (U)((bits & 0x7c00u) == 0x7c00u);
  U m = ((U)magnitude & ~special) | ((((bits & 0x7fffu) << 13) | 0x7f800000u) & special);
  return (V)(m | ((bits & 0x8000u) << 16));
}

template <Type T>
inline F load16(const void* p, int64_t i) {
  if constexpr (T == Type::fp32) {
    return read16(static_cast<const float*>(p) + i);
  } else {
    F v;
    for (V& part : v.part) {
      const U bits = (U)widen(static_cast<const uint16_t*>(p) + i);
      part = T == Type::bf16 ? (V)(bits << 16) : half_to_float(bits);
      i += kNative;
    }
    return v;
  }
}

inline float sum(const F& v) {
  float a[kLanes];
  write(a, v);
  for (int step = kLanes / 2; step > 0; step /= 2) {
    for (int i = 0; i < step; ++i) {
      a[i] += a[i + step];
    }
  }
  return a[0];
}

// Four codes of 6 bits lie in three bytes. Each lane gets the three with all but its own code
// masked out: the code times a power of 64, which the scale takes out again, exactly.
#define LILY_FOUR_TIMES(...) {__VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__}
constexpr uint32_t kOwnCode[kLanes] = LILY_FOUR_TIMES(63, 63 << 6, 63 << 12, 63 << 18);
constexpr float kPowers[kLanes] = LILY_FOUR_TIMES(1, 0x1p-6f, 0x1p-12f, 0x1p-18f);

// Codes 16 j + kNative i and on of the 32 in 24 bytes.
inline I spread_six(const uint8_t* c, int j, int i) {
  U three;
#if defined(__AVX2__)
  // Of 16 bytes from 8 j on, so that nothing past the 24 is read.
  alignas(64) uint8_t from[4 * kNative];
  for (int b = 0; b < 4 * kNative; ++b) {
    from[b] = b % 4 == 3 ? 0x80 : 4 * j + (i * kNative + b / 4) / 4 * 3 + b % 4;
  }
  const __m128i bytes = read<__m128i>(c + 8 * j);
#if defined(__AVX512F__)
  three = (U)_mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(0xffff, bytes), read<__m512i>(from));
#else
  three = (U)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), read<__m256i>(from));
#endif
#else
  const uint8_t* p = c + 12 * j + i * kNative / 4 * 3;
  three = U{} + (p[0] | uint32_t{p[1]} << 8 | uint32_t{p[2]} << 16);
#endif
  return (I)(three & read<U>(kOwnCode));
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
    F s = splat(element<T>(scales, group));
    if constexpr (Bits == 6) {
      for (V& part : s.part) {
        part *= read<V>(kPowers);
      }
    }
    return s;
  }
  F bias(int group) const {
    return splat(element<T>(biases, group));
  }
  // Two vectors, v and v + 1, v even.
  void pair(int v, const F& s, const F& b, F out[2]) const {
    for (int i = 0; i < kParts; ++i) {
      const uint8_t* two = codes + v * kLanes * Bits / 8;
      const uint8_t* c = two + i * kNative;  // where codes are whole bytes or halves
      I both[2];
      if constexpr (Bits == 4) {
        const I bytes = widen(c);
        both[0] = bytes & 15;
        both[1] = bytes >> 4;
      } else if constexpr (Bits == 6) {
        both[0] = spread_six(two, 0, i);
        both[1] = spread_six(two, 1, i);
      } else {
        both[0] = widen(c);
        both[1] = widen(c + kLanes);
      }
      for (int j = 0; j < 2; ++j) {
        out[j].part[i] = __builtin_convertvector(both[j], V) * s.part[i] + b.part[i];
      }
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
  void pair(int v, const F&, const F&, F out[2]) const {
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
          add_product(acc[r][t], w[0], read16(xt));
          add_product(acc[r][t], w[1], read16(xt + kLanes));
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
      wv[r] = read16(w + int64_t(r) * cols + k);
    }
    for (int t = 0; t < M; ++t) {
      F xv = read16(x + int64_t(t) * cols + k);
      for (int r = 0; r < N; ++r) {
        add_product(acc[r][t], wv[r], xv);
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
    } else if (m.bits == 6) {
      body.template operator()<6, T>();
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
      F s = times(read16(row + i * kLanes), gate);
      write(row + i * kLanes, s);
      add_product(memory, s, read16(k + i * kLanes));
    }
    const float change = (v[d] - sum(memory)) * beta;
    F out = {};
    for (int i = 0; i < n; ++i) {
      F s = read16(row + i * kLanes);
      add_product(s, read16(k + i * kLanes), change);
      write(row + i * kLanes, s);
      add_product(out, s, read16(q + i * kLanes));
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
          add_product(acc[r], kv, read16(q + int64_t(h + r) * D + i));
        }
      }
      for (int r = 0; r < 4; ++r) {
        s[(h + r) * lds + j] = sum(acc[r]);
      }
    }
    for (; h < heads; ++h) {
      F acc = {};
      for (int i = 0; i < D; i += kLanes) {
        add_product(acc, load16<T>(key, i), read16(q + int64_t(h) * D + i));
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
      acc[h] = times(read16(o + int64_t(h) * D + i), scale[h]);
    }
    for (int j = 0; j < count; ++j) {
      F v = load16<T>(values, j * value_stride + i);
      for (int h = 0; h < H; ++h) {
        add_product(acc[h], v, p[h * ldp + j]);
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
