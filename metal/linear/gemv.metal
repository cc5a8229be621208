#include "linear/gemv.h"

#define LILY_GEMV(name, A, O, KMAX)     \
  template [[host_name(name)]] [[kernel]] \
  decltype(lily::gemv<A, O, KMAX>) lily::gemv<A, O, KMAX>;

#define LILY_NORM_ROW(name, A)          \
  template [[host_name(name)]] [[kernel]] \
  decltype(lily::norm_row<A>) lily::norm_row<A>;

LILY_GEMV("gemv_bf16_k2048", bfloat, bfloat, 2048)
LILY_GEMV("gemv_bf16_k4096", bfloat, bfloat, 4096)
LILY_GEMV("gemv_bf16_k8192", bfloat, bfloat, 8192)
LILY_GEMV("gemv_bf16_fp32_k2048", bfloat, float, 2048)
LILY_GEMV("gemv_bf16_fp32_k4096", bfloat, float, 4096)
LILY_GEMV("gemv_fp16_k2048", half, half, 2048)
LILY_GEMV("gemv_fp16_k4096", half, half, 4096)
LILY_GEMV("gemv_fp16_k8192", half, half, 8192)
LILY_GEMV("gemv_fp16_fp32_k2048", half, float, 2048)
LILY_GEMV("gemv_fp16_fp32_k4096", half, float, 4096)

LILY_NORM_ROW("norm_row_bf16", bfloat)
LILY_NORM_ROW("norm_row_fp16", half)
