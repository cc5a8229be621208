// Relaxed atomics on device and threadgroup memory.
namespace metal {
enum memory_order { memory_order_relaxed = __ATOMIC_RELAXED };
template <class T> struct atomic {
  static_assert(sizeof(T) == 4 || is_same_v<T, ulong> || is_same_v<T, bool>, "no such atomic");
  T __value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

#define __MSL_FETCH(space, name, condition)                                                      \
  template <class T, class U>                                                                    \
  __MSL enable_if_t<condition, T> atomic_fetch_##name##_explicit(space atomic<T>* p, U v,        \
                                                                 memory_order) {                 \
    return __atomic_fetch_##name((space T*)&p->__value, (T)v, __ATOMIC_RELAXED);                 \
  }
#define __MSL_ATOMICS(space)                                                                     \
  template <class T> __MSL T atomic_load_explicit(const volatile space atomic<T>* p, memory_order) { \
    return __atomic_load_n((const space T*)&p->__value, __ATOMIC_RELAXED);                       \
  }                                                                                              \
  template <class T> __MSL T atomic_load_explicit(const space atomic<T>* p, memory_order) {      \
    return __atomic_load_n((const space T*)&p->__value, __ATOMIC_RELAXED);                       \
  }                                                                                              \
  template <class T, class U> __MSL void atomic_store_explicit(space atomic<T>* p, U v, memory_order) { \
    __atomic_store_n((space T*)&p->__value, (T)v, __ATOMIC_RELAXED);                             \
  }                                                                                              \
  template <class T, class U> __MSL T atomic_exchange_explicit(space atomic<T>* p, U v, memory_order) { \
    return __atomic_exchange_n((space T*)&p->__value, (T)v, __ATOMIC_RELAXED);                   \
  }                                                                                              \
  template <class T, class U>                                                                    \
  __MSL bool atomic_compare_exchange_weak_explicit(space atomic<T>* p, T* expected, U v,         \
                                                   memory_order, memory_order) {                 \
    return __atomic_compare_exchange_n((space T*)&p->__value, expected, (T)v, true,              \
                                       __ATOMIC_RELAXED, __ATOMIC_RELAXED);                      \
  }                                                                                              \
  __MSL_FETCH(space, add, true) __MSL_FETCH(space, sub, true)                                    \
  __MSL_FETCH(space, min, is_integral_v<T>) __MSL_FETCH(space, max, is_integral_v<T>)            \
  __MSL_FETCH(space, and, is_integral_v<T>) __MSL_FETCH(space, or, is_integral_v<T>)             \
  __MSL_FETCH(space, xor, is_integral_v<T>)
__MSL_ATOMICS(device)
__MSL_ATOMICS(threadgroup)
#undef __MSL_ATOMICS
#undef __MSL_FETCH
}  // namespace metal
