// Stand-in for Metal 4's matmul2d on register (cooperative) tensors of one simdgroup, in the lane
// layout that MLX's NAX kernels rely on: 16x16 fragments, 8 elements a lane; element i of lane l is
// at row (l>>2 & 4 | l>>1 & 3) + 8 * (i / 4), column 4 * (l>>2 & 2 | l & 1) + i % 4.
#pragma once
#pragma clang system_header
#if !defined(__METAL_VERSION__) || __METAL_VERSION__ < 400
#error "tensor operations need Metal 4: metal=\"4.0\", or --metal 4.0 on the command line"
#endif
#include <metal_stdlib>

namespace metal {
struct execution_simdgroup {};
template <int _N>
struct execution_simdgroups {};
struct tensor_inline {};
struct tensor_handle {};
constexpr constant int dynamic_extent = -1;
template <class _I, int _Rank>
struct dextents {
  _I __extents[_Rank];
  template <class... _A>
  dextents(_A... a) : __extents{(_I)a...} {}
  _I extent(int i) const {
    return __extents[i];
  }
};
}  // namespace metal

namespace mpp {
namespace tensor_ops {
struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int m, int n, int k = metal::dynamic_extent,
                                bool transpose_left = false, bool transpose_right = false,
                                bool relaxed_precision = false, mode matmul_mode = mode::multiply)
      : m(m),
        n(n),
        k(k),
        transpose_left(transpose_left),
        transpose_right(transpose_right),
        relaxed_precision(relaxed_precision),
        matmul_mode(matmul_mode) {}
};

// A matrix spread over the lanes of one simdgroup.
template <class _T, int _Rows, int _Cols>
struct __tile {
  static_assert(_Rows % 16 == 0 && _Cols % 16 == 0, "matmul2d here works on multiples of 16");
  static constexpr constant int __capacity = _Rows * _Cols / 32;
  typedef _T element_type;
  _T __elements[__capacity];
  _T& operator[](int i) {
    return __elements[__inside(i)];
  }
  const _T& operator[](int i) const {
    return __elements[__inside(i)];
  }
  // Nothing has written it; off the checked host it is zero.
  static __tile __fresh() {
#if defined(__MSL_CHECKED)
    __tile t;
    return t;
#else
    return {};
#endif
  }
  static int __inside(int i) {
#if defined(__MSL_CHECKED)
    if (i < 0 || i >= __capacity)
      return metal::__msl_index(i, __capacity, sizeof(_T), nullptr);
#endif
    return i;
  }
  static constexpr ushort get_capacity() {
    return __capacity;
  }
  static int __row(int lane, int i) {
    return i / 8 / (_Cols / 16) * 16 + (((lane >> 2) & 4) | ((lane >> 1) & 3)) + (i % 8 >> 2) * 8;
  }
  static int __col(int lane, int i) {
    return i / 8 % (_Cols / 16) * 16 + (((lane >> 2) & 2) | (lane & 1)) * 4 + i % 4;
  }
  static int __owner(int row, int col) {
    return ((row >> 2) & 1) << 4 | ((col >> 3) & 1) << 3 | (row & 3) << 1 | ((col >> 2) & 1);
  }
  static int __index(int row, int col) {
    return (row / 16 * (_Cols / 16) + col / 16) * 8 + ((row >> 3) & 1) * 4 + (col & 3);
  }
  metal::array<int, 2> get_multidimensional_index(int i) const {
    int lane = metal::__lane();
    return {{__col(lane, i), __row(lane, i)}};
  }
};

template <matmul2d_descriptor _D, class _Scope>
struct matmul2d {
  static_assert(metal::is_same_v<_Scope, metal::execution_simdgroup>,
                "matmul2d here is one simdgroup's");
  static constexpr constant int __left_rows = _D.transpose_left ? _D.k : _D.m;
  static constexpr constant int __left_cols = _D.transpose_left ? _D.m : _D.k;
  static constexpr constant int __right_rows = _D.transpose_right ? _D.n : _D.k;
  static constexpr constant int __right_cols = _D.transpose_right ? _D.k : _D.n;
  template <class _T>
  using __left = __tile<_T, __left_rows, __left_cols>;
  template <class _T>
  using __right = __tile<_T, __right_rows, __right_cols>;
  template <class _T>
  using __destination = __tile<_T, _D.m, _D.n>;
  template <class _A, class _B, class _C>
  __left<_A> get_left_input_cooperative_tensor() {
    return __left<_A>::__fresh();
  }
  template <class _A, class _B, class _C>
  __right<_B> get_right_input_cooperative_tensor() {
    return __right<_B>::__fresh();
  }
  template <class _A, class _B, class _C>
  __destination<_C> get_destination_cooperative_tensor() {
    return __destination<_C>::__fresh();
  }

