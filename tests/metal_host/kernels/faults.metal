// One kernel a planted fault. With FAULT defined each has its fault, on the lines marked
// "FAULT: kernel"; without it none has.
#include <metal_stdlib>
using namespace metal;

#ifdef FAULT
#define PLANT(bad, good) bad
#else
#define PLANT(bad, good) good
#endif

#define THREAD uint tid [[thread_index_in_threadgroup]]
#define GROUP uint group [[threadgroup_position_in_grid]]
#define LANE uint lane [[thread_index_in_simdgroup]]
#define SIMD uint simd [[simdgroup_index_in_threadgroup]]

// ---- threadgroup races
[[kernel]] void race_missing_barrier(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  threadgroup float t[128];
  t[tid] = x[tid];
  PLANT(, threadgroup_barrier(mem_flags::mem_threadgroup));
  y[tid] = t[127 - tid];  // FAULT: race_missing_barrier
}

[[kernel]] void race_same_byte(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  threadgroup float t[128];
  t[PLANT(tid / 2, tid)] = x[tid];  // FAULT: race_same_byte
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[tid] = t[tid / 2];
}

[[kernel]] void race_write_after_read(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  threadgroup float t[128];
  t[tid] = x[tid];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float v = t[127 - tid];
  PLANT(, threadgroup_barrier(mem_flags::mem_threadgroup));
  t[tid] = 2.0f * v;  // FAULT: race_write_after_read
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[tid] = t[127 - tid];
}

[[kernel]] void race_inside_simdgroup(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  threadgroup float t[128];
  t[tid] = x[tid];
  PLANT(, simdgroup_barrier(mem_flags::mem_threadgroup));
  y[tid] = t[tid ^ 1];  // FAULT: race_inside_simdgroup
}

// A simdgroup barrier does not order two simdgroups.
[[kernel]] void race_across_simdgroups(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  threadgroup float t[128];
  t[tid] = x[tid];
  PLANT(simdgroup_barrier(mem_flags::mem_threadgroup), threadgroup_barrier(mem_flags::mem_threadgroup));
  y[tid] = t[tid ^ 32];  // FAULT: race_across_simdgroups
}

// A barrier that names no memory orders none.
[[kernel]] void race_barrier_flags(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  threadgroup float t[128];
  t[tid] = x[tid];
  threadgroup_barrier(PLANT(mem_flags::mem_none, mem_flags::mem_threadgroup));
  y[tid] = t[127 - tid];  // FAULT: race_barrier_flags
}

[[kernel]] void race_argument(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                              threadgroup float* t [[threadgroup(0)]], THREAD) {
  t[tid] = x[tid];
  PLANT(, threadgroup_barrier(mem_flags::mem_threadgroup));
  y[tid] = t[127 - tid];  // FAULT: race_argument
}

[[kernel]] void race_atomic_and_plain(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  threadgroup atomic_uint t[1];
  if (tid == 0) atomic_store_explicit(&t[0], 0u, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&t[0], uint(x[tid]), memory_order_relaxed);
  PLANT(, threadgroup_barrier(mem_flags::mem_threadgroup));
  threadgroup uint* plain = (threadgroup uint*)t;
  y[tid] = float(plain[0]);  // FAULT: race_atomic_and_plain
}

// ---- races on device memory inside a threadgroup
[[kernel]] void device_race_scratch(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                    device float* s [[buffer(2)]], THREAD) {
  s[tid] = x[tid];
  threadgroup_barrier(PLANT(mem_flags::mem_threadgroup, mem_flags::mem_device));
  y[tid] = s[127 - tid];  // FAULT: device_race_scratch
}

[[kernel]] void device_race_same_byte(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  y[PLANT(tid & 63, tid)] = x[tid];  // FAULT: device_race_same_byte
}

// ---- races between threadgroups
[[kernel]] void grid_race_overlap(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD, GROUP) {
  y[group * PLANT(31, 32) + tid] = x[tid];  // FAULT: grid_race_overlap
}

