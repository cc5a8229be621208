// Instantiations of row_ops.h.
#include "row_ops.h"

#define INSTANTIATE_OP(KERNEL, NAME, A)                                                   \
  template [[host_name(#KERNEL "_" NAME)]] [[kernel]] decltype(KERNEL<A>) KERNEL<A>;

#define INSTANTIATE_PREFILL_OPS(NAME, A)                                                  \
  INSTANTIATE_OP(rms_norm_rows, NAME, A)                                                  \
  INSTANTIATE_OP(add_rows, NAME, A)                                                       \
  INSTANTIATE_OP(swiglu_rows, NAME, A)                                                    \
  INSTANTIATE_OP(moe_combine, NAME, A)

INSTANTIATE_PREFILL_OPS("bf16", bfloat)
INSTANTIATE_PREFILL_OPS("fp16", half)
