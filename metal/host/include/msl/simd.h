// Barriers and simdgroup operations over what a host supplies: the lane, a shuffle, a ballot, a
// reduction and two barriers.
namespace metal {
enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8
};
__MSL constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return (mem_flags)((uint)a | (uint)b);
}

// An integer as wide as a value, and back.
template <class _T>
__MSL ulong __bits(_T v) {
  if constexpr (sizeof(_T) == 8)
    return __builtin_bit_cast(ulong, v);
  else if constexpr (sizeof(_T) == 4)
    return __builtin_bit_cast(uint, v);
  else if constexpr (sizeof(_T) == 2)
    return __builtin_bit_cast(ushort, v);
  else
    return __builtin_bit_cast(uchar, v);
}
template <class _T>
__MSL _T __from_bits(ulong b) {
  if constexpr (sizeof(_T) == 8)
    return __builtin_bit_cast(_T, b);
  else if constexpr (sizeof(_T) == 4)
    return __builtin_bit_cast(_T, (uint)b);
  else if constexpr (sizeof(_T) == 2)
    return __builtin_bit_cast(_T, (ushort)b);
  else
    return __builtin_bit_cast(_T, (uchar)b);
}

#if defined(__NVPTX__)
__MSL void threadgroup_barrier(mem_flags) {
  __syncthreads();
}
__MSL void simdgroup_barrier(mem_flags) {
  __nvvm_bar_warp_sync(0xffffffffu);
}
__MSL uint __lane() {
  return __nvvm_read_ptx_sreg_laneid();
}
template <class _T>
__MSL _T __shuffle(_T v, uint lane) {
  if constexpr (sizeof(_T) <= 4) {
    return __from_bits<_T>((uint)__nvvm_shfl_sync_idx_i32(0xffffffffu, (int)__bits(v), lane, 31));
  } else {
    struct _Words {
      int w[sizeof(_T) / 4];
    } x = __builtin_bit_cast(_Words, v);
    for (uint i = 0; i < sizeof(_T) / 4; i++)
      x.w[i] = __nvvm_shfl_sync_idx_i32(0xffffffffu, x.w[i], lane, 31);
    return __builtin_bit_cast(_T, x);
  }
}
template <class _T>
__MSL _T __shuffle_xor(_T v, uint mask) {
  if constexpr (sizeof(_T) <= 4)
    return __from_bits<_T>((uint)__nvvm_shfl_sync_bfly_i32(0xffffffffu, (int)__bits(v), mask, 31));
  else
    return __shuffle(v, __lane() ^ mask);
}
struct __greater;
struct __less;
template <class _T, class _F>
__MSL _T __reduce(_T v, _F f) {
  if constexpr (is_integral_v<_T> && sizeof(_T) == 4 && is_same_v<_F, __greater>) {
    return is_signed_v<_T> ? (_T)__nvvm_redux_sync_max((int)v, 0xffffffff)
                           : (_T)__nvvm_redux_sync_umax((uint)v, 0xffffffff);
  } else if constexpr (is_integral_v<_T> && sizeof(_T) == 4 && is_same_v<_F, __less>) {
    return is_signed_v<_T> ? (_T)__nvvm_redux_sync_min((int)v, 0xffffffff)
                           : (_T)__nvvm_redux_sync_umin((uint)v, 0xffffffff);
  } else {
#pragma clang loop unroll(full)
    for (uint m = 1; m < 32; m *= 2)
      v = f(v, __shuffle_xor(v, m));
    return v;
  }
}
template <class _T, class _F>
__MSL _T __scan(_T v, _F f) {
  uint lane = __lane();
#pragma clang loop unroll(full)
  for (uint d = 1; d < 32; d *= 2) {
    _T other = __shuffle(v, lane - d);
    if (lane >= d)
      v = f(other, v);
  }
  return v;
}
__MSL ulong __ballot(bool p) {
  return (uint)__nvvm_vote_ballot_sync(0xffffffffu, p);
}
__MSL uint __first_lane() {
  return 0;
}
#else
// What one simdgroup operation exchanged: every lane's value, the lanes that took part, and the
// reduction once a lane has computed it.
struct __exchanged {
  ulong value[32];
  ulong reduced;
  uint mask, done;
};
extern "C" {
// The last argument becomes the source position, in ../frontend/trace.cpp.
void __msl_threadgroup_barrier(uint flags, const void* site) __attribute__((convergent));
void __msl_simdgroup_barrier(uint flags, const void* site) __attribute__((convergent));
__exchanged* __msl_exchange(ulong value, const void* site) __attribute__((convergent));
uint __msl_lane() __attribute__((const));
#if defined(__MSL_CHECKED)
void __msl_uninitialised(const void* site) __attribute__((convergent));
int __msl_index(int index, uint capacity, uint size, const void* site) __attribute__((convergent));
#endif
}
__MSL void threadgroup_barrier(mem_flags flags) {
  __msl_threadgroup_barrier((uint)flags, nullptr);
}
__MSL void simdgroup_barrier(mem_flags flags) {
  __msl_simdgroup_barrier((uint)flags, nullptr);
}
__MSL uint __lane() {
  return __msl_lane();
}
template <class _T>
__MSL _T __shuffle(_T v, uint lane) {
  if constexpr (sizeof(_T) <= 8) {
    return __from_bits<_T>(__msl_exchange(__bits(v), nullptr)->value[lane & 31]);
  } else {
    struct _Words {
      ulong w[sizeof(_T) / 8];
    } x = __builtin_bit_cast(_Words, v);
    for (uint i = 0; i < sizeof(_T) / 8; i++)
      x.w[i] = __msl_exchange(x.w[i], nullptr)->value[lane & 31];
    return __builtin_bit_cast(_T, x);
  }
}
template <class _T>
__MSL _T __shuffle_xor(_T v, uint mask) {
  return __shuffle(v, __lane() ^ mask);
}
// The order of an ascending butterfly (1, 2, 4, 8, 16), computed once; absent lanes are left out.
template <class _T, class _F>
__MSL _T __reduce(_T v, _F f) {
  __exchanged* x = __msl_exchange(__bits(v), nullptr);
  if (!x->done) {
    _T a[32];
    if (x->mask == 0xffffffffu) {
      for (int i = 0; i < 32; i++)
        a[i] = __from_bits<_T>(x->value[i]);
      for (int n = 16; n; n /= 2)
        for (int i = 0; i < n; i++)
          a[i] = f(a[2 * i], a[2 * i + 1]);
    } else {
      bool first = true;
      for (int i = 0; i < 32; i++)
        if (x->mask >> i & 1) {
          _T b = __from_bits<_T>(x->value[i]);
          a[0] = first ? b : f(a[0], b);
          first = false;
        }
    }
    x->reduced = __bits(a[0]);
    x->done = 1;
  }
  return __from_bits<_T>(x->reduced);
}
// The order of the GPU's scan: distances 1, 2, 4, 8, 16.
template <class _T, class _F>
__MSL _T __scan(_T v, _F f) {
  __exchanged* x = __msl_exchange(__bits(v), nullptr);
  _T a[32];
  uint lane = __lane(), n = 0;
  for (uint i = 0; i <= lane; i++)
    if (x->mask >> i & 1)
      a[n++] = __from_bits<_T>(x->value[i]);
  for (uint d = 1; d < 32; d *= 2)
    for (uint i = n; i-- > d;)
      a[i] = f(a[i - d], a[i]);
  return a[n - 1];
}
__MSL ulong __ballot(bool p) {
  __exchanged* x = __msl_exchange(p, nullptr);
  ulong r = 0;
  for (int i = 0; i < 32; i++)
    r |= (ulong)((x->mask >> i & 1) & x->value[i]) << i;
  return r;
}
__MSL uint __first_lane() {
  uint mask = __msl_exchange(0, nullptr)->mask;
  return (uint)__builtin_ctz(mask);
}
#endif

