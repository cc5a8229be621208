// Math. Both modes, precise:: and fast::, are the C library's functions on a CPU; on a GPU fast::exp,
// fast::log and the like take the approximate instructions.
#if defined(__NVPTX__)
#define __LIBM(f) __nv_##f
#else
#define __LIBM(f) f
#endif
extern "C" {
float __LIBM(expf)(float); float __LIBM(exp2f)(float); float __LIBM(exp10f)(float);
float __LIBM(logf)(float); float __LIBM(log2f)(float); float __LIBM(log10f)(float);
float __LIBM(sinf)(float); float __LIBM(cosf)(float); float __LIBM(tanf)(float);
float __LIBM(sinhf)(float); float __LIBM(coshf)(float); float __LIBM(tanhf)(float);
float __LIBM(asinf)(float); float __LIBM(acosf)(float); float __LIBM(atanf)(float);
float __LIBM(asinhf)(float); float __LIBM(acoshf)(float); float __LIBM(atanhf)(float);
float __LIBM(powf)(float, float); float __LIBM(atan2f)(float, float);
float __LIBM(fmodf)(float, float); float __LIBM(nextafterf)(float, float);
float __LIBM(ldexpf)(float, int); float __LIBM(frexpf)(float, int*);
#if defined(__NVPTX__)
float __nv_rsqrtf(float); float __nv_fast_expf(float); float __nv_fast_logf(float);
float __nv_fast_log2f(float); float __nv_fast_sinf(float); float __nv_fast_cosf(float);
#endif
}

namespace metal {
#define __MSL_ONE(name, expression) \
  __MSL float __metal_##name(float x, int = 0) { return expression; }
#define __MSL_TWO(name, expression) \
  __MSL float __metal_##name(float x, float y, int = 0) { return expression; }
__MSL_ONE(exp, __LIBM(expf)(x)) __MSL_ONE(exp2, __LIBM(exp2f)(x)) __MSL_ONE(exp10, __LIBM(exp10f)(x))
__MSL_ONE(log, __LIBM(logf)(x)) __MSL_ONE(log2, __LIBM(log2f)(x)) __MSL_ONE(log10, __LIBM(log10f)(x))
__MSL_ONE(sin, __LIBM(sinf)(x)) __MSL_ONE(cos, __LIBM(cosf)(x)) __MSL_ONE(tan, __LIBM(tanf)(x))
__MSL_ONE(sinh, __LIBM(sinhf)(x)) __MSL_ONE(cosh, __LIBM(coshf)(x)) __MSL_ONE(tanh, __LIBM(tanhf)(x))
__MSL_ONE(asin, __LIBM(asinf)(x)) __MSL_ONE(acos, __LIBM(acosf)(x)) __MSL_ONE(atan, __LIBM(atanf)(x))
__MSL_ONE(asinh, __LIBM(asinhf)(x)) __MSL_ONE(acosh, __LIBM(acoshf)(x))
__MSL_ONE(atanh, __LIBM(atanhf)(x))
__MSL_ONE(sinpi, __LIBM(sinf)(x * M_PI_F)) __MSL_ONE(cospi, __LIBM(cosf)(x * M_PI_F))
__MSL_ONE(tanpi, __LIBM(tanf)(x * M_PI_F))
__MSL_ONE(sqrt, __builtin_sqrtf(x))
#if defined(__NVPTX__)
__MSL_ONE(rsqrt, __nv_rsqrtf(x))
#else
__MSL_ONE(rsqrt, 1.0f / __builtin_sqrtf(x))
#endif
__MSL_ONE(fabs, __builtin_fabsf(x)) __MSL_ONE(floor, __builtin_floorf(x))
__MSL_ONE(ceil, __builtin_ceilf(x)) __MSL_ONE(trunc, __builtin_truncf(x))
__MSL_ONE(rint, __builtin_rintf(x)) __MSL_ONE(round, __builtin_roundf(x))
__MSL_ONE(fract, __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f))
__MSL_TWO(pow, __LIBM(powf)(x, y)) __MSL_TWO(powr, __LIBM(powf)(x, y))
__MSL_TWO(atan2, __LIBM(atan2f)(x, y)) __MSL_TWO(fmod, __LIBM(fmodf)(x, y))
__MSL_TWO(fmin, __builtin_fminf(x, y)) __MSL_TWO(fmax, __builtin_fmaxf(x, y))
__MSL_TWO(divide, x / y) __MSL_TWO(nextafter, __LIBM(nextafterf)(x, y))
__MSL_TWO(copysign, __builtin_copysignf(x, y)) __MSL_TWO(fdim, x > y ? x - y : 0.0f)
#undef __MSL_ONE
#undef __MSL_TWO
__MSL float __metal_fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
__MSL float __metal_fmin3(float x, float y, float z, int = 0) {
  return __builtin_fminf(__builtin_fminf(x, y), z);
}
__MSL float __metal_fmax3(float x, float y, float z, int = 0) {
  return __builtin_fmaxf(__builtin_fmaxf(x, y), z);
}
__MSL float __metal_fmedian3(float x, float y, float z, int = 0) {
  return __builtin_fmaxf(__builtin_fminf(x, y), __builtin_fminf(__builtin_fmaxf(x, y), z));
}
__MSL float __metal_ldexp(float x, int k, int = 0) { return __LIBM(ldexpf)(x, k); }
__MSL float __metal_frexp(float x, int* e, int = 0) { return __LIBM(frexpf)(x, e); }