[[kernel]] void grid_race_sum(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], LANE, GROUP) {
  float total = simd_sum(x[group * 32 + lane]);
  if (lane == 0) {
    y[PLANT(0, group)] += total;  // FAULT: grid_race_sum
  }
}

[[kernel]] void grid_race_neighbour(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD, GROUP,
                                    uint groups [[threadgroups_per_grid]]) {
  y[group * 32 + tid] = x[tid];
  threadgroup_barrier(mem_flags::mem_device);
  uint from = PLANT((group + 1) % groups, group);
  float v = y[from * 32 + tid];  // FAULT: grid_race_neighbour
  threadgroup_barrier(mem_flags::mem_device);
  y[group * 32 + tid] = v + 1.0f;  // FAULT: grid_race_neighbour
}

// ---- out of bounds, both ways
[[kernel]] void bounds_read_past(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  y[tid] = x[tid + PLANT(1, 0)];  // FAULT: bounds_read_past
}

[[kernel]] void bounds_read_before(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  y[tid] = x[int(tid) - PLANT(1, 0)];  // FAULT: bounds_read_before
}

[[kernel]] void bounds_write_past(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  y[tid + PLANT(1, 0)] = x[tid];  // FAULT: bounds_write_past
}

[[kernel]] void bounds_write_before(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  y[int(tid) - PLANT(1, 0)] = x[tid];  // FAULT: bounds_write_before
}

[[kernel]] void bounds_far(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  y[tid] = x[tid + PLANT(100000000, 0)];  // FAULT: bounds_far
}

// The vector begins inside and ends outside.
[[kernel]] void bounds_vector(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  if (tid == 0) {
    float2 v = *(device const float2*)(x + PLANT(127, 126));  // FAULT: bounds_vector
    y[0] = v.x;
  } else {
    y[tid] = 0.0f;
  }
}

[[kernel]] void bounds_constant(constant float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  y[tid] = x[tid * PLANT(2, 1)];  // FAULT: bounds_constant
}

[[kernel]] void bounds_threadgroup_past(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  threadgroup float t[128];
  threadgroup float u[128];
  u[tid] = 0.0f;
  t[tid + PLANT(1, 0)] = x[tid];  // FAULT: bounds_threadgroup_past
  y[tid] = u[tid];
}

[[kernel]] void bounds_threadgroup_before(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  threadgroup float t[128];
  t[int(tid) - PLANT(1, 0)] = x[tid];  // FAULT: bounds_threadgroup_before
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[tid] = t[tid < 127 ? tid : 0];
}

[[kernel]] void bounds_threadgroup_argument(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                            threadgroup float* t [[threadgroup(0)]], THREAD) {
  t[tid + PLANT(4, 0)] = x[tid];  // FAULT: bounds_threadgroup_argument
  y[tid] = 0.0f;
}

// ---- divergent barriers
[[kernel]] void barrier_two_places(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  threadgroup float t[128];
  t[tid] = x[tid];
#ifdef FAULT
  if (tid < 64) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // FAULT: barrier_two_places
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // FAULT: barrier_two_places
  }
#else
  threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
  y[tid] = t[127 - tid];
}

[[kernel]] void barrier_after_return(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  threadgroup float t[128];
  t[tid] = x[tid];
  if (PLANT(tid == 77, false)) return;
  threadgroup_barrier(mem_flags::mem_threadgroup);  // FAULT: barrier_after_return
  y[tid] = t[tid];
}

[[kernel]] void barrier_loop_counts(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD, SIMD) {
  for (uint i = 0; i < PLANT(1 + simd, 2); i++) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // FAULT: barrier_loop_counts
  }
  y[tid] = x[tid];
}

// ---- divergent simdgroup operations
[[kernel]] void simd_some_lanes(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD, LANE) {
  float v = x[tid];
  if (PLANT(lane < 20, true)) {
    v = simd_sum(v);  // FAULT: simd_some_lanes
  }
  y[tid] = v;
}

