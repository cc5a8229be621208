// Type traits, numeric limits, vec<T, N>, array<T, N>, as_type, vector construction.
namespace metal {
template <class _T, _T v>
struct integral_constant {
  static constexpr constant _T value = v;
  typedef _T value_type;
  typedef integral_constant type;
  constexpr operator _T() const {
    return v;
  }
};
template <bool _B>
using bool_constant = integral_constant<bool, _B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <bool _B, class _T = void>
struct enable_if {};
template <class _T>
struct enable_if<true, _T> {
  typedef _T type;
};
template <bool _B, class _T = void>
using enable_if_t = typename enable_if<_B, _T>::type;
template <bool _B, class _T, class _U>
struct conditional {
  typedef _T type;
};
template <class _T, class _U>
struct conditional<false, _T, _U> {
  typedef _U type;
};
template <bool _B, class _T, class _U>
using conditional_t = typename conditional<_B, _T, _U>::type;

template <class _T>
struct remove_const {
  typedef _T type;
};
template <class _T>
struct remove_const<const _T> {
  typedef _T type;
};
template <class _T>
using remove_const_t = typename remove_const<_T>::type;
template <class _T>
struct remove_volatile {
  typedef _T type;
};
template <class _T>
struct remove_volatile<volatile _T> {
  typedef _T type;
};
template <class _T>
using remove_volatile_t = typename remove_volatile<_T>::type;
template <class _T>
struct remove_cv {
  typedef remove_volatile_t<remove_const_t<_T>> type;
};
template <class _T>
using remove_cv_t = typename remove_cv<_T>::type;
template <class _T>
struct remove_reference {
  typedef _T type;
};
template <class _T>
struct remove_reference<_T&> {
  typedef _T type;
};
template <class _T>
struct remove_reference<_T&&> {
  typedef _T type;
};
template <class _T>
using remove_reference_t = typename remove_reference<_T>::type;
template <class _T>
struct remove_pointer {
  typedef _T type;
};
template <class _T>
struct remove_pointer<_T*> {
  typedef _T type;
};
template <class _T>
using remove_pointer_t = typename remove_pointer<_T>::type;
// A space can be taken off a pointer's target only.
template <class _P>
struct __no_space {
  typedef _P type;
};
template <class _T>
struct __no_space<_T*> {
  typedef _T type;
};
template <class _T>
struct __no_space<device _T*> {
  typedef _T type;
};
template <class _T>
struct __no_space<constant _T*> {
  typedef _T type;
};
template <class _T>
struct __no_space<threadgroup _T*> {
  typedef _T type;
};
template <class _T>
struct remove_addrspace {
  typedef typename __no_space<_T*>::type type;
};
template <class _T>
using remove_addrspace_t = typename remove_addrspace<_T>::type;
template <class _T>
struct decay {
  typedef remove_cv_t<remove_addrspace_t<remove_reference_t<_T>>> type;
};
template <class _T>
using decay_t = typename decay<_T>::type;
template <class _T>
struct make_unsigned {
  typedef __make_unsigned(_T) type;
};
template <class _T>
using make_unsigned_t = typename make_unsigned<_T>::type;
template <class _T>
struct make_signed {
  typedef __make_signed(_T) type;
};
template <class _T>
using make_signed_t = typename make_signed<_T>::type;
template <class _T>
remove_reference_t<_T>&& declval();

template <class _T, class _U>
struct is_same : false_type {};
template <class _T>
struct is_same<_T, _T> : true_type {};
template <class _T, class _U>
constexpr constant bool is_same_v = is_same<_T, _U>::value;
template <class _T>
struct __is_integer : false_type {};
#define __MSL_INTEGER(_T) \
  template <>             \
  struct __is_integer<_T> : true_type {};
__MSL_INTEGER(bool)
__MSL_INTEGER(char) __MSL_INTEGER(signed char) __MSL_INTEGER(unsigned char) __MSL_INTEGER(short)
    __MSL_INTEGER(unsigned short) __MSL_INTEGER(int) __MSL_INTEGER(unsigned) __MSL_INTEGER(long)
        __MSL_INTEGER(unsigned long) __MSL_INTEGER(long long) __MSL_INTEGER(unsigned long long)
#undef __MSL_INTEGER
#define __MSL_TRAIT(name, condition)         \
  template <class _T>                        \
  struct name : bool_constant<condition> {}; \
  template <class _T>                        \
  constexpr constant bool name##_v = name<_T>::value;
            template <class _T>
            struct __is_pointer : false_type{};
template <class _T>
struct __is_pointer<_T*> : true_type{};
__MSL_TRAIT(is_integral, __is_integer<remove_cv_t<_T>>::value)
__MSL_TRAIT(is_floating_point,
            (is_same_v<remove_cv_t<_T>, float> || is_same_v<remove_cv_t<_T>, half> ||
             is_same_v<remove_cv_t<_T>, bfloat>))
__MSL_TRAIT(is_arithmetic, is_integral_v<_T> || is_floating_point_v<_T>)
__MSL_TRAIT(is_signed, __is_signed(_T) || is_floating_point_v<_T>)
__MSL_TRAIT(is_unsigned, __is_unsigned(_T))
__MSL_TRAIT(is_pointer, __is_pointer<remove_cv_t<_T>>::value)
__MSL_TRAIT(is_enum, __is_enum(_T))
__MSL_TRAIT(is_trivially_copyable, __is_trivially_copyable(_T))
#undef __MSL_TRAIT
template <class _T>
struct is_const : false_type {};
template <class _T>
struct is_const<const _T> : true_type {};
template <class _T>
constexpr constant bool is_const_v = is_const<_T>::value;
template <class _F, class _T>
struct is_convertible : bool_constant<__is_convertible_to(_F, _T)> {};
template <class _F, class _T>
constexpr constant bool is_convertible_v = is_convertible<_F, _T>::value;

// ---- vectors
template <class _T, int _N>
using vec = _T __attribute__((ext_vector_type(_N)));
template <class _T>
struct __vector {
  typedef _T element;
  enum { size = 0 };
};
template <class _T, int _N>
struct __vector<_T __attribute__((ext_vector_type(_N)))> {
  typedef _T element;
  enum { size = _N };
};
template <class _V, class _A>
__MSL void __append(_V& result, int& at, _A value) {
  typedef typename __vector<_V>::element _E;
  if constexpr (__vector<_A>::size == 0)
    result[at++] = (_E)value;
  else
    for (int i = 0; i < __vector<_A>::size; i++)
      result[at++] = (_E)value[i];
}
}  // namespace metal

