// Math. Both modes, precise:: and fast::, are the C library's functions on a CPU; on a GPU
// fast::exp, fast::log and the like take the approximate instructions.
#if defined(__NVPTX__)
#define __LIBM(f) __nv_##f
#else
#define __LIBM(f) f
#endif
extern "C" {
float __LIBM(expf)(float);
float __LIBM(exp2f)(float);
float __LIBM(exp10f)(float);
float __LIBM(logf)(float);
float __LIBM(log2f)(float);
float __LIBM(log10f)(float);
float __LIBM(sinf)(float);
float __LIBM(cosf)(float);
float __LIBM(tanf)(float);
float __LIBM(sinhf)(float);
float __LIBM(coshf)(float);
float __LIBM(tanhf)(float);
float __LIBM(asinf)(float);
float __LIBM(acosf)(float);
float __LIBM(atanf)(float);
float __LIBM(asinhf)(float);
float __LIBM(acoshf)(float);
float __LIBM(atanhf)(float);
float __LIBM(powf)(float, float);
float __LIBM(atan2f)(float, float);
float __LIBM(fmodf)(float, float);
float __LIBM(nextafterf)(float, float);
float __LIBM(ldexpf)(float, int);
float __LIBM(frexpf)(float, int*);
#if defined(__NVPTX__)
float __nv_rsqrtf(float);
float __nv_fast_expf(float);
float __nv_fast_logf(float);
float __nv_fast_log2f(float);
float __nv_fast_sinf(float);
float __nv_fast_cosf(float);
#endif
}

namespace metal {
#define __MSL_ONE(name, expression)              \
  __MSL float __metal_##name(float x, int = 0) { \
    return expression;                           \
  }
#define __MSL_TWO(name, expression)                       \
  __MSL float __metal_##name(float x, float y, int = 0) { \
    return expression;                                    \
  }
__MSL_ONE(exp, __LIBM(expf)(x))
__MSL_ONE(exp2, __LIBM(exp2f)(x)) __MSL_ONE(exp10, __LIBM(exp10f)(x)) __MSL_ONE(
    log, __LIBM(logf)(x)) __MSL_ONE(log2, __LIBM(log2f)(x)) __MSL_ONE(log10, __LIBM(log10f)(x))
    __MSL_ONE(sin, __LIBM(sinf)(x)) __MSL_ONE(cos, __LIBM(cosf)(x)) __MSL_ONE(tan, __LIBM(tanf)(x))
        __MSL_ONE(sinh, __LIBM(sinhf)(x)) __MSL_ONE(cosh, __LIBM(coshf)(x)) __MSL_ONE(
            tanh, __LIBM(tanhf)(x)) __MSL_ONE(asin, __LIBM(asinf)(x)) __MSL_ONE(acos,
                                                                                __LIBM(acosf)(x))
            __MSL_ONE(atan, __LIBM(atanf)(x)) __MSL_ONE(asinh, __LIBM(asinhf)(x))
                __MSL_ONE(acosh, __LIBM(acoshf)(x)) __MSL_ONE(atanh, __LIBM(atanhf)(x)) __MSL_ONE(
                    sinpi, __LIBM(sinf)(x* M_PI_F)) __MSL_ONE(cospi, __LIBM(cosf)(x* M_PI_F))
                    __MSL_ONE(tanpi, __LIBM(tanf)(x* M_PI_F)) __MSL_ONE(sqrt, __builtin_sqrtf(x))
#if defined(__NVPTX__)
                        __MSL_ONE(rsqrt, __nv_rsqrtf(x))
#else
                        __MSL_ONE(rsqrt, 1.0f / __builtin_sqrtf(x))
#endif
                            __MSL_ONE(fabs,
                                      __builtin_fabsf(x)) __MSL_ONE(floor, __builtin_floorf(x))
                                __MSL_ONE(ceil,
                                          __builtin_ceilf(x)) __MSL_ONE(trunc, __builtin_truncf(x))
                                    __MSL_ONE(rint, __builtin_rintf(x))
                                        __MSL_ONE(round, __builtin_roundf(x)) __MSL_ONE(
                                            fract, __builtin_fminf(x - __builtin_floorf(x),
                                                                   0x1.fffffep-1f))
                                            __MSL_TWO(pow, __LIBM(powf)(x, y))
                                                __MSL_TWO(powr, __LIBM(powf)(x, y)) __MSL_TWO(
                                                    atan2, __LIBM(atan2f)(x, y))
                                                    __MSL_TWO(fmod, __LIBM(fmodf)(x, y)) __MSL_TWO(
                                                        fmin, __builtin_fminf(x, y))
                                                        __MSL_TWO(fmax, __builtin_fmaxf(x, y))
                                                            __MSL_TWO(divide, x / y) __MSL_TWO(
                                                                nextafter, __LIBM(nextafterf)(x, y))
                                                                __MSL_TWO(copysign,
                                                                          __builtin_copysignf(x, y))
                                                                    __MSL_TWO(fdim,
                                                                              x > y ? x - y : 0.0f)
