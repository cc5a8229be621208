// Executes Programs on the CPU, with kernels that metal/host compiled from the Metal source: what
// tests run is the very list of launches that a GPU would get.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "backend/encoder.h"

namespace lily {

struct HostOptions {
  // For libraries compiled by the checked host: a touch outside the declared ranges, a race, a read
  // of scratch that nothing has written and the like throw std::runtime_error.
  bool checked = false;
  uint32_t workers = 1;
  // Not 0: shuffles threads, threadgroups, and the dispatches of each level.
  uint64_t seed = 0;
};

class HostEncoder : public Encoder {
 public:
  // What the kernels of one dispatch moved through one argument, every access counted (checked).
  struct Moved {
    int dispatch;
    int argument;
    uint64_t loaded, stored;
  };

  // `runtime`: the shared library of metal/host that has msl_launch.
  HostEncoder(const std::string& runtime, HostOptions options);

  // `library` holds the launch stub `stub` of the pipeline with this key.
  void add(const std::string& pipeline, const std::string& library, const std::string& stub);
  void encode(const Program& program, const Bindings& bindings) override;
  // Of the last encode.
  const std::vector<Moved>& moved() const {
    return moved_;
  }

 private:
  struct Compiled {
    void* stub;
    const void* variables = nullptr;  // threadgroup variables, of checked libraries
    uint64_t variable_count = 0;
    const void* constants = nullptr;  // tables at program scope, of checked libraries
    uint64_t constant_count = 0;
  };
  class Run;

  HostOptions options_;
  void* launch_;
  const char* (*words_)(uint32_t);
  std::map<std::string, Compiled> compiled_;
  std::vector<Moved> moved_;
};

}  // namespace lily
