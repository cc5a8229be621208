#include "backend/cuda_memory.h"

#include <algorithm>
#include <list>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>

#include "backend/cuda.h"
#include "mlx/backend/cuda/allocator.h"
#include "mlx/memory.h"

namespace lily {
namespace {

namespace mx = mlx::core;
using mx::cu::CudaBuffer;

// Sizes are rounded to this, so that a buffer serves any array of about its size. MLX copies an
// array before use where its buffer is larger than it by more than this.
constexpr size_t kPage = 16384;
constexpr int kDevice = 0;

// Freed buffers by size, the oldest first in `order_`. Memory is the stream-ordered allocator's,
// from which MLX can free it too when a CPU asks for an array.
class Pool {
 public:
  CudaBuffer* take(size_t bytes) {
    const size_t size = std::max<size_t>((bytes + kPage - 1) / kPage, 1) * kPage;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto it = free_.find(size);
      if (it != free_.end()) {
        CudaBuffer* buffer = *it->second;
        order_.erase(it->second);
        free_.erase(it);
        free_bytes_ -= size;
        return buffer;
      }
    }
    mx::cu::device(kDevice).make_current();
    CUdeviceptr address = 0;
    CUresult result = allocate(address, size);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
      shrink(0);
      mx::clear_cache();
      check_cuda(cuCtxSynchronize(), "waiting for memory");
      result = allocate(address, size);
    }
    check_cuda(result, std::to_string(size) + " bytes of device memory");
    auto* buffer = new CudaBuffer{reinterpret_cast<void*>(address), size, kDevice};
    std::lock_guard<std::mutex> lock(mutex_);
    ours_.insert(buffer);
    return buffer;
  }

  bool made(const void* buffer) {
    std::lock_guard<std::mutex> lock(mutex_);
    return ours_.count(buffer) != 0;
  }

  // From any thread, also while the process ends: errors have nobody to go to.
  void give(CudaBuffer* buffer) {
    if (buffer->device != kDevice) {  // MLX has moved it to managed memory
      cuMemFree(reinterpret_cast<CUdeviceptr>(buffer->data));
      std::lock_guard<std::mutex> lock(mutex_);
      ours_.erase(buffer);
      delete buffer;
      return;
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      order_.push_back(buffer);
      free_.emplace(buffer->size, std::prev(order_.end()));
      free_bytes_ += buffer->size;
    }
    shrink(most());
  }

 private:
  using Order = std::list<CudaBuffer*>;

  CUresult allocate(CUdeviceptr& address, size_t size) {
    const CUstream stream = stream_of_pool();
    const CUresult result = cuMemAllocAsync(&address, size, stream);
    return result != CUDA_SUCCESS ? result : cuStreamSynchronize(stream);
  }

  void shrink(size_t most) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (free_bytes_ > most) {
      CudaBuffer* buffer = order_.front();
      auto [it, end] = free_.equal_range(buffer->size);
      it = std::find_if(it, end, [&](const auto& x) { return x.second == order_.begin(); });
      free_.erase(it);
      order_.pop_front();
      free_bytes_ -= buffer->size;
      mx::cu::device(kDevice).make_current();
      cuMemFreeAsync(reinterpret_cast<CUdeviceptr>(buffer->data), stream_of_pool());
      ours_.erase(buffer);
      delete buffer;
    }
  }

  CUstream stream_of_pool() {
    static CUstream stream = [] {
      CUstream s = nullptr;
      check_cuda(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING), "a stream");
      return s;
    }();
    return stream;
  }

  // Free bytes kept: an eighth of the card.
  static size_t most() {
    static const size_t bytes = [] {
      size_t free = 0, total = 0;
      mx::cu::device(kDevice).make_current();
      cuMemGetInfo(&free, &total);
      return total / 8;
    }();
    return bytes;
  }

  std::mutex mutex_;
  Order order_;
  std::unordered_multimap<size_t, Order::iterator> free_;
  std::unordered_set<const void*> ours_;  // free or not
  size_t free_bytes_ = 0;
};

Pool& pool() {
  static Pool* p = new Pool;  // outlives every array
  return *p;
}

}  // namespace

void allocate_on_device(mx::array& out) {
  out.set_data(mx::allocator::Data(
      mx::allocator::Buffer(pool().take(out.nbytes())),
      [](mx::allocator::Buffer b) { pool().give(static_cast<CudaBuffer*>(b.ptr())); }));
}

bool held_alone(const mx::array& a) {
  const auto& data = a.data_shared_ptr();
  return data.use_count() == 1 && (data->is_owned() || pool().made(data->buffer().ptr()));
}

mx::array device_array(mx::Shape shape, mx::Dtype dtype) {
  mx::array a(std::move(shape), dtype, nullptr, {});
  allocate_on_device(a);
  a.set_status(mx::array::Status::available);
  return a;
}

mx::array device_bytes(size_t bytes) {
  // Not one-dimensional in bytes: a shape's entries are 32 bits wide.
  const int rows = static_cast<int>(std::max<size_t>((bytes + 255) / 256, 1));
  return device_array({rows, 256}, mx::uint8);
}

}  // namespace lily