// Public overloads: float, half, their vectors, and integers converted to float.
#define __MSL_ONE(name, base)                                                          \
  __MSL float name(float x) { return base(x); }                                        \
  __MSL half name(half x) { return (half)base((float)x); }                             \
  template <int N> __MSL vec<float, N> name(vec<float, N> x) {                         \
    vec<float, N> r;                                                                   \
    for (int i = 0; i < N; i++) r[i] = base(x[i]);                                     \
    return r;                                                                          \
  }                                                                                    \
  template <int N> __MSL vec<half, N> name(vec<half, N> x) {                           \
    vec<half, N> r;                                                                    \
    for (int i = 0; i < N; i++) r[i] = (half)base((float)x[i]);                        \
    return r;                                                                          \
  }                                                                                    \
  template <class T> __MSL enable_if_t<is_integral_v<T>, float> name(T x) { return base((float)x); }
#define __MSL_TWO(name, base)                                                          \
  __MSL float name(float x, float y) { return base(x, y); }                            \
  __MSL half name(half x, half y) { return (half)base((float)x, (float)y); }           \
  template <int N> __MSL vec<float, N> name(vec<float, N> x, vec<float, N> y) {        \
    vec<float, N> r;                                                                   \
    for (int i = 0; i < N; i++) r[i] = base(x[i], y[i]);                               \
    return r;                                                                          \
  }                                                                                    \
  template <int N> __MSL vec<half, N> name(vec<half, N> x, vec<half, N> y) {           \
    vec<half, N> r;                                                                    \
    for (int i = 0; i < N; i++) r[i] = (half)base((float)x[i], (float)y[i]);           \
    return r;                                                                          \
  }
#define __MSL_ONE_(name) __MSL_ONE(name, __metal_##name)
#define __MSL_TWO_(name) __MSL_TWO(name, __metal_##name)
// Those whose fast:: form differs on a GPU come second.
#define __MSL_MATH                                                                     \
  __MSL_ONE_(exp10) __MSL_ONE_(log10) __MSL_ONE_(tan) __MSL_ONE_(sinh) __MSL_ONE_(cosh) \
  __MSL_ONE_(tanh) __MSL_ONE_(asin) __MSL_ONE_(acos) __MSL_ONE_(atan) __MSL_ONE_(asinh) \
  __MSL_ONE_(acosh) __MSL_ONE_(atanh) __MSL_ONE_(sinpi) __MSL_ONE_(cospi) __MSL_ONE_(tanpi) \
  __MSL_ONE_(sqrt) __MSL_ONE_(rsqrt) __MSL_ONE_(fabs) __MSL_ONE_(floor) __MSL_ONE_(ceil) \
  __MSL_ONE_(trunc) __MSL_ONE_(rint) __MSL_ONE_(round) __MSL_ONE_(fract) __MSL_TWO_(pow) \
  __MSL_TWO_(powr) __MSL_TWO_(atan2) __MSL_TWO_(fmod) __MSL_TWO_(fmin) __MSL_TWO_(fmax) \
  __MSL_TWO_(divide) __MSL_TWO_(nextafter) __MSL_TWO_(copysign) __MSL_TWO_(fdim)
