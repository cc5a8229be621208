#include "head/argmax.h"
#include "head/head.h"

#define LILY_HEAD_GEMV(name, A, KMAX)   \
  template [[host_name(name)]] [[kernel]] \
  decltype(lily::head_gemv<A, KMAX>) lily::head_gemv<A, KMAX>;

#define LILY_EMBED_ROW(name, A)         \
  template [[host_name(name)]] [[kernel]] \
  decltype(lily::embed_row<A>) lily::embed_row<A>;

LILY_HEAD_GEMV("head_gemv_bf16_k2048", bfloat, 2048)
LILY_HEAD_GEMV("head_gemv_bf16_k4096", bfloat, 4096)
LILY_HEAD_GEMV("head_gemv_fp16_k2048", half, 2048)
LILY_HEAD_GEMV("head_gemv_fp16_k4096", half, 4096)

LILY_EMBED_ROW("embed_row_bf16", bfloat)
LILY_EMBED_ROW("embed_row_fp16", half)