// A floating-point value of a thread's own: while checking, one that it has not written has all
// bits set.
template <class _T>
__MSL _T __initialised(_T x) {
#if defined(__MSL_CHECKED)
  if constexpr (is_floating_point_v<_T>)
    if (__bits(x) >> (8 * sizeof(_T) - 16) == 0xffffu)
      __msl_uninitialised(nullptr);
#endif
  return x;
}

struct __add {
  template <class _T>
  _T operator()(_T a, _T b) const {
    return a + b;
  }
};
struct __multiply {
  template <class _T>
  _T operator()(_T a, _T b) const {
    return a * b;
  }
};
struct __greater {
  template <class _T>
  _T operator()(_T a, _T b) const {
    return max(a, b);
  }
};
struct __less {
  template <class _T>
  _T operator()(_T a, _T b) const {
    return min(a, b);
  }
};
struct __both {
  template <class _T>
  _T operator()(_T a, _T b) const {
    return a & b;
  }
};
struct __either {
  template <class _T>
  _T operator()(_T a, _T b) const {
    return a | b;
  }
};
struct __differ {
  template <class _T>
  _T operator()(_T a, _T b) const {
    return a ^ b;
  }
};

// Metal's simdgroup functions take 8-, 16- and 32-bit scalars and their vectors, not bfloat.
template <class _T>
constexpr constant bool __simd_integer =
    is_integral_v<_T> && !is_same_v<_T, bool> && sizeof(_T) <= 4;
