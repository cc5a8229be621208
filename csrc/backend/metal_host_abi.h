// How a program that embeds the Metal host launches kernels: the structs of its runtime, a C
// interface of plain data. The runtime exports msl_abi, the sizes and offsets that its own have;
// HostEncoder compares them with these.
#pragma once

#include <cstddef>
#include <cstdint>

namespace msl {

constexpr uint32_t kMaxThreadgroupArguments = 8;

// A place in the source, made by frontend/trace.cpp.
struct Site {
  const char* file;
  uint32_t line, column, order;
  const char* function;
};

struct ThreadId {
  uint32_t threadgroup[3], thread, simdgroup, lane;
};

struct Fault {
  uint32_t kind, store;  // store: the access at `site` writes
  const Site *site, *other_site;
  ThreadId thread, other;
  int32_t buffer;  // argument index; -1: a threadgroup variable or none
  uint32_t lanes;  // by kind: mask of lanes, count of threads, bytes, alignment, or a flag
  int64_t byte;    // within the buffer or variable
  uint64_t count;  // how often this pair of places did it
  char variable[64];
};

struct Buffer {
  char* data;
  uint64_t bytes;
  uint8_t* initialised;  // one byte per byte, or null when all of it is
  int32_t index;
  uint32_t may_read, may_write, shared_writable;  // last: some argument that overlaps may write
};

struct Traffic {
  uint64_t loads, stores, load_bytes, store_bytes, load_lines, store_lines, load_accesses,
      store_accesses;
};

struct Variable {  // made by frontend/trace.cpp
  const char* name;
  uint64_t bytes;
  void* (*address)();
};

struct Launch {
  void (*stub)(const void* context, void* const* arguments);
  void* const* arguments;
  uint32_t grid[3], threadgroup[3];
  uint32_t threadgroup_bytes[kMaxThreadgroupArguments];
  uint32_t workers, checked, lines, shuffled;
  uint64_t seed;
  const Buffer* buffers;
  const Variable *variables, *constants;  // threadgroup variables, tables at program scope
  uint64_t buffer_count, variable_count, constant_count;
  Fault* faults;
  uint64_t fault_capacity, fault_count;  // count may exceed capacity
  Traffic* traffic;                      // one per buffer
  uint64_t barriers, exchanges, partial_exchanges;
};

// As the runtime counts itself.
constexpr uint64_t kAbi[] = {sizeof(Site),
                             sizeof(Fault),
                             offsetof(Fault, variable),
                             sizeof(Buffer),
                             sizeof(Traffic),
                             sizeof(Variable),
                             sizeof(Launch),
                             offsetof(Launch, workers),
                             offsetof(Launch, buffers),
                             offsetof(Launch, faults),
                             offsetof(Launch, barriers)};

}  // namespace msl
