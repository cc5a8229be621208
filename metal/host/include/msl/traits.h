// Type traits, numeric limits, vec<T, N>, array<T, N>, as_type, vector construction.
namespace metal {
template <class T, T v> struct integral_constant {
  static constexpr constant T value = v;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return v; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;

template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { typedef T type; };
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class U> struct conditional { typedef T type; };
template <class T, class U> struct conditional<false, T, U> { typedef U type; };
template <bool B, class T, class U> using conditional_t = typename conditional<B, T, U>::type;

template <class T> struct remove_const { typedef T type; };
template <class T> struct remove_const<const T> { typedef T type; };
template <class T> using remove_const_t = typename remove_const<T>::type;
template <class T> struct remove_volatile { typedef T type; };
template <class T> struct remove_volatile<volatile T> { typedef T type; };
template <class T> using remove_volatile_t = typename remove_volatile<T>::type;
template <class T> struct remove_cv { typedef remove_volatile_t<remove_const_t<T>> type; };
template <class T> using remove_cv_t = typename remove_cv<T>::type;
template <class T> struct remove_reference { typedef T type; };
template <class T> struct remove_reference<T&> { typedef T type; };
template <class T> struct remove_reference<T&&> { typedef T type; };
template <class T> using remove_reference_t = typename remove_reference<T>::type;
template <class T> struct remove_pointer { typedef T type; };
template <class T> struct remove_pointer<T*> { typedef T type; };
template <class T> using remove_pointer_t = typename remove_pointer<T>::type;
// A space can be taken off a pointer's target only.
template <class P> struct __no_space { typedef P type; };
template <class T> struct __no_space<T*> { typedef T type; };
template <class T> struct __no_space<device T*> { typedef T type; };
template <class T> struct __no_space<constant T*> { typedef T type; };
template <class T> struct __no_space<threadgroup T*> { typedef T type; };
template <class T> struct remove_addrspace { typedef typename __no_space<T*>::type type; };
template <class T> using remove_addrspace_t = typename remove_addrspace<T>::type;
template <class T> struct decay {
  typedef remove_cv_t<remove_addrspace_t<remove_reference_t<T>>> type;
};
template <class T> using decay_t = typename decay<T>::type;
template <class T> struct make_unsigned { typedef __make_unsigned(T) type; };
template <class T> using make_unsigned_t = typename make_unsigned<T>::type;
template <class T> struct make_signed { typedef __make_signed(T) type; };
template <class T> using make_signed_t = typename make_signed<T>::type;
template <class T> remove_reference_t<T>&& declval();

template <class T, class U> struct is_same : false_type {};
template <class T> struct is_same<T, T> : true_type {};
template <class T, class U> constexpr constant bool is_same_v = is_same<T, U>::value;
template <class T> struct __is_integer : false_type {};
#define __MSL_INTEGER(T) template <> struct __is_integer<T> : true_type {};
__MSL_INTEGER(bool) __MSL_INTEGER(char) __MSL_INTEGER(signed char) __MSL_INTEGER(unsigned char)
__MSL_INTEGER(short) __MSL_INTEGER(unsigned short) __MSL_INTEGER(int) __MSL_INTEGER(unsigned)
__MSL_INTEGER(long) __MSL_INTEGER(unsigned long) __MSL_INTEGER(long long)
__MSL_INTEGER(unsigned long long)
#undef __MSL_INTEGER
#define __MSL_TRAIT(name, condition)                             \
  template <class T> struct name : bool_constant<condition> {};  \
  template <class T> constexpr constant bool name##_v = name<T>::value;
template <class T> struct __is_pointer : false_type {};
template <class T> struct __is_pointer<T*> : true_type {};
__MSL_TRAIT(is_integral, __is_integer<remove_cv_t<T>>::value)
__MSL_TRAIT(is_floating_point, (is_same_v<remove_cv_t<T>, float> || is_same_v<remove_cv_t<T>, half> ||
                                is_same_v<remove_cv_t<T>, bfloat>))
__MSL_TRAIT(is_arithmetic, is_integral_v<T> || is_floating_point_v<T>)
__MSL_TRAIT(is_signed, __is_signed(T) || is_floating_point_v<T>)
__MSL_TRAIT(is_unsigned, __is_unsigned(T))
__MSL_TRAIT(is_pointer, __is_pointer<remove_cv_t<T>>::value)
__MSL_TRAIT(is_enum, __is_enum(T))
__MSL_TRAIT(is_trivially_copyable, __is_trivially_copyable(T))
#undef __MSL_TRAIT
template <class T> struct is_const : false_type {};
template <class T> struct is_const<const T> : true_type {};
template <class T> constexpr constant bool is_const_v = is_const<T>::value;
template <class F, class T> struct is_convertible : bool_constant<__is_convertible_to(F, T)> {};
template <class F, class T> constexpr constant bool is_convertible_v = is_convertible<F, T>::value;

// ---- vectors
template <class T, int N> using vec = T __attribute__((ext_vector_type(N)));
template <class T> struct __vector { typedef T element; enum { size = 0 }; };
template <class T, int N> struct __vector<T __attribute__((ext_vector_type(N)))> {
  typedef T element;
  enum { size = N };
};
template <class V, class A> __MSL void __append(V& result, int& at, A value) {
  typedef typename __vector<V>::element E;
  if constexpr (__vector<A>::size == 0)
    result[at++] = (E)value;
  else
    for (int i = 0; i < __vector<A>::size; i++) result[at++] = (E)value[i];
}
}  // namespace metal

template <class V, class... A> inline __attribute__((always_inline)) constexpr V __msl_make(A... a) {
  typedef typename metal::__vector<V>::element E;
  constexpr int count = (0 + ... + (metal::__vector<A>::size ? metal::__vector<A>::size : 1));
  constexpr bool one_scalar = sizeof...(A) == 1 && ((metal::__vector<A>::size == 0) && ...);
  static_assert(sizeof...(A) == 0 || one_scalar || count == metal::__vector<V>::size,
                "vector constructor: wrong number of components");
  if constexpr (sizeof...(A) == 0) return V(E(0));
  else if constexpr (one_scalar) return V((E)(a, ...));
  else if constexpr (sizeof...(A) == 1) return __builtin_convertvector((a, ...), V);
  else if constexpr (((metal::__vector<A>::size == 0) && ...)) return V{(E)a...};
  else {
    V result = V(E(0));
    int at = 0;
    (metal::__append(result, at, a), ...);
    return result;
  }
}

namespace metal {
using ::__msl_make;

template <class T, size_t N> struct array {
  T __elements[N];
  constexpr T& operator[](size_t i) { return __elements[i]; }
  constexpr const T& operator[](size_t i) const { return __elements[i]; }
  constexpr size_t size() const { return N; }
};
template <class T> using uniform = T;
template <class T> __MSL constexpr T make_uniform(T x) { return x; }

template <class T, class U> __MSL constexpr T as_type(U x) {
  static_assert(sizeof(T) == sizeof(U), "as_type needs types of one size");
  return __builtin_bit_cast(T, x);
}

// ---- limits
template <class T> struct numeric_limits;
#define __MSL_LIMITS(T, MAX, MIN)                                                   \
  template <> struct numeric_limits<T> {                                            \
    static constexpr T max() { return MAX; }                                        \
    static constexpr T min() { return MIN; }                                        \
    static constexpr T lowest() { return MIN; }                                     \
    static constexpr constant bool is_signed = T(-1) < T(0);                        \
    static constexpr constant bool is_integer = true;                               \
    static constexpr constant int digits = sizeof(T) * 8 - (T(-1) < T(0));          \
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
#define __MSL_LIMITS(T, MAX, MIN, EPSILON, DIGITS)                                  \
  template <> struct numeric_limits<T> {                                            \
    static constexpr T max() { return (T)MAX; }                                     \
    static constexpr T min() { return (T)MIN; }                                     \
    static constexpr T lowest() { return (T)-MAX; }                                 \
    static constexpr T epsilon() { return (T)EPSILON; }                             \
    static constexpr T infinity() { return (T)__builtin_inff(); }                   \
    static constexpr T quiet_NaN() { return (T)__builtin_nanf(""); }                \
    static constexpr constant bool is_signed = true;                                \
    static constexpr constant bool is_integer = false;                              \
    static constexpr constant int digits = DIGITS;                                  \
  };
__MSL_LIMITS(float, FLT_MAX, FLT_MIN, FLT_EPSILON, 24)
__MSL_LIMITS(half, 65504.0f, 6.103515625e-05f, 0.0009765625f, 11)
__MSL_LIMITS(bfloat, 3.38953138925e+38f, FLT_MIN, 0.0078125f, 8)
#undef __MSL_LIMITS
}  // namespace metal
using metal::as_type;
