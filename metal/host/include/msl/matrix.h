// simdgroup_matrix: 8x8, two elements a lane, in the lane layout that MLX's kernels rely on.
namespace metal {
template <class _T, int _Rows, int _Cols>
struct simdgroup_matrix {
  static_assert(_Rows == 8 && _Cols == 8, "simdgroup_matrix is 8x8");
  static_assert(is_floating_point_v<_T>, "simdgroup_matrix holds float, half or bfloat");
  vec<_T, 2> __elements;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(_T diagonal) {
    uint row = __row(), col = __col();
    __elements = vec<_T, 2>{row == col ? diagonal : _T(0), row == col + 1 ? diagonal : _T(0)};
  }
  vec<_T, 2>& thread_elements() {
    return __elements;
  }
  static uint __row() {
    uint l = __lane();
    return ((l >> 2) & 4) | ((l >> 1) & 3);
  }
  static uint __col() {
    uint l = __lane();
    return ((l >> 1) & 4) | ((l & 1) << 1);
  }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

// The lane that holds element (row, col).
__MSL uint __matrix_lane(uint row, uint col) {
  return ((row & 4) << 2) | ((row & 3) << 1) | ((col & 4) << 1) | ((col >> 1) & 1);
}

template <class _D, class _A, class _B, class _C>
__MSL void simdgroup_multiply_accumulate(simdgroup_matrix<_D, 8, 8>& d,
                                         simdgroup_matrix<_A, 8, 8> a, simdgroup_matrix<_B, 8, 8> b,
                                         simdgroup_matrix<_C, 8, 8> c) {
  uint row = d.__row(), col = d.__col();
  float s0 = (float)__initialised(c.__elements[0]), s1 = (float)__initialised(c.__elements[1]);
  float2 mine =
      float2{(float)__initialised(a.__elements[0]), (float)__initialised(a.__elements[1])};
  float2 other =
      float2{(float)__initialised(b.__elements[0]), (float)__initialised(b.__elements[1])};
#if defined(__NVPTX__)
#pragma clang loop unroll(full)
  for (uint k = 0; k < 8; k++) {
    float x = __shuffle(k & 1 ? mine[1] : mine[0], __matrix_lane(row, k));
    uint lane = __matrix_lane(k, col);
    s0 += x * __shuffle(other[0], lane);
    s1 += x * __shuffle(other[1], lane);
  }
#else
  __exchanged* x = __msl_exchange(__bits(mine), nullptr);
  float left[8];
  for (uint k = 0; k < 8; k += 2) {
    float2 pair = __from_bits<float2>(x->value[__matrix_lane(row, k)]);
    left[k] = pair[0];
    left[k + 1] = pair[1];
  }
  x = __msl_exchange(__bits(other), nullptr);
  for (uint k = 0; k < 8; k++) {
    float2 pair = __from_bits<float2>(x->value[__matrix_lane(k, col)]);
    s0 += left[k] * pair[0];
    s1 += left[k] * pair[1];
  }
#endif
  d.__elements = vec<_D, 2>{(_D)s0, (_D)s1};
}
template <class _D, class _A, class _B>
__MSL void simdgroup_multiply(simdgroup_matrix<_D, 8, 8>& d, simdgroup_matrix<_A, 8, 8> a,
                              simdgroup_matrix<_B, 8, 8> b) {
  simdgroup_matrix<float, 8, 8> zero;
  zero.__elements = float2{0.0f, 0.0f};
  simdgroup_multiply_accumulate(d, a, b, zero);
}
template <class _T, int _R, int _C = _R>
__MSL simdgroup_matrix<_T, _R, _C> make_filled_simdgroup_matrix(_T v) {
  simdgroup_matrix<_T, _R, _C> m;
  m.__elements = vec<_T, 2>{v, v};
  return m;
}
#define __MSL_MATRIX_MEMORY(space)                                                                 \
  template <class _T>                                                                              \
  __MSL void simdgroup_load(simdgroup_matrix<_T, 8, 8>& m, const space _T* p, ulong stride = 8,    \
                            ulong2 origin = ulong2{0, 0}, bool transpose = false) {                \
    uint row = m.__row(), col = m.__col();                                                         \
    p += origin.y * stride + origin.x;                                                             \
    ulong at = transpose ? col * stride + row : row * stride + col, step = transpose ? stride : 1; \
    m.__elements = vec<_T, 2>{p[at], p[at + step]};                                                \
  }                                                                                                \
  template <class _T>                                                                              \
  __MSL void simdgroup_store(simdgroup_matrix<_T, 8, 8> m, space _T* p, ulong stride = 8,          \
                             ulong2 origin = ulong2{0, 0}, bool transpose = false) {               \
    uint row = m.__row(), col = m.__col();                                                         \
    p += origin.y * stride + origin.x;                                                             \
    ulong at = transpose ? col * stride + row : row * stride + col, step = transpose ? stride : 1; \
    p[at] = m.__elements[0];                                                                       \
    p[at + step] = m.__elements[1];                                                                \
  }
__MSL_MATRIX_MEMORY(device)
__MSL_MATRIX_MEMORY(threadgroup)
#undef __MSL_MATRIX_MEMORY

// Logging is accepted and dropped.
struct os_log {
  constexpr os_log(constant char*, constant char*) constant {}
  template <class... _A>
  void log_debug(constant char*, _A...) const {}
  template <class... _A>
  void log_debug(constant char*, _A...) const constant {}
};
}  // namespace metal
