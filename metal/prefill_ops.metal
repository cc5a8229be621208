// Instantiations of prefill_ops.h.
#include "prefill_ops.h"

#define INSTANTIATE_PREFILL_OPS(NAME, A)                                                    \
  template [[host_name("rms_norm_rows_" NAME)]] [[kernel]] void rms_norm_rows<A>(           \
      const device A*, const device A*, device A*, constant int&, constant float&, uint3,   \
      uint, uint, uint);                                                                    \
  template [[host_name("add_rows_" NAME)]] [[kernel]] void add_rows<A>(                     \
      const device A*, const device A*, device A*, constant int&, uint3, uint);             \
  template [[host_name("swiglu_rows_" NAME)]] [[kernel]] void swiglu_rows<A>(               \
      const device float*, const device float*, device A*, constant int&, uint3, uint);     \
  template [[host_name("moe_combine_" NAME)]] [[kernel]] void moe_combine<A>(               \
      const device float*, const device float*, const device float*, const device float*,   \
      const device A*, device A*, constant CombineParams&, uint3, uint);

INSTANTIATE_PREFILL_OPS("bf16", bfloat)
INSTANTIATE_PREFILL_OPS("fp16", half)
