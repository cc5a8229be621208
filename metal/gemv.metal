#include "gemv.h"

#define LILY_GEMV_ARGS(A, O)                                                                          \
  device const A*, device const A*, device const A*, device A*, device const uint*, device const A*,  \
      device const A*, device O*, device const uint*, device const A*, device const A*, device O*,    \
      device const uint*, device const A*, device const A*, device O*, device const uint*,            \
      device const A*, device const A*, device O*, uint3, uint, uint, uint

#define LILY_GEMV(name, A, O, KMAX) \
  template [[host_name(name)]] [[kernel]] void lily::gemv<A, O, KMAX>(LILY_GEMV_ARGS(A, O));

#define LILY_NORM_ROW(name, A)                                  \
  template [[host_name(name)]] [[kernel]] void lily::norm_row<A>( \
      device const A*, device const A*, device A*, uint, uint, uint);

LILY_GEMV("gemv_bf16_k2048", bfloat, bfloat, 2048)
LILY_GEMV("gemv_bf16_k4096", bfloat, bfloat, 4096)
LILY_GEMV("gemv_bf16_k8192", bfloat, bfloat, 8192)
LILY_GEMV("gemv_bf16_f32_k2048", bfloat, float, 2048)
LILY_GEMV("gemv_bf16_f32_k4096", bfloat, float, 4096)
LILY_GEMV("gemv_f16_k2048", half, half, 2048)
LILY_GEMV("gemv_f16_k4096", half, half, 4096)
LILY_GEMV("gemv_f16_k8192", half, half, 8192)
LILY_GEMV("gemv_f16_f32_k2048", half, float, 2048)
LILY_GEMV("gemv_f16_f32_k4096", half, float, 4096)
LILY_GEMV("gemv_f32_k2048", float, float, 2048)
LILY_GEMV("gemv_f32_k4096", float, float, 4096)

LILY_NORM_ROW("norm_row_bf16", bfloat)
LILY_NORM_ROW("norm_row_f16", half)
LILY_NORM_ROW("norm_row_f32", float)
