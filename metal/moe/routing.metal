// Instantiations of routing.h; _eN serves up to 32 N experts.
#include "moe/routing.h"

#define INSTANTIATE_ROUTING(EPL)                                                          \
  template [[host_name("route_topk_e" #EPL)]] [[kernel]] decltype(route_topk<EPL>)        \
      route_topk<EPL>;                                                                    \
  template [[host_name("route_small_e" #EPL)]] [[kernel]] decltype(route_small<EPL>)      \
      route_small<EPL>;

INSTANTIATE_ROUTING(1)
INSTANTIATE_ROUTING(2)
INSTANTIATE_ROUTING(4)
INSTANTIATE_ROUTING(8)
INSTANTIATE_ROUTING(16)
