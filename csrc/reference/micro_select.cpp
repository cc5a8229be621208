#include "reference/micro.h"

namespace lily {

extern const Micro micro_baseline;
#ifdef LILY_X86_LEVELS
extern const Micro micro_x86_v3;
extern const Micro micro_x86_v4;
#endif

const Micro& micro() {
  static const Micro& chosen = [&]() -> const Micro& {
#ifdef LILY_X86_LEVELS
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      return micro_x86_v4;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      return micro_x86_v3;
    }
#endif
    return micro_baseline;
  }();
  return chosen;
}

}  // namespace lily
