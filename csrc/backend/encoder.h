// What executes Programs: MetalEncoder and HostEncoder derive from this.
#pragma once

#include "program.h"

namespace lily {

class Encoder {
 public:
  virtual ~Encoder() = default;

  // Issues every dispatch of the Program, in the order of bindings.schedule(), so that dispatches
  // of different levels do not overlap. May return before they have run; the caller keeps buffers
  // alive.
  virtual void encode(const Program& program, const Bindings& bindings) = 0;
};

}  // namespace lily