template <class _T>
constexpr constant bool __simd_scalar =
    __simd_integer<_T> || is_same_v<_T, float> || is_same_v<_T, half>;
template <class _T>
constexpr constant bool __simd_value = __simd_scalar<typename __vector<_T>::element>;

template <class _T, class _F>
__MSL _T __reduce_each(_T v, _F f) {
  if constexpr (__vector<_T>::size == 0)
    return __reduce(v, f);
  else {
    for (int i = 0; i < __vector<_T>::size; i++)
      v[i] = __reduce((typename __vector<_T>::element)v[i], f);
    return v;
  }
}
#define __MSL_REDUCTION(name, _F)                              \
  template <class _T>                                          \
  __MSL enable_if_t<__simd_value<_T>, _T> simd_##name(_T v) {  \
    return __reduce_each(v, _F());                             \
  }                                                            \
  __MSL float __metal_simd_##name(float v) {                   \
    return __reduce(v, _F());                                  \
  }                                                            \
  template <class _T>                                          \
  __MSL enable_if_t<__simd_scalar<_T>, _T> quad_##name(_T v) { \
    v = _F()(v, __shuffle_xor(v, 1));                          \
    return _F()(v, __shuffle_xor(v, 2));                       \
  }
__MSL_REDUCTION(sum, __add)
__MSL_REDUCTION(product, __multiply)
__MSL_REDUCTION(max, __greater)
__MSL_REDUCTION(min, __less)
#undef __MSL_REDUCTION
#define __MSL_REDUCTION(name, _F)                                                           \
  template <class _T>                                                                       \
  __MSL enable_if_t<__simd_integer<typename __vector<_T>::element>, _T> simd_##name(_T v) { \
    return __reduce_each(v, _F());                                                          \
  }
__MSL_REDUCTION(and, __both)
__MSL_REDUCTION(or, __either)
__MSL_REDUCTION(xor, __differ)
#undef __MSL_REDUCTION
__MSL float __metal_simd_xor(float v) {
  return v;
}
#define __MSL_PREFIX(name, _F, IDENTITY)                                        \
  template <class _T>                                                           \
  __MSL enable_if_t<__simd_scalar<_T>, _T> simd_prefix_inclusive_##name(_T v) { \
    return __scan(v, _F());                                                     \
  }                                                                             \
  template <class _T>                                                           \
  __MSL enable_if_t<__simd_scalar<_T>, _T> simd_prefix_exclusive_##name(_T v) { \
    _T before = __shuffle(__scan(v, _F()), __lane() - 1);                       \
    return __lane() == 0 ? _T(IDENTITY) : before;                               \
  }                                                                             \
  __MSL float __metal_simd_prefix_inclusive_##name(float v) {                   \
    return __scan(v, _F());                                                     \
  }                                                                             \
  __MSL float __metal_simd_prefix_exclusive_##name(float v) {                   \
    return simd_prefix_exclusive_##name(v);                                     \
  }
__MSL_PREFIX(sum, __add, 0)
__MSL_PREFIX(product, __multiply, 1)
#undef __MSL_PREFIX

