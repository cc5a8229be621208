#include "reference/parallel.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace lily {
namespace {

int count_cpus() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return std::max(1, CPU_COUNT(&set));
  }
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

int configured_threads() {
  const char* text = std::getenv("LILY_MLX_THREADS");
  if (text == nullptr) {
    return count_cpus();
  }
  char* end = nullptr;
  long n = std::strtol(text, &end, 10);
  if (end == text || *end != '\0' || n < 1 || n > 1024) {
    throw std::invalid_argument("LILY_MLX_THREADS is '" + std::string(text) +
                                "'; set it to a number from 1 to 1024");
  }
  return static_cast<int>(n);
}

// A decode step is a chain of short parallel regions, so a worker spins this long before it sleeps.
constexpr int kSpins = 2000;

class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 1; i < threads; ++i) {
      std::thread([this] { work(); }).detach();
    }
  }

  void run(size_t n, const std::function<void(size_t)>& task) {
    // One region at a time: streams have a thread each, and their regions queue here.
    std::lock_guard<std::mutex> one(region_mutex_);
    Region region{task, n};
    {
      std::lock_guard<std::mutex> lock(mutex_);
      region_ = &region;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    region.drain();
    {
      // A worker that has not come by now is not waited for: on a busy machine it may be long in
      // coming.
      std::lock_guard<std::mutex> lock(mutex_);
      region_ = nullptr;
    }
    while (region.inside.load(std::memory_order_acquire) != 0) {
      std::this_thread::yield();
    }
  }

 private:
  struct Region {
    const std::function<void(size_t)>& task;
    size_t total;
    std::atomic<size_t> next{0};
    std::atomic<int> inside{0};

    void drain() {
      for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < total;) {
        task(i);
      }
    }
  };

  void work() {
    uint64_t seen = 0;
    while (true) {
      for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; ++i) {
        std::this_thread::yield();
      }
      Region* region;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
        seen = generation_.load(std::memory_order_relaxed);
        region = region_;
        if (region != nullptr) {
          region->inside.fetch_add(1, std::memory_order_relaxed);
        }
      }
      if (region != nullptr) {
        region->drain();
        region->inside.fetch_sub(1, std::memory_order_release);
      }
    }
  }

  std::mutex region_mutex_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> generation_{0};
  Region* region_ = nullptr;  // guarded by mutex_
};

Pool& pool() {
  // Never destroyed: a stream's thread may outlive static destructors. A forked child has none of
  // the parent's workers, so it gets a pool of its own.
  static std::mutex mutex;
  static Pool* instance = nullptr;
  static pid_t owner = 0;
  std::lock_guard<std::mutex> lock(mutex);
  if (owner != getpid()) {
    instance = new Pool(num_threads());
    owner = getpid();
  }
  return *instance;
}

}  // namespace

int num_threads() {
  static const int n = configured_threads();
  return n;
}

void parallel_for(size_t n, const std::function<void(size_t)>& task) {
  if (n <= 1 || num_threads() == 1) {
    for (size_t i = 0; i < n; ++i) {
      task(i);
    }
    return;
  }
  pool().run(n, task);
}

void parallel_ranges(size_t n, int64_t work, const std::function<void(size_t, size_t)>& body) {
  const size_t grain = std::max<int64_t>(kTaskWork / work, 1);
  size_t pieces =
      std::min<size_t>(std::max<size_t>(n / grain, 1), static_cast<size_t>(num_threads()) * 4);
  parallel_for(pieces, [&](size_t i) { body(n * i / pieces, n * (i + 1) / pieces); });
}

}  // namespace lily