#undef __MSL_ONE
#undef __MSL_TWO
                                                                        __MSL
    float __metal_fma(float x, float y, float z) {
  return __builtin_fmaf(x, y, z);
}
__MSL float __metal_fmin3(float x, float y, float z, int = 0) {
  return __builtin_fminf(__builtin_fminf(x, y), z);
}
__MSL float __metal_fmax3(float x, float y, float z, int = 0) {
  return __builtin_fmaxf(__builtin_fmaxf(x, y), z);
}
__MSL float __metal_fmedian3(float x, float y, float z, int = 0) {
  return __builtin_fmaxf(__builtin_fminf(x, y), __builtin_fminf(__builtin_fmaxf(x, y), z));
}
__MSL float __metal_ldexp(float x, int k, int = 0) {
  return __LIBM(ldexpf)(x, k);
}
__MSL float __metal_frexp(float x, int* e, int = 0) {
  return __LIBM(frexpf)(x, e);
}

// Public overloads: float, half, their vectors, and integers converted to float.
#define __MSL_ONE(name, base)                              \
  __MSL float name(float x) {                              \
    return base(x);                                        \
  }                                                        \
  __MSL half name(half x) {                                \
    return (half)base((float)x);                           \
  }                                                        \
  template <int _N>                                        \
  __MSL vec<float, _N> name(vec<float, _N> x) {            \
    vec<float, _N> r;                                      \
    for (int i = 0; i < _N; i++)                           \
      r[i] = base(x[i]);                                   \
    return r;                                              \
  }                                                        \
  template <int _N>                                        \
  __MSL vec<half, _N> name(vec<half, _N> x) {              \
    vec<half, _N> r;                                       \
    for (int i = 0; i < _N; i++)                           \
      r[i] = (half)base((float)x[i]);                      \
    return r;                                              \
  }                                                        \
  template <class _T>                                      \
  __MSL enable_if_t<is_integral_v<_T>, float> name(_T x) { \
    return base((float)x);                                 \
  }
#define __MSL_TWO(name, base)                                     \
  __MSL float name(float x, float y) {                            \
    return base(x, y);                                            \
  }                                                               \
  __MSL half name(half x, half y) {                               \
    return (half)base((float)x, (float)y);                        \
  }                                                               \
  template <int _N>                                               \
  __MSL vec<float, _N> name(vec<float, _N> x, vec<float, _N> y) { \
    vec<float, _N> r;                                             \
    for (int i = 0; i < _N; i++)                                  \
      r[i] = base(x[i], y[i]);                                    \
    return r;                                                     \
  }                                                               \
  template <int _N>                                               \
  __MSL vec<half, _N> name(vec<half, _N> x, vec<half, _N> y) {    \
    vec<half, _N> r;                                              \
    for (int i = 0; i < _N; i++)                                  \
      r[i] = (half)base((float)x[i], (float)y[i]);                \
    return r;                                                     \
  }
#define __MSL_ONE_(name) __MSL_ONE(name, __metal_##name)
#define __MSL_TWO_(name) __MSL_TWO(name, __metal_##name)
// Those whose fast:: form differs on a GPU come second.
#define __MSL_MATH                                                                                 \
  __MSL_ONE_(exp10)                                                                                \
  __MSL_ONE_(log10) __MSL_ONE_(tan) __MSL_ONE_(sinh) __MSL_ONE_(cosh) __MSL_ONE_(tanh)             \
      __MSL_ONE_(asin) __MSL_ONE_(acos) __MSL_ONE_(atan) __MSL_ONE_(asinh) __MSL_ONE_(acosh)       \
          __MSL_ONE_(atanh) __MSL_ONE_(sinpi) __MSL_ONE_(cospi) __MSL_ONE_(tanpi) __MSL_ONE_(sqrt) \
              __MSL_ONE_(rsqrt) __MSL_ONE_(fabs) __MSL_ONE_(floor) __MSL_ONE_(ceil)                \
                  __MSL_ONE_(trunc) __MSL_ONE_(rint) __MSL_ONE_(round) __MSL_ONE_(fract)           \
                      __MSL_TWO_(pow) __MSL_TWO_(powr) __MSL_TWO_(atan2) __MSL_TWO_(fmod)          \
                          __MSL_TWO_(fmin) __MSL_TWO_(fmax) __MSL_TWO_(divide)                     \
                              __MSL_TWO_(nextafter) __MSL_TWO_(copysign) __MSL_TWO_(fdim)