#define __MSL_APPROXIMATED \
  __MSL_ONE_(exp) __MSL_ONE_(exp2) __MSL_ONE_(log) __MSL_ONE_(log2) __MSL_ONE_(sin) __MSL_ONE_(cos)
__MSL_MATH __MSL_APPROXIMATED
__MSL float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
__MSL half fma(half x, half y, half z) { return (half)__builtin_fmaf(x, y, z); }
template <int N> __MSL vec<float, N> fma(vec<float, N> x, vec<float, N> y, vec<float, N> z) {
  vec<float, N> r;
  for (int i = 0; i < N; i++) r[i] = __builtin_fmaf(x[i], y[i], z[i]);
  return r;
}
__MSL float ldexp(float x, int k) { return __metal_ldexp(x, k); }
__MSL float frexp(float x, int& e) { return __metal_frexp(x, &e); }
__MSL float modf(float x, float& whole) { whole = __builtin_truncf(x); return x - whole; }
__MSL float sincos(float x, float& c) { c = __metal_cos(x); return __metal_sin(x); }
__MSL float fmin3(float x, float y, float z) { return __metal_fmin3(x, y, z); }
__MSL float fmax3(float x, float y, float z) { return __metal_fmax3(x, y, z); }
__MSL float fmedian3(float x, float y, float z) { return __metal_fmedian3(x, y, z); }
namespace precise { __MSL_MATH __MSL_APPROXIMATED using metal::fma; using metal::sincos; }
namespace fast {
__MSL_MATH
#if defined(__NVPTX__)
__MSL float __exp2(float x) { return __nvvm_ex2_approx_f(x); }
__MSL_ONE(exp, __nv_fast_expf) __MSL_ONE(exp2, __exp2) __MSL_ONE(log, __nv_fast_logf)
__MSL_ONE(log2, __nv_fast_log2f) __MSL_ONE(sin, __nv_fast_sinf) __MSL_ONE(cos, __nv_fast_cosf)
#else
__MSL_APPROXIMATED
#endif
using metal::fma; using metal::sincos;
}  // namespace fast
#undef __MSL_ONE
#undef __MSL_TWO
#undef __MSL_ONE_
#undef __MSL_TWO_
#undef __MSL_MATH
#undef __MSL_APPROXIMATED

#define __MSL_CLASSIFY(name, expression)                                                 \
  __MSL bool name(float x) { return expression; }                                        \
  __MSL bool name(half h) { float x = h; return expression; }                            \
  __MSL bool name(bfloat b) { float x = b; return expression; }                          \
  template <class T> __MSL enable_if_t<is_integral_v<T>, bool> name(T i) {               \
    float x = i;                                                                         \
    return expression;                                                                   \
  }                                                                                      \
  template <class T, int N> __MSL vec<uchar, N> name(vec<T, N> v) {                      \
    vec<uchar, N> r;                                                                     \
    for (int i = 0; i < N; i++) { float x = (float)v[i]; r[i] = expression; }            \
    return r;                                                                            \
  }
__MSL_CLASSIFY(isnan, __builtin_isnan(x))
__MSL_CLASSIFY(isinf, __builtin_isinf(x))
__MSL_CLASSIFY(isfinite, __builtin_isfinite(x))
__MSL_CLASSIFY(isnormal, __builtin_isnormal(x))
__MSL_CLASSIFY(signbit, __builtin_signbit(x))
#undef __MSL_CLASSIFY

// ---- min, max, clamp and what follows from them
template <class T> constexpr constant bool __ordered =
    is_integral_v<T> || is_same_v<T, float> || is_same_v<T, half>;
