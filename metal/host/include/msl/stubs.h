// What the launch stubs that compiler.py writes are made of. Comes after the kernels' source.
#pragma once
#pragma clang system_header

namespace __msl_host {
// Type of a function's n-th parameter.
template <class _F, int _N>
struct nth;
template <class _R, class _A, class... _B>
struct nth<_R(_A, _B...), 0> {
  typedef _A type;
};
template <class _R, class _A, class... _B, int _N>
struct nth<_R(_A, _B...), _N> : nth<_R(_B...), _N - 1> {};

// What a reference or pointer parameter refers to.
template <class _P>
struct target {
  typedef _P type;
};
template <class _T>
struct target<_T&> {
  typedef _T type;
};
template <class _T>
struct target<_T*> {
  typedef _T type;
};

// A parameter made from an address.
template <class _P>
struct bind {
  __MSL _P from(ulong address) {
    return (_P)address;
  }
};
template <class _T>
struct bind<_T&> {
  __MSL _T& from(ulong address) {
    return *(_T*)address;
  }
};

template <class _T>
__MSL _T position(const uint* p) {
  if constexpr (metal::__vector<_T>::size == 0) {
    return (_T)p[0];
  } else {
    _T r;
    for (int i = 0; i < metal::__vector<_T>::size; i++)
      r[i] = p[i];
    return r;
  }
}
template <class _T>
__MSL _T position(uint p) {
  return (_T)p;
}

// As in ../../runtime/runtime.h.
struct context {
  uint thread_position_in_grid[3], thread_position_in_threadgroup[3];
  uint threadgroup_position_in_grid[3], threads_per_threadgroup[3];
  uint threads_per_grid[3], threadgroups_per_grid[3];
  uint thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  uint simdgroups_per_threadgroup;
  void* threadgroup_memory[8];
};

#if defined(__NVPTX__)
extern threadgroup ulong dynamic[];

__MSL context here() {
  uint group[3] = {(uint)__nvvm_read_ptx_sreg_ctaid_x(), (uint)__nvvm_read_ptx_sreg_ctaid_y(),
                   (uint)__nvvm_read_ptx_sreg_ctaid_z()};
  uint groups[3] = {(uint)__nvvm_read_ptx_sreg_nctaid_x(), (uint)__nvvm_read_ptx_sreg_nctaid_y(),
                    (uint)__nvvm_read_ptx_sreg_nctaid_z()};
  uint at[3] = {(uint)__nvvm_read_ptx_sreg_tid_x(), (uint)__nvvm_read_ptx_sreg_tid_y(),
                (uint)__nvvm_read_ptx_sreg_tid_z()};
  uint shape[3] = {(uint)__nvvm_read_ptx_sreg_ntid_x(), (uint)__nvvm_read_ptx_sreg_ntid_y(),
                   (uint)__nvvm_read_ptx_sreg_ntid_z()};
  context c;
  for (int i = 0; i < 3; i++) {
    c.thread_position_in_threadgroup[i] = at[i];
    c.threadgroup_position_in_grid[i] = group[i];
    c.threadgroups_per_grid[i] = groups[i];
    c.threads_per_threadgroup[i] = shape[i];
    c.thread_position_in_grid[i] = group[i] * shape[i] + at[i];
    c.threads_per_grid[i] = groups[i] * shape[i];
  }
  uint index = at[0] + shape[0] * (at[1] + shape[1] * at[2]);
  c.thread_index_in_threadgroup = index;
  c.thread_index_in_simdgroup = index & 31;
  c.simdgroup_index_in_threadgroup = index >> 5;
  c.simdgroups_per_threadgroup = (shape[0] * shape[1] * shape[2] + 31) / 32;
  return c;
}
#endif
}  // namespace __msl_host