  template <class _A, class _B, class _C>
  void run(__left<_A>& a, __right<_B>& b, __destination<_C>& c) {
    int lane = metal::__lane();
    float sum[__destination<_C>::__capacity];
    constexpr bool fresh = _D.matmul_mode == matmul2d_descriptor::mode::multiply;
    for (int i = 0; i < __destination<_C>::__capacity; i++)
      sum[i] = fresh ? 0.0f : (float)metal::__initialised(c[i]);
#if defined(__NVPTX__)
#pragma clang loop unroll(full)
    for (int i = 0; i < __destination<_C>::__capacity; i++) {
      // The lane's own part of the position is left out of r0 and c0, so that every register index
      // is a constant; where a transpose puts that part into the index, all candidates are
      // shuffled.
      int r0 = i / 8 / (_D.n / 16) * 16 + (i % 8 >> 2) * 8, c0 = i / 8 % (_D.n / 16) * 16 + i % 4;
      int r = __destination<_C>::__row(lane, i), q = __destination<_C>::__col(lane, i);
#pragma clang loop unroll(full)
      for (int k = 0; k < _D.k; k++) {
        float x = 0.0f, y = 0.0f;
        if constexpr (!_D.transpose_left) {
          x = metal::__shuffle((float)a[__left<_A>::__index(r0, k)], __left<_A>::__owner(r, k));
        } else {
          for (int t = 0; t < 4; t++) {
            float z = metal::__shuffle((float)a[__left<_A>::__index(k, (r0 & ~3) + t)],
                                       __left<_A>::__owner(k, r));
            if ((r & 3) == t)
              x = z;
          }
        }
        if constexpr (!_D.transpose_right) {
          y = metal::__shuffle((float)b[__right<_B>::__index(k, c0)], __right<_B>::__owner(k, q));
        } else {
          for (int t = 0; t < 2; t++) {
            float z = metal::__shuffle((float)b[__right<_B>::__index((c0 & ~15) + t * 8, k)],
                                       __right<_B>::__owner(q, k));
            if (((q >> 3) & 1) == t)
              y = z;
          }
        }
        sum[i] += x * y;
      }
    }
#else
    float left[32][__left<_A>::__capacity], right[32][__right<_B>::__capacity];
    __gather(a, left);
    __gather(b, right);
    for (int i = 0; i < __destination<_C>::__capacity; i++) {
      int r = __destination<_C>::__row(lane, i), q = __destination<_C>::__col(lane, i);
      for (int k = 0; k < _D.k; k++) {
        int ar = _D.transpose_left ? k : r, ac = _D.transpose_left ? r : k;
        int br = _D.transpose_right ? q : k, bc = _D.transpose_right ? k : q;
        sum[i] += left[__left<_A>::__owner(ar, ac)][__left<_A>::__index(ar, ac)] *
                  right[__right<_B>::__owner(br, bc)][__right<_B>::__index(br, bc)];
      }
    }
#endif
    for (int i = 0; i < __destination<_C>::__capacity; i++)
      c[i] = (_C)sum[i];
  }

 private:
#if !defined(__NVPTX__)
  template <class _T, int _R, int _C, int _N>
  static void __gather(const __tile<_T, _R, _C>& tile, float (&all)[32][_N]) {
    for (int i = 0; i < _N; i += 2) {
      typedef float __pair __attribute__((ext_vector_type(2)));
      __pair mine = {(float)tile[i], (float)tile[i + 1]};
      metal::__exchanged* x = metal::__msl_exchange(metal::__bits(mine), nullptr);
      for (int lane = 0; lane < 32; lane++) {
        __pair theirs = metal::__from_bits<__pair>(x->value[lane]);
        all[lane][i] = theirs[0];
        all[lane][i + 1] = theirs[1];
      }
    }
  }
#endif
};
}  // namespace tensor_ops
}  // namespace mpp
