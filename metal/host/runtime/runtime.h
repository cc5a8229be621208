// Runs compiled Metal kernels on a CPU: one fiber per GPU thread, 32 fibers per simdgroup, one
// threadgroup per OS thread at a time. The structs up to Launch are shared with launch.py.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

namespace msl {

constexpr uint32_t kSimdWidth = 32;
constexpr uint32_t kMaxThreadgroupArguments = 8;

// What a kernel's attributes ask for; the field names are the attributes'.
struct Context {
  uint32_t thread_position_in_grid[3], thread_position_in_threadgroup[3];
  uint32_t threadgroup_position_in_grid[3], threads_per_threadgroup[3];
  uint32_t threads_per_grid[3], threadgroups_per_grid[3];
  uint32_t thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  uint32_t simdgroups_per_threadgroup;
  void* threadgroup_memory[kMaxThreadgroupArguments];
};
using Stub = void (*)(const Context*, void* const* arguments);

// A place in the source, made by frontend/trace.cpp.
struct Site {
  const char* file;
  uint32_t line, column, order;
  const char* function;
};

enum FaultKind : uint32_t {
  kThreadgroupRace,
  kDeviceRace,
  kGridRace,
  kOutOfBounds,
  kDivergentBarrier,
  kDivergentSimd,
  kUninitialisedThreadgroup,
  kUninitialisedDevice,
  kWriteToReadOnly,
  kReadOfWriteOnly,
  kMisaligned,
  kDivision,
  kUninitialisedThread,
  kFaultKinds
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
  Stub stub;
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

struct Exchanged {
  uint64_t value[kSimdWidth], reduced;
  uint32_t mask, done;
};

struct Simdgroup;
struct Fiber {
  void* stack_pointer;
  char* stack;
  Simdgroup* simdgroup;
  const Site* waiting;  // where, while at a simdgroup operation
  Context context;
};

struct Simdgroup {
  Exchanged exchanged;
  uint64_t pending[kSimdWidth];
  Fiber* fibers[kSimdWidth];
  const Site* site;
  uint32_t size, active, arrived, arrived_mask;
  bool mixed;
  uint32_t epoch, device_epoch;
};

class Checker;

struct Worker {
  Launch* launch = nullptr;
  Checker* checker = nullptr;
  Fiber* current = nullptr;
  void* scheduler = nullptr;
  std::vector<Fiber> fibers;
  std::vector<Simdgroup> simdgroups;
  std::vector<Fiber*> ready;
  uint32_t live = 0, waiting = 0, size = 0;
  const Site* barrier_site = nullptr;
  const Site* barrier_other = nullptr;
  Fiber *barrier_fiber = nullptr, *barrier_other_fiber = nullptr;
  uint32_t barrier_flags = 0;
  std::vector<Fiber*> at_barrier;
  std::minstd_rand random;
  std::vector<char> memory;
  uint64_t barriers = 0, exchanges = 0, partial = 0;
};
extern thread_local Worker* worker;

ThreadId identify(const Fiber* fiber);

// Finds faults and counts traffic. Threadgroups run one after the other under it.
class Checker {
 public:
  Checker(Launch& launch, Worker& owner);
  void beginThreadgroup(uint64_t index);
  void endThreadgroup();
  void addThreadgroupArgument(uint32_t index, char* data, uint64_t bytes);
  void threadgroupBarrier(uint32_t flags);
  void simdgroupBarrier(Simdgroup& simdgroup, uint32_t flags);
  char* access(char* address, uint32_t size, uint32_t flags, const Site* site);
  char* threadAccess(char* address, uint32_t size, bool store, const char* array, uint32_t bytes,
                     const Site* site);
  void reportHere(FaultKind kind, const Site* site, uint32_t detail);
  void report(const Fault& fault);

 private:
  // Last writer and reader of one byte, the last plain writer before an atomic one, and the last
  // reader in an earlier threadgroup.
  struct Access {
    uint32_t epoch = 0, simd_epoch = 0, threadgroup = 0;
    uint16_t thread = 0;
    bool atomic = false;
    const Site* site = nullptr;
  };
  struct Byte {
    Access write, plain, read, foreign;
    bool many_lanes = false, many_simdgroups = false;
  };
  struct Block {  // a threadgroup variable or argument, or a table at program scope
    std::string name;
    char* data;
    uint64_t bytes;
    std::vector<Byte> shadow;
    std::vector<uint32_t> written;  // serial of the threadgroup that last wrote the byte
  };
  struct Lines {
    const Site* site = nullptr;
    uint32_t buffer = 0;
    bool store = false;
    uint32_t executed[kSimdWidth] = {};
    std::vector<std::pair<uint32_t, uint64_t>> touched;  // (execution, line)
  };
  struct Now {  // the access under way
    const Site* site;
    uint32_t size;
    bool store, reads, atomic, device, constant;
    const Block* block;    // null for a buffer
    const Buffer* buffer;  // null for threadgroup memory and tables
  };

  char* threadgroupAccess(char* address, Now& now);
  char* deviceAccess(char* address, Now& now);
  const Block* table(const char* address);
  char* outOfBounds(const Now& now, int64_t byte);
  char* scratch(uint32_t size);
  void track(Byte* bytes, uint64_t at, const Now& now);
  void race(const Access& earlier, bool grid, bool wrote, uint64_t at, const Now& now);
  Fault describe(FaultKind kind, const Now& now, int64_t byte) const;
  Byte* shadow(uint64_t page);
  void countLines(const char* address, const Now& now);
  void flush(Lines& lines);

  Launch& launch_;
  Worker& worker_;
  uint32_t epoch_ = 1, threadgroup_epoch_ = 1, device_epoch_ = 1, first_epoch_ = 1;
  uint64_t threadgroup_ = 0;
  uint32_t serial_ = 0;
  size_t last_buffer_ = 0, last_block_ = 0, last_table_ = 0;
  uint64_t last_page_ = ~0ull;
  Byte* last_shadow_ = nullptr;
  std::vector<Block> blocks_, tables_;
  std::unordered_map<uint64_t, std::vector<Byte>> pages_;
  std::unordered_map<uint64_t, Lines> lines_;
  std::unordered_map<std::string, size_t> known_;
  std::vector<char> scratch_;
};

}  // namespace msl
