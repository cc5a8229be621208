// Instantiations of routing.h; _eN serves up to 32 N experts.
#include "routing.h"

#define INSTANTIATE_ROUTING(EPL)                                                            \
  template [[host_name("route_topk_e" #EPL)]] [[kernel]] void route_topk<EPL>(        \
      const device float*, device uint*, device float*, device uint*,                       \
      constant RouteParams&, uint3, uint, uint, uint);                                \
  template [[host_name("route_small_e" #EPL)]] [[kernel]] void route_small<EPL>(      \
      const device float*, device uint*, device float*, device uint*, device uint*,         \
      device uint*, constant RouteParams&, uint, uint, uint);

INSTANTIATE_ROUTING(1)
INSTANTIATE_ROUTING(2)
INSTANTIATE_ROUTING(4)
INSTANTIATE_ROUTING(8)
INSTANTIATE_ROUTING(16)
