// Instantiations of gemv.h and head.h on NVIDIA's tensor cores: mma_gemv_<A>_k<KMAX>, mma_head_gemv_...
#include "linear/gemv_mma.h"
#include "head/head.h"

#define LILY_MMA_GEMV(name, A, KMAX)                              \
  template [[host_name("mma_gemv_" name)]] [[kernel]]             \
  decltype(lily::gemv<A, A, KMAX, lily::MmaProducts>)             \
      lily::gemv<A, A, KMAX, lily::MmaProducts>;                  \
  template [[host_name("mma_head_gemv_" name)]] [[kernel]]        \
  decltype(lily::head_gemv<A, KMAX, lily::MmaProducts>)           \
      lily::head_gemv<A, KMAX, lily::MmaProducts>;

LILY_MMA_GEMV("bf16_k2048", bfloat, 2048)
LILY_MMA_GEMV("bf16_k4096", bfloat, 4096)
LILY_MMA_GEMV("fp16_k2048", half, 2048)
LILY_MMA_GEMV("fp16_k4096", half, 4096)