// A source lane outside the simdgroup gives the lane's own value.
template <class _T>
__MSL _T __shuffle_down(_T v, uint d) {
  uint lane = __lane();
  return __shuffle(v, lane + d < 32 ? lane + d : lane);
}
template <class _T>
__MSL _T __shuffle_up(_T v, uint d) {
  uint lane = __lane();
  return __shuffle(v, lane >= d ? lane - d : lane);
}
template <class _T>
__MSL _T __fill_down(_T v, _T fill, uint d, uint modulo) {
  uint lane = __lane(), base = lane / modulo * modulo, at = lane % modulo + d;
  _T inside = __shuffle(v, lane + d), outside = __shuffle(fill, base + at % modulo);
  return at < modulo ? inside : outside;
}
template <class _T>
__MSL _T __fill_up(_T v, _T fill, uint d, uint modulo) {
  uint lane = __lane(), base = lane / modulo * modulo, at = lane % modulo;
  _T inside = __shuffle(v, lane - d), outside = __shuffle(fill, base + (at + modulo - d) % modulo);
  return at >= d ? inside : outside;
}
#define __MSL_SHUFFLE(name, parameters, value)                             \
  template <class _T>                                                      \
  __MSL enable_if_t<__simd_value<_T>, _T> simd_##name parameters {         \
    return value;                                                          \
  }                                                                        \
  template <class _T>                                                      \
  __MSL enable_if_t<__simd_value<_T>, _T> __metal_simd_##name parameters { \
    return value;                                                          \
  }
__MSL_SHUFFLE(shuffle, (_T v, ushort lane), __shuffle(v, lane))
__MSL_SHUFFLE(broadcast, (_T v, ushort lane), __shuffle(v, lane))
__MSL_SHUFFLE(shuffle_xor, (_T v, ushort mask), __shuffle_xor(v, mask))
__MSL_SHUFFLE(shuffle_down, (_T v, ushort d), __shuffle_down(v, d))
__MSL_SHUFFLE(shuffle_up, (_T v, ushort d), __shuffle_up(v, d))
__MSL_SHUFFLE(shuffle_rotate_down, (_T v, ushort d), __shuffle(v, (__lane() + d) & 31))
__MSL_SHUFFLE(shuffle_rotate_up, (_T v, ushort d), __shuffle(v, (__lane() - d) & 31))
__MSL_SHUFFLE(shuffle_and_fill_down, (_T v, _T fill, ushort d, ushort modulo),
              __fill_down(v, fill, d, modulo))
__MSL_SHUFFLE(shuffle_and_fill_up, (_T v, _T fill, ushort d, ushort modulo),
              __fill_up(v, fill, d, modulo))
#undef __MSL_SHUFFLE
template <class _T>
__MSL enable_if_t<__simd_value<_T>, _T> simd_shuffle_and_fill_down(_T v, _T fill, ushort d) {
  return __fill_down(v, fill, d, 32);
}
template <class _T>
__MSL enable_if_t<__simd_value<_T>, _T> simd_shuffle_and_fill_up(_T v, _T fill, ushort d) {
  return __fill_up(v, fill, d, 32);
}
template <class _T>
__MSL enable_if_t<__simd_value<_T>, _T> simd_broadcast_first(_T v) {
  uint first = __first_lane();
  return __shuffle(v, first);
}
__MSL ushort __metal_get_simdgroup_size(ushort) {
  return 32;
}
__MSL ushort __metal_get_thread_index_in_simdgroup(ushort) {
  return __lane();
}

struct simd_vote {
  typedef ulong vote_t;
  vote_t __vote;
  explicit constexpr simd_vote(vote_t v = 0) : __vote(v) {}
  explicit constexpr operator vote_t() const {
    return __vote;
  }
  bool all() const {
    return (uint)__vote == 0xffffffffu;
  }
  bool any() const {
    return __vote != 0;
  }
};
__MSL simd_vote simd_ballot(bool p) {
  return simd_vote(__ballot(p));
}
__MSL bool simd_all(bool p) {
  return __ballot(!p) == 0;
}
__MSL bool simd_any(bool p) {
  return __ballot(p) != 0;
}
__MSL simd_vote simd_active_threads_mask() {
  return simd_vote(__ballot(true));
}
__MSL bool simd_is_first() {
  return __lane() == __first_lane();
}
template <class _T>
__MSL enable_if_t<__simd_value<_T>, _T> quad_shuffle(_T v, ushort l) {
  return __shuffle(v, (__lane() & ~3u) | (l & 3));
}
template <class _T>
__MSL enable_if_t<__simd_value<_T>, _T> quad_broadcast(_T v, ushort l) {
  return quad_shuffle(v, l);
}
template <class _T>
__MSL enable_if_t<__simd_value<_T>, _T> quad_shuffle_xor(_T v, ushort m) {
  return __shuffle_xor(v, m & 3);
}
}  // namespace metal