template <class T> __MSL enable_if_t<is_integral_v<T>, T> abs(T x) {
  if constexpr (__is_signed(T)) return x < 0 ? T(-x) : x;
  else return x;
}
__MSL float abs(float x) { return __builtin_fabsf(x); }
__MSL half abs(half x) { return (half)__builtin_fabsf((float)x); }
template <class T, int N> __MSL vec<T, N> abs(vec<T, N> x) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = abs((T)x[i]);
  return r;
}
template <class T> __MSL enable_if_t<is_integral_v<T>, T> absdiff(T a, T b) { return a > b ? a - b : b - a; }
template <class T> __MSL constexpr enable_if_t<is_integral_v<T>, T> min(T a, T b) { return b < a ? b : a; }
template <class T> __MSL constexpr enable_if_t<is_integral_v<T>, T> max(T a, T b) { return a < b ? b : a; }
__MSL float min(float a, float b) { return __builtin_fminf(a, b); }
__MSL float max(float a, float b) { return __builtin_fmaxf(a, b); }
__MSL half min(half a, half b) { return (half)__builtin_fminf(a, b); }
__MSL half max(half a, half b) { return (half)__builtin_fmaxf(a, b); }
#define __MSL_MIXED(name)                                                                        \
  template <class A, class B>                                                                    \
  __MSL constexpr enable_if_t<is_integral_v<A> && is_integral_v<B> && !is_same_v<A, B>,          \
                              decltype(A() + B())> name(A a, B b) {                              \
    typedef decltype(A() + B()) R;                                                               \
    return name((R)a, (R)b);                                                                     \
  }                                                                                              \
  template <class T, int N> __MSL vec<T, N> name(vec<T, N> a, vec<T, N> b) {                     \
    vec<T, N> r;                                                                                 \
    for (int i = 0; i < N; i++) r[i] = name((T)a[i], (T)b[i]);                                   \
    return r;                                                                                    \
  }
__MSL_MIXED(min)
__MSL_MIXED(max)
#undef __MSL_MIXED
template <class T> __MSL enable_if_t<__ordered<T>, T> min3(T a, T b, T c) { return min(min(a, b), c); }
template <class T> __MSL enable_if_t<__ordered<T>, T> max3(T a, T b, T c) { return max(max(a, b), c); }
template <class T> __MSL enable_if_t<__ordered<T>, T> median3(T a, T b, T c) {
  return max(min(a, b), min(max(a, b), c));
}
template <class T> __MSL enable_if_t<__ordered<T>, T> clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
template <class T, int N> __MSL vec<T, N> clamp(vec<T, N> x, vec<T, N> low, vec<T, N> high) {
  return min(max(x, low), high);
}
template <class T, int N> __MSL vec<T, N> clamp(vec<T, N> x, T low, T high) {
  return min(max(x, vec<T, N>(low)), vec<T, N>(high));
}
__MSL float saturate(float x) { return clamp(x, 0.0f, 1.0f); }
__MSL half saturate(half x) { return clamp(x, (half)0.0f, (half)1.0f); }
__MSL float mix(float a, float b, float t) { return a + (b - a) * t; }
__MSL float step(float edge, float x) { return x < edge ? 0.0f : 1.0f; }
__MSL float smoothstep(float low, float high, float x) {
  float t = saturate((x - low) / (high - low));
  return t * t * (3.0f - 2.0f * t);
}
__MSL float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f; }

// ---- relational
template <class T> __MSL enable_if_t<is_arithmetic_v<T>, T> select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N, class C>
__MSL vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<C, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = c[i] ? b[i] : a[i];
  return r;
}
template <class T, int N> __MSL enable_if_t<is_integral_v<T>, bool> all(vec<T, N> v) {
  bool r = true;
  for (int i = 0; i < N; i++) r = r && v[i];
  return r;
}
template <class T, int N> __MSL enable_if_t<is_integral_v<T>, bool> any(vec<T, N> v) {
  bool r = false;
  for (int i = 0; i < N; i++) r = r || v[i];
  return r;
}