template <class _V, class... _A>
inline __attribute__((always_inline)) constexpr _V __msl_make(_A... a) {
  typedef typename metal::__vector<_V>::element _E;
  constexpr int count = (0 + ... + (metal::__vector<_A>::size ? metal::__vector<_A>::size : 1));
  constexpr bool one_scalar = sizeof...(_A) == 1 && ((metal::__vector<_A>::size == 0) && ...);
  static_assert(sizeof...(_A) == 0 || one_scalar || count == metal::__vector<_V>::size,
                "vector constructor: wrong number of components");
  if constexpr (sizeof...(_A) == 0)
    return _V(_E(0));
  else if constexpr (one_scalar)
    return _V((_E)(a, ...));
  else if constexpr (sizeof...(_A) == 1)
    return __builtin_convertvector((a, ...), _V);
  else if constexpr (((metal::__vector<_A>::size == 0) && ...))
    return _V{(_E)a...};
  else {
    _V result = _V(_E(0));
    int at = 0;
    (metal::__append(result, at, a), ...);
    return result;
  }
}

namespace metal {
using ::__msl_make;

template <class _T, size_t _N>
struct array {
  _T __elements[_N];
  constexpr _T& operator[](size_t i) {
    return __elements[i];
  }
  constexpr const _T& operator[](size_t i) const {
    return __elements[i];
  }
  constexpr size_t size() const {
    return _N;
  }
};
template <class _T>
using uniform = _T;
template <class _T>
__MSL constexpr _T make_uniform(_T x) {
  return x;
}

template <class _T, class _U>
__MSL constexpr _T as_type(_U x) {
  static_assert(sizeof(_T) == sizeof(_U), "as_type needs types of one size");
  return __builtin_bit_cast(_T, x);
}

// ---- limits
template <class _T>
struct numeric_limits;
#define __MSL_LIMITS(_T, MAX, MIN)                                            \
  template <>                                                                 \
  struct numeric_limits<_T> {                                                 \
    static constexpr _T max() {                                               \
      return MAX;                                                             \
    }                                                                         \
    static constexpr _T min() {                                               \
      return MIN;                                                             \
    }                                                                         \
    static constexpr _T lowest() {                                            \
      return MIN;                                                             \
    }                                                                         \
    static constexpr constant bool is_signed = _T(-1) < _T(0);                \
    static constexpr constant bool is_integer = true;                         \
    static constexpr constant int digits = sizeof(_T) * 8 - (_T(-1) < _T(0)); \
  };
__MSL_LIMITS(bool, true, false)
__MSL_LIMITS(char, 127, -128)
__MSL_LIMITS(int8_t, 127, -128)
__MSL_LIMITS(uchar, 255, 0)
__MSL_LIMITS(short, 32767, -32768)
__MSL_LIMITS(ushort, 65535, 0)
__MSL_LIMITS(int, INT_MAX, INT_MIN)
__MSL_LIMITS(uint, UINT_MAX, 0)
__MSL_LIMITS(long, LONG_MAX, -LONG_MAX - 1)
__MSL_LIMITS(ulong, ULONG_MAX, 0)
#undef __MSL_LIMITS
#define __MSL_LIMITS(_T, MAX, MIN, EPSILON, DIGITS)    \
  template <>                                          \
  struct numeric_limits<_T> {                          \
    static constexpr _T max() {                        \
      return (_T)MAX;                                  \
    }                                                  \
    static constexpr _T min() {                        \
      return (_T)MIN;                                  \
    }                                                  \
    static constexpr _T lowest() {                     \
      return (_T) - MAX;                               \
    }                                                  \
    static constexpr _T epsilon() {                    \
      return (_T)EPSILON;                              \
    }                                                  \
    static constexpr _T infinity() {                   \
      return (_T)__builtin_inff();                     \
    }                                                  \
    static constexpr _T quiet_NaN() {                  \
      return (_T)__builtin_nanf("");                   \
    }                                                  \
    static constexpr constant bool is_signed = true;   \
    static constexpr constant bool is_integer = false; \
    static constexpr constant int digits = DIGITS;     \
  };
__MSL_LIMITS(float, FLT_MAX, FLT_MIN, FLT_EPSILON, 24)
__MSL_LIMITS(half, 65504.0f, 6.103515625e-05f, 0.0009765625f, 11)
__MSL_LIMITS(bfloat, 3.38953138925e+38f, FLT_MIN, 0.0078125f, 8)
#undef __MSL_LIMITS
}  // namespace metal
using metal::as_type;
