// Instantiations of gemv.h and head.h on NVIDIA's tensor cores: mma_gemv_<A>_k<KMAX>, mma_head_gemv_...
#include "linear/gemv_mma.h"
#include "head/head.h"

#define LILY_SYNC_GEMV(name, A, KMAX)                              \
  template [[host_name("mma_gemv_" name)]] [[kernel]]             \
  decltype(lily::gemv<A, A, KMAX, lily::SyncProducts>)             \
      lily::gemv<A, A, KMAX, lily::SyncProducts>;                  \
  template [[host_name("mma_head_gemv_" name)]] [[kernel]]        \
  decltype(lily::head_gemv<A, KMAX, lily::SyncProducts>)           \
      lily::head_gemv<A, KMAX, lily::SyncProducts>;

LILY_SYNC_GEMV("bf16_k2048", bfloat, 2048)
LILY_SYNC_GEMV("bf16_k4096", bfloat, 4096)
LILY_SYNC_GEMV("f16_k2048", half, 2048)
LILY_SYNC_GEMV("f16_k4096", half, 4096)