// ---- geometric
template <class T, int N> __MSL T dot(vec<T, N> a, vec<T, N> b) {
  T r = a[0] * b[0];
  for (int i = 1; i < N; i++) r += a[i] * b[i];
  return r;
}
template <int N> __MSL float length_squared(vec<float, N> a) { return dot(a, a); }
template <int N> __MSL float length(vec<float, N> a) { return __builtin_sqrtf(dot(a, a)); }
template <int N> __MSL float distance(vec<float, N> a, vec<float, N> b) { return length(a - b); }
template <int N> __MSL vec<float, N> normalize(vec<float, N> a) { return a * __metal_rsqrt(dot(a, a)); }

// ---- integers
template <class T> __MSL enable_if_t<is_integral_v<T>, T> popcount(T x) {
  return (T)__builtin_popcountl((ulong)(make_unsigned_t<T>)x);
}
template <class T> __MSL enable_if_t<is_integral_v<T>, T> clz(T x) {
  return x ? (T)(__builtin_clzl((ulong)(make_unsigned_t<T>)x) - (64 - 8 * (int)sizeof(T))) : (T)(8 * sizeof(T));
}
template <class T> __MSL enable_if_t<is_integral_v<T>, T> ctz(T x) {
  return x ? (T)__builtin_ctzl((ulong)(make_unsigned_t<T>)x) : (T)(8 * sizeof(T));
}
template <class T> __MSL enable_if_t<is_integral_v<T>, T> reverse_bits(T x) {
  return (T)(__builtin_bitreverse64((ulong)(make_unsigned_t<T>)x) >> (64 - 8 * sizeof(T)));
}
template <class T> __MSL enable_if_t<is_integral_v<T>, T> rotate(T x, T n) {
  typedef make_unsigned_t<T> U;
  constexpr uint bits = 8 * sizeof(T);
  uint k = (uint)n & (bits - 1);
  return k ? (T)(((U)x << k) | ((U)x >> (bits - k))) : x;
}
template <class T> __MSL enable_if_t<is_integral_v<T>, T> extract_bits(T x, uint offset, uint bits) {
  if (bits == 0) return 0;
  T up = (T)((make_unsigned_t<T>)x << (8 * sizeof(T) - offset - bits));
  return (T)(up >> (8 * sizeof(T) - bits));
}
template <class T>
__MSL enable_if_t<is_integral_v<T>, T> insert_bits(T base, T insert, uint offset, uint bits) {
  typedef make_unsigned_t<T> U;
  U mask = (bits >= 8 * sizeof(T) ? ~U(0) : (U)((U(1) << bits) - 1)) << offset;
  return (T)(((U)base & ~mask) | (((U)insert << offset) & mask));
}
__MSL uint mulhi(uint a, uint b) { return (uint)(((ulong)a * b) >> 32); }
__MSL int mulhi(int a, int b) { return (int)(((long)a * b) >> 32); }
__MSL int mul24(int a, int b) { return ((a << 8) >> 8) * ((b << 8) >> 8); }
__MSL uint mul24(uint a, uint b) { return (a & 0xffffffu) * (b & 0xffffffu); }
template <class T> __MSL enable_if_t<is_integral_v<T>, T> addsat(T a, T b) {
  T r;
  if (!__builtin_add_overflow(a, b, &r)) return r;
  return b < T(0) ? numeric_limits<T>::min() : numeric_limits<T>::max();
}
template <class T> __MSL enable_if_t<is_integral_v<T>, T> subsat(T a, T b) {
  T r;
  if (!__builtin_sub_overflow(a, b, &r)) return r;
  return b < T(0) || !__is_signed(T) ? (__is_signed(T) ? numeric_limits<T>::max() : T(0))
                                     : numeric_limits<T>::min();
}

// ---- packing
__MSL float4 unpack_unorm4x8_to_float(uint x) {
  return float4{(float)(x & 255u), (float)((x >> 8) & 255u), (float)((x >> 16) & 255u),
                (float)(x >> 24)} / 255.0f;
}
}  // namespace metal