#define __MSL_APPROXIMATED \
  __MSL_ONE_(exp) __MSL_ONE_(exp2) __MSL_ONE_(log) __MSL_ONE_(log2) __MSL_ONE_(sin) __MSL_ONE_(cos)
__MSL_MATH __MSL_APPROXIMATED __MSL float fma(float x, float y, float z) {
  return __builtin_fmaf(x, y, z);
}
__MSL half fma(half x, half y, half z) {
  return (half)__builtin_fmaf(x, y, z);
}
template <int _N>
__MSL vec<float, _N> fma(vec<float, _N> x, vec<float, _N> y, vec<float, _N> z) {
  vec<float, _N> r;
  for (int i = 0; i < _N; i++)
    r[i] = __builtin_fmaf(x[i], y[i], z[i]);
  return r;
}
__MSL float ldexp(float x, int k) {
  return __metal_ldexp(x, k);
}
__MSL float frexp(float x, int& e) {
  return __metal_frexp(x, &e);
}
__MSL float modf(float x, float& whole) {
  whole = __builtin_truncf(x);
  return x - whole;
}
__MSL float sincos(float x, float& c) {
  c = __metal_cos(x);
  return __metal_sin(x);
}
__MSL float fmin3(float x, float y, float z) {
  return __metal_fmin3(x, y, z);
}
__MSL float fmax3(float x, float y, float z) {
  return __metal_fmax3(x, y, z);
}
__MSL float fmedian3(float x, float y, float z) {
  return __metal_fmedian3(x, y, z);
}
namespace precise {
__MSL_MATH __MSL_APPROXIMATED using metal::fma;
using metal::sincos;
}  // namespace precise
namespace fast {
__MSL_MATH
#if defined(__NVPTX__)
__MSL float __exp2(float x) {
  return __nvvm_ex2_approx_f(x);
}
__MSL_ONE(exp, __nv_fast_expf)
__MSL_ONE(exp2, __exp2) __MSL_ONE(log, __nv_fast_logf) __MSL_ONE(log2, __nv_fast_log2f)
    __MSL_ONE(sin, __nv_fast_sinf) __MSL_ONE(cos, __nv_fast_cosf)
#else
__MSL_APPROXIMATED
#endif
        using metal::fma;
using metal::sincos;
}  // namespace fast
#undef __MSL_ONE
#undef __MSL_TWO
#undef __MSL_ONE_
#undef __MSL_TWO_
#undef __MSL_MATH
#undef __MSL_APPROXIMATED

#define __MSL_CLASSIFY(name, expression)                  \
  __MSL bool name(float x) {                              \
    return expression;                                    \
  }                                                       \
  __MSL bool name(half h) {                               \
    float x = h;                                          \
    return expression;                                    \
  }                                                       \
  __MSL bool name(bfloat b) {                             \
    float x = b;                                          \
    return expression;                                    \
  }                                                       \
  template <class _T>                                     \
  __MSL enable_if_t<is_integral_v<_T>, bool> name(_T i) { \
    float x = i;                                          \
    return expression;                                    \
  }                                                       \
  template <class _T, int _N>                             \
  __MSL vec<uchar, _N> name(vec<_T, _N> v) {              \
    vec<uchar, _N> r;                                     \
    for (int i = 0; i < _N; i++) {                        \
      float x = (float)v[i];                              \
      r[i] = expression;                                  \
    }                                                     \
    return r;                                             \
  }
__MSL_CLASSIFY(isnan, __builtin_isnan(x))
__MSL_CLASSIFY(isinf, __builtin_isinf(x))
__MSL_CLASSIFY(isfinite, __builtin_isfinite(x))
__MSL_CLASSIFY(isnormal, __builtin_isnormal(x))
__MSL_CLASSIFY(signbit, __builtin_signbit(x))
#undef __MSL_CLASSIFY

// ---- min, max, clamp and what follows from them
template <class _T>
constexpr constant bool __ordered =
    is_integral_v<_T> || is_same_v<_T, float> || is_same_v<_T, half>;