[[kernel]] void simd_two_places(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD, LANE, SIMD) {
  float v = x[tid];
  if (PLANT(lane, simd) < 2) {
    v = simd_max(v);  // FAULT: simd_two_places
  } else {
    v = simd_min(v);  // FAULT: simd_two_places
  }
  y[tid] = v;
}

[[kernel]] void simd_after_return(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD, LANE) {
  if (PLANT(lane == 31, false)) return;
  y[tid] = simd_shuffle_xor(x[tid], 1);  // FAULT: simd_after_return
}

[[kernel]] void simd_matrix_some_lanes(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD, LANE) {
  simdgroup_matrix<float, 8, 8> a(1.0f), c(0.0f);
  if (PLANT(lane < 16, true)) {
    simdgroup_multiply(c, a, a);  // FAULT: simd_matrix_some_lanes
  }
  y[tid] = x[tid] + c.thread_elements()[0];
}

// ---- uninitialised threadgroup memory
[[kernel]] void uninitialised_slot(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD, LANE, SIMD) {
  threadgroup float t[4];
  float total = simd_sum(x[tid]);
  if (lane == 0 && PLANT(simd != 2, true)) t[simd] = total;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[tid] = t[simd];  // FAULT: uninitialised_slot
}

[[kernel]] void uninitialised_never(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  threadgroup float t[128];
  PLANT(, t[tid] = 0.0f);
  y[tid] = x[tid] + t[tid];  // FAULT: uninitialised_never
}

[[kernel]] void uninitialised_atomic(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  threadgroup atomic_int t[1];
  PLANT(, if (tid == 0) atomic_store_explicit(&t[0], 0, memory_order_relaxed));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&t[0], int(x[tid]), memory_order_relaxed);  // FAULT: uninitialised_atomic
  y[tid] = 0.0f;
}

// ---- device outputs that nothing has written
[[kernel]] void output_accumulates(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
#ifdef FAULT
  y[tid] += x[tid];  // FAULT: output_accumulates
#else
  y[tid] = x[tid];
#endif
}

[[kernel]] void output_reads_ahead(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  y[tid] = x[tid];
  if (tid > 0) {
    y[tid] = x[tid] + y[tid + PLANT(1, 0) * 64];  // FAULT: output_reads_ahead
  }
}

// ---- arguments used against their declaration
[[kernel]] void writes_input(device float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  y[tid] = x[tid];
  PLANT(x[tid] = 0.0f, );  // FAULT: writes_input
}

[[kernel]] void writes_input_atomically(device atomic_int* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  y[tid] = float(PLANT(atomic_fetch_add_explicit(x, 1, memory_order_relaxed),  // FAULT: writes_input_atomically
                       atomic_load_explicit(x, memory_order_relaxed)));
}

[[kernel]] void reads_output(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  y[tid] = x[tid] + PLANT(y[tid], 0.0f);  // FAULT: reads_output
}

[[kernel]] void reads_output_late(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  y[tid] = x[tid];
  threadgroup_barrier(mem_flags::mem_device);
  if (PLANT(y[127 - tid], x[tid]) < -1.0f) {  // FAULT: reads_output_late
    y[tid] = 0.0f;
  }
}

// ---- a plain store hidden behind an atomic one of the same thread
[[kernel]] void race_plain_behind_atomic(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  threadgroup atomic_uint t[1];
  if (tid == 0) *(threadgroup uint*)t = 0u;  // FAULT: race_plain_behind_atomic
  PLANT(, threadgroup_barrier(mem_flags::mem_threadgroup));
  atomic_fetch_add_explicit(&t[0], 1u, memory_order_relaxed);  // FAULT: race_plain_behind_atomic
  y[tid] = x[tid];
}

