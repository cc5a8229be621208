// A small fork-join pool for the CPU reference: parallel_for runs tasks 0..n-1 on all threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace lily {

// Threads used, the caller included: LILY_MLX_THREADS, or the number of CPUs this process may use.
int num_threads();

// Runs task(i) for i in [0, n); returns when all are done. Tasks must not throw and must not nest.
void parallel_for(size_t n, const std::function<void(size_t)>& task);

// Multiply-adds below which a task is not worth a thread.
inline constexpr int64_t kTaskWork = 1 << 15;

// Splits [0, n), each item of `work` multiply-adds, into runs that are worth a thread and calls
// body(begin, end) for each.
void parallel_ranges(size_t n, int64_t work, const std::function<void(size_t, size_t)>& body);

}  // namespace lily
