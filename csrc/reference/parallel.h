// A small fork-join pool for the CPU reference: parallel_for runs tasks 0..n-1 on all threads.
#pragma once

#include <cstddef>
#include <functional>

namespace lily {

// Threads used, the caller included: LILY_MLX_THREADS, or the number of CPUs this process may use.
int num_threads();

// Runs task(i) for i in [0, n); returns when all are done. Tasks must not throw and must not nest.
void parallel_for(size_t n, const std::function<void(size_t)>& task);

// Splits [0, n) into runs of at least `grain` items and calls body(begin, end) for each.
void parallel_ranges(size_t n, size_t grain, const std::function<void(size_t, size_t)>& body);

}  // namespace lily
