// Relaxed atomics on device and threadgroup memory.
namespace metal {
enum memory_order {
  memory_order_relaxed = __ATOMIC_RELAXED,
#if __METAL_VERSION__ >= 320
  memory_order_acquire = __ATOMIC_ACQUIRE,
  memory_order_release = __ATOMIC_RELEASE,
  memory_order_acq_rel = __ATOMIC_ACQ_REL,
  memory_order_seq_cst = __ATOMIC_SEQ_CST
#endif
};
#if __METAL_VERSION__ >= 320
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device
};
__MSL void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
#endif
template <class _T>
struct atomic {
  static_assert(sizeof(_T) == 4 || is_same_v<_T, ulong> || is_same_v<_T, bool>, "no such atomic");
  _T __value;
  atomic() = default;
  atomic(const atomic&) = delete;
  void operator=(const atomic&) = delete;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
typedef atomic<bool> atomic_bool;
typedef atomic<ulong> atomic_ulong;

template <class _T>
constexpr constant bool __fetched = is_same_v<_T, int> || is_same_v<_T, uint>;
#define __MSL_FETCH(space, name, condition)                                                  \
  template <class _T, class _U>                                                              \
  __MSL enable_if_t<condition, _T> atomic_fetch_##name##_explicit(space atomic<_T>* p, _U v, \
                                                                  memory_order) {            \
    return __atomic_fetch_##name((space _T*)&p->__value, (_T)v, __ATOMIC_RELAXED);           \
  }
#define __MSL_ATOMICS(space)                                                                \
  template <class _T>                                                                       \
  __MSL _T atomic_load_explicit(const volatile space atomic<_T>* p, memory_order) {         \
    return __atomic_load_n((const space _T*)&p->__value, __ATOMIC_RELAXED);                 \
  }                                                                                         \
  template <class _T>                                                                       \
  __MSL _T atomic_load_explicit(const space atomic<_T>* p, memory_order) {                  \
    return __atomic_load_n((const space _T*)&p->__value, __ATOMIC_RELAXED);                 \
  }                                                                                         \
  template <class _T, class _U>                                                             \
  __MSL void atomic_store_explicit(space atomic<_T>* p, _U v, memory_order) {               \
    __atomic_store_n((space _T*)&p->__value, (_T)v, __ATOMIC_RELAXED);                      \
  }                                                                                         \
  template <class _T, class _U>                                                             \
  __MSL _T atomic_exchange_explicit(space atomic<_T>* p, _U v, memory_order) {              \
    return __atomic_exchange_n((space _T*)&p->__value, (_T)v, __ATOMIC_RELAXED);            \
  }                                                                                         \
  template <class _T, class _U>                                                             \
  __MSL bool atomic_compare_exchange_weak_explicit(space atomic<_T>* p, _T* expected, _U v, \
                                                   memory_order, memory_order) {            \
    return __atomic_compare_exchange_n((space _T*)&p->__value, expected, (_T)v, true,       \
                                       __ATOMIC_RELAXED, __ATOMIC_RELAXED);                 \
  }                                                                                         \
  __MSL_FETCH(space, add, (__fetched<_T> || is_same_v<_T, float>))                          \
  __MSL_FETCH(space, sub, (__fetched<_T> || is_same_v<_T, float>))                          \
  __MSL_FETCH(space, min, __fetched<_T>)                                                    \
  __MSL_FETCH(space, max, __fetched<_T>) __MSL_FETCH(space, and, __fetched<_T>)             \
      __MSL_FETCH(space, or, __fetched<_T>) __MSL_FETCH(space, xor, __fetched<_T>)
__MSL_ATOMICS(device)
__MSL_ATOMICS(threadgroup)
#undef __MSL_ATOMICS
#undef __MSL_FETCH
}  // namespace metal