[[kernel]] void grid_race_plain_behind_atomic(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                                              device atomic_uint* n [[buffer(2)]], THREAD, GROUP) {
  PLANT(if (tid == 0 && group == 0) *(device uint*)n = 0u, );  // FAULT: grid_race_plain_behind_atomic
  threadgroup_barrier(mem_flags::mem_device);
  atomic_fetch_add_explicit(n, 1u, memory_order_relaxed);  // FAULT: grid_race_plain_behind_atomic
  y[group * 32 + tid] = x[tid];
}

// ---- tables at program scope, and a thread's own arrays
constant float table[4] = {1.0f, 2.0f, 3.0f, 4.0f};
[[kernel]] void bounds_table_past(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  y[tid] = x[tid] + table[(tid & 3) + PLANT(1, 0)];  // FAULT: bounds_table_past
}

[[kernel]] void bounds_table_before(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  y[tid] = x[tid] + table[int(tid & 3) - PLANT(1, 0)];  // FAULT: bounds_table_before
}

[[kernel]] void bounds_thread_past(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  float a[4] = {x[tid], 1.0f, 2.0f, 3.0f};
  y[tid] = a[(tid & 3) + PLANT(1, 0)];  // FAULT: bounds_thread_past
}

[[kernel]] void bounds_thread_before(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  float a[4] = {x[tid], 1.0f, 2.0f, 3.0f};
  a[int(tid & 3) - PLANT(1, 0)] = 4.0f;  // FAULT: bounds_thread_before
  y[tid] = a[0] + a[1] + a[2] + a[3];
}

// ---- misaligned vectors
[[kernel]] void misaligned_device(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  y[tid] = (*(device const float2*)(x + (tid & 62) + PLANT(1, 0))).x;  // FAULT: misaligned_device
}

[[kernel]] void misaligned_threadgroup(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  threadgroup float t[132];
  if (tid < 32) *(threadgroup float4*)(t + 4 * tid + PLANT(1, 0)) = float4(x[tid]);  // FAULT: misaligned_threadgroup
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[tid] = t[tid | 1];
}

[[kernel]] void misaligned_constant(constant float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  float4 v = *(constant float4*)(x + (tid & 60) + PLANT(2, 0));  // FAULT: misaligned_constant
  y[tid] = v.x + v.w;
}

// ---- division of integers
[[kernel]] void division_by_zero(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  uint n = uint(x[tid]) + PLANT(0u, 1u);
  y[tid] = float(100u / n);  // FAULT: division_by_zero
}

[[kernel]] void division_remainder(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  int2 n = int2(int(x[tid]) - PLANT(5, -1), 3);
  y[tid] = float((int2(100) % n).x);  // FAULT: division_remainder
}

[[kernel]] void division_overflow(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  int n = 2 * int(x[tid]) + PLANT(-1, 1);
  y[tid] = float(INT_MIN / n);  // FAULT: division_overflow
}

// ---- a thread's own values that nothing has written
[[kernel]] void unwritten_tail(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  float a[4];
  for (uint i = 0; i < PLANT(3, 4); i++) a[i] = x[tid];
  y[tid] = a[0] + a[1] + a[2] + a[3];  // FAULT: unwritten_tail
}

[[kernel]] void unwritten_slot(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  half4 a[4];
  for (uint i = 0; i < 4; i++) {
    if (PLANT(i != (tid & 3), true)) a[i] = half4(half(x[tid]));
  }
  y[tid] = 2.0f * float(a[tid & 3].y);  // FAULT: unwritten_slot
}

[[kernel]] void unwritten_accumulator(device const float* x [[buffer(0)]], device float* y [[buffer(1)]], THREAD) {
  simdgroup_matrix<float, 8, 8> a(1.0f), c PLANT(, (0.0f));
  simdgroup_multiply_accumulate(c, a, a, c);  // FAULT: unwritten_accumulator
  y[tid] = x[tid] + float(c.thread_elements()[0] > 0.5f);
}