template <class _T>
__MSL enable_if_t<is_integral_v<_T>, _T> abs(_T x) {
  if constexpr (__is_signed(_T))
    return x < 0 ? _T(-x) : x;
  else
    return x;
}
__MSL float abs(float x) {
  return __builtin_fabsf(x);
}
__MSL half abs(half x) {
  return (half)__builtin_fabsf((float)x);
}
template <class _T, int _N>
__MSL vec<_T, _N> abs(vec<_T, _N> x) {
  vec<_T, _N> r;
  for (int i = 0; i < _N; i++)
    r[i] = abs((_T)x[i]);
  return r;
}
template <class _T>
__MSL enable_if_t<is_integral_v<_T>, _T> absdiff(_T a, _T b) {
  return a > b ? a - b : b - a;
}
template <class _T>
__MSL constexpr enable_if_t<is_integral_v<_T>, _T> min(_T a, _T b) {
  return b < a ? b : a;
}
template <class _T>
__MSL constexpr enable_if_t<is_integral_v<_T>, _T> max(_T a, _T b) {
  return a < b ? b : a;
}
__MSL float min(float a, float b) {
  return __builtin_fminf(a, b);
}
__MSL float max(float a, float b) {
  return __builtin_fmaxf(a, b);
}
__MSL half min(half a, half b) {
  return (half)__builtin_fminf(a, b);
}
__MSL half max(half a, half b) {
  return (half)__builtin_fmaxf(a, b);
}
// Metal has an overload for each type, so arguments of two types are ambiguous.
#define __MSL_MIXED(name)                                                                   \
  template <class _A, class _B>                                                             \
  __MSL constexpr enable_if_t<__ordered<_A> && __ordered<_B> && !is_same_v<_A, _B>, _A>     \
  name(_A, _B) = delete;                                                                    \
  template <class _T, int _N>                                                               \
  __MSL vec<_T, _N> name(vec<_T, _N> a, vec<_T, _N> b) {                                    \
    vec<_T, _N> r;                                                                          \
    for (int i = 0; i < _N; i++)                                                            \
      r[i] = name((_T)a[i], (_T)b[i]);                                                      \
    return r;                                                                               \
  }
__MSL_MIXED(min)
__MSL_MIXED(max)
#undef __MSL_MIXED
template <class _T>
__MSL enable_if_t<__ordered<_T>, _T> min3(_T a, _T b, _T c) {
  return min(min(a, b), c);
}
template <class _T>
__MSL enable_if_t<__ordered<_T>, _T> max3(_T a, _T b, _T c) {
  return max(max(a, b), c);
}
template <class _T>
__MSL enable_if_t<__ordered<_T>, _T> median3(_T a, _T b, _T c) {
  return max(min(a, b), min(max(a, b), c));
}
template <class _T>
__MSL enable_if_t<__ordered<_T>, _T> clamp(_T x, _T low, _T high) {
  return min(max(x, low), high);
}
template <class _T, int _N>
__MSL vec<_T, _N> clamp(vec<_T, _N> x, vec<_T, _N> low, vec<_T, _N> high) {
  return min(max(x, low), high);
}
template <class _T, int _N>
__MSL vec<_T, _N> clamp(vec<_T, _N> x, _T low, _T high) {
  return min(max(x, vec<_T, _N>(low)), vec<_T, _N>(high));
}
__MSL float saturate(float x) {
  return clamp(x, 0.0f, 1.0f);
}
__MSL half saturate(half x) {
  return clamp(x, (half)0.0f, (half)1.0f);
}
__MSL float mix(float a, float b, float t) {
  return a + (b - a) * t;
}
__MSL float step(float edge, float x) {
  return x < edge ? 0.0f : 1.0f;
}
__MSL float smoothstep(float low, float high, float x) {
  float t = saturate((x - low) / (high - low));
  return t * t * (3.0f - 2.0f * t);
}
__MSL float sign(float x) {
  return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f;
}

// ---- relational
template <class _T>
__MSL enable_if_t<is_arithmetic_v<_T>, _T> select(_T a, _T b, bool c) {
  return c ? b : a;
}
template <class _T, int _N, class _C>
__MSL vec<_T, _N> select(vec<_T, _N> a, vec<_T, _N> b, vec<_C, _N> c) {
  vec<_T, _N> r;
  for (int i = 0; i < _N; i++)
    r[i] = c[i] ? b[i] : a[i];
  return r;
}
template <class _T, int _N>
__MSL enable_if_t<is_integral_v<_T>, bool> all(vec<_T, _N> v) {
  bool r = true;
  for (int i = 0; i < _N; i++)
    r = r && v[i];
  return r;
}
template <class _T, int _N>
__MSL enable_if_t<is_integral_v<_T>, bool> any(vec<_T, _N> v) {
  bool r = false;
  for (int i = 0; i < _N; i++)
    r = r || v[i];
  return r;
}

// ---- geometric
template <class _T, int _N>
__MSL _T dot(vec<_T, _N> a, vec<_T, _N> b) {
  _T r = a[0] * b[0];
  for (int i = 1; i < _N; i++)
    r += a[i] * b[i];
  return r;
}
template <int _N>
__MSL float length_squared(vec<float, _N> a) {
  return dot(a, a);
}
template <int _N>
__MSL float length(vec<float, _N> a) {
  return __builtin_sqrtf(dot(a, a));
}
template <int _N>
__MSL float distance(vec<float, _N> a, vec<float, _N> b) {
  return length(a - b);
}
template <int _N>
__MSL vec<float, _N> normalize(vec<float, _N> a) {
  return a * __metal_rsqrt(dot(a, a));
}

// ---- integers
template <class _T>
__MSL enable_if_t<is_integral_v<_T>, _T> popcount(_T x) {
  return (_T)__builtin_popcountl((ulong)(make_unsigned_t<_T>)x);
}
template <class _T>
__MSL enable_if_t<is_integral_v<_T>, _T> clz(_T x) {
  return x ? (_T)(__builtin_clzl((ulong)(make_unsigned_t<_T>)x) - (64 - 8 * (int)sizeof(_T)))
           : (_T)(8 * sizeof(_T));
}
template <class _T>
__MSL enable_if_t<is_integral_v<_T>, _T> ctz(_T x) {
  return x ? (_T)__builtin_ctzl((ulong)(make_unsigned_t<_T>)x) : (_T)(8 * sizeof(_T));
}
template <class _T>
__MSL enable_if_t<is_integral_v<_T>, _T> reverse_bits(_T x) {
  return (_T)(__builtin_bitreverse64((ulong)(make_unsigned_t<_T>)x) >> (64 - 8 * sizeof(_T)));
}
template <class _T>
__MSL enable_if_t<is_integral_v<_T>, _T> rotate(_T x, _T n) {
  typedef make_unsigned_t<_T> _U;
  constexpr uint bits = 8 * sizeof(_T);
  uint k = (uint)n & (bits - 1);
  return k ? (_T)(((_U)x << k) | ((_U)x >> (bits - k))) : x;
}
template <class _T>
__MSL enable_if_t<is_integral_v<_T>, _T> extract_bits(_T x, uint offset, uint bits) {
  if (bits == 0)
    return 0;
  _T up = (_T)((make_unsigned_t<_T>)x << (8 * sizeof(_T) - offset - bits));
  return (_T)(up >> (8 * sizeof(_T) - bits));
}
template <class _T>
__MSL enable_if_t<is_integral_v<_T>, _T> insert_bits(_T base, _T insert, uint offset, uint bits) {
  typedef make_unsigned_t<_T> _U;
  _U mask = (bits >= 8 * sizeof(_T) ? ~_U(0) : (_U)((_U(1) << bits) - 1)) << offset;
  return (_T)(((_U)base & ~mask) | (((_U)insert << offset) & mask));
}
__MSL uint mulhi(uint a, uint b) {
  return (uint)(((ulong)a * b) >> 32);
}
__MSL int mulhi(int a, int b) {
  return (int)(((long)a * b) >> 32);
}
__MSL int mul24(int a, int b) {
  return ((a << 8) >> 8) * ((b << 8) >> 8);
}
__MSL uint mul24(uint a, uint b) {
  return (a & 0xffffffu) * (b & 0xffffffu);
}
template <class _T>
__MSL enable_if_t<is_integral_v<_T>, _T> addsat(_T a, _T b) {
  _T r;
  if (!__builtin_add_overflow(a, b, &r))
    return r;
  return b < _T(0) ? numeric_limits<_T>::min() : numeric_limits<_T>::max();
}
template <class _T>
__MSL enable_if_t<is_integral_v<_T>, _T> subsat(_T a, _T b) {
  _T r;
  if (!__builtin_sub_overflow(a, b, &r))
    return r;
  return b < _T(0) || !__is_signed(_T) ? (__is_signed(_T) ? numeric_limits<_T>::max() : _T(0))
                                       : numeric_limits<_T>::min();
}

// ---- packing
__MSL float4 unpack_unorm4x8_to_float(uint x) {
  return float4{(float)(x & 255u), (float)((x >> 8) & 255u), (float)((x >> 16) & 255u),
                (float)(x >> 24)} /
         255.0f;
}
}  // namespace metal
