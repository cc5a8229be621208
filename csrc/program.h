// A Program is what a primitive asks a GPU to do: an ordered list of kernel launches over named
// buffer slots. It is built once for a set of shapes; each step only binds buffers and scalars.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <variant>
#include <vector>

#include "kernels.h"

namespace lily {

enum class SlotKind : uint8_t { weight, cache, input, output, scratch };
const char* to_string(SlotKind k);
SlotKind parse_slot_kind(const std::string& text);

struct SlotId {
  int index = -1;
};
struct ScalarId {
  int index = -1;
};

struct Slot {
  std::string name;
  SlotKind kind;
  size_t bytes;
  size_t arena_offset = 0;  // scratch only, set by Program::finish
  bool written = false;
};

inline bool overlap(size_t a, size_t a_bytes, size_t b, size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

// Bytes of a slot; by default all of it.
struct Range {
  static constexpr size_t kToEnd = ~size_t{0};
  size_t offset = 0;
  size_t bytes = kToEnd;
};

// `fixed`, or fixed + each * scalar where a scalar is named (a KV cache read grows by the step).
struct Amount {
  size_t fixed = 0;
  ScalarId scalar;
  size_t each = 0;
};

struct BufferArgument {
  int index;
  SlotId slot;
  size_t offset;  // in the slot
  size_t bytes;   // all the kernel may touch: what hazards are computed from
  Access access;
  Amount traffic;  // what it does touch, each byte once: what reports count
};
struct ScalarArgument {
  int index;
  ScalarId scalar;
};
struct ValueArgument {
  int index;
  Value value;
};
struct ThreadgroupMemory {
  int index;
  size_t bytes;
};
struct Constant {
  int id;
  Value value;
};

// One dimension of a grid: a number, or a scalar that each step sets.
struct Extent {
  Extent(uint32_t count) : count(count) {}
  Extent(ScalarId scalar) : count(0), scalar(scalar) {}
  uint32_t count;
  ScalarId scalar;
};

// One kernel launch. Arguments are given by the name they have in the kernel, and checked against
// its layout at once; Program::add checks that none is missing.
class Dispatch {
 public:
  explicit Dispatch(const Kernel& kernel);

  Dispatch& constant(const std::string& name, Value value);
  Dispatch& read(const std::string& name, SlotId slot, Range range = {});
  Dispatch& write(const std::string& name, SlotId slot, Range range = {});
  Dispatch& read_write(const std::string& name, SlotId slot, Range range = {});
  // Bytes that the buffer argument just given moves, where that is less than its range.
  Dispatch& traffic(Amount amount);
  Dispatch& value(const std::string& name, Value value);
  Dispatch& scalar(const std::string& name, ScalarId scalar);
  Dispatch& threadgroup_memory(const std::string& name, size_t bytes);
  Dispatch& grid(Extent x, Extent y = 1, Extent z = 1);  // in threadgroups
  Dispatch& threads(uint32_t x, uint32_t y = 1, uint32_t z = 1);
  // Two arguments of this launch may share bytes although one is written.
  Dispatch& in_place(const std::string& a, const std::string& b);
  Dispatch& label(std::string text);
  Dispatch& layer(int layer, std::string phase = "");

  const Kernel* kernel;
  std::vector<Constant> constants;
  std::vector<BufferArgument> buffers;
  std::vector<ScalarArgument> scalars;
  std::vector<ValueArgument> values;
  std::vector<ThreadgroupMemory> threadgroup;
  Extent grid_size[3] = {1, 1, 1};
  uint32_t group_size[3] = {1, 1, 1};
  std::vector<std::pair<int, int>> may_alias;
  std::string name;  // the label
  int layer_index = -1;
  std::string phase;
  int pipeline = -1;  // index into Program::pipelines, set by Program::add

 private:
  Dispatch& buffer(const std::string& name, SlotId slot, Range range, Access access);
  const ArgumentLayout& take(const std::string& name, bool is_threadgroup);
};

// A kernel with its constants: what a backend compiles. `key` names it apart from all others.
struct Pipeline {
  const Kernel* kernel;
  std::vector<Constant> constants;
  std::string key;
};

Pipeline pipeline_of(const Dispatch& d);

// Where a slot's first byte is. Conflicts are overlaps of byte ranges in one buffer.
struct Location {
  uint64_t buffer;
  size_t offset;
};

struct Schedule {
  std::vector<int> level;                      // of each dispatch
  std::vector<int> order;                      // dispatches by level, then by program order
  std::vector<std::vector<int>> predecessors;  // of each dispatch, transitively reduced
  int levels = 0;
  int barriers() const {
    return levels > 0 ? levels - 1 : 0;
  }
};

struct Hazard {
  int first, second;  // program order
  std::string kind;   // "RAW", "WAR" or "WAW"
  std::string text;
};

struct Bytes {
  int dispatches = 0;
  size_t read = 0, written = 0;
};
struct Report {
  int dispatches = 0, levels = 0, barriers = 0;
  size_t read = 0, written = 0;  // declared traffic, summed over dispatches
  size_t weights = 0;            // distinct weight bytes: what no order of launches can avoid
  size_t arena = 0;
  std::map<std::string, Bytes> by_label;
};

class Bindings;

class Program {
 public:
  explicit Program(std::string name) : name_(std::move(name)) {}

  SlotId slot(std::string name, SlotKind kind, size_t bytes);
  SlotId scratch(std::string name, size_t bytes) {
    return slot(std::move(name), SlotKind::scratch, bytes);
  }
  ScalarId scalar(std::string name, Value initial);
  // Returns the dispatch's index. Throws std::invalid_argument for what the kernel does not expect.
  int add(Dispatch dispatch);
  // Each dispatch is a level of its own, and depends on the one before. Before finish().
  void make_serial() {
    check_open();
    serial_ = true;
  }
  bool serial() const {
    return serial_;
  }
  // Plans the scratch arena and the levels. Nothing can be added afterwards.
  void finish();
  bool finished() const {
    return finished_;
  }

  const std::string& name() const {
    return name_;
  }
  const std::vector<Dispatch>& dispatches() const {
    return dispatches_;
  }
  const std::vector<Slot>& slots() const {
    return slots_;
  }
  const std::vector<std::pair<std::string, Value>>& scalars() const {
    return scalars_;
  }
  const std::vector<Pipeline>& pipelines() const {
    return pipelines_;
  }
  size_t arena_bytes() const {
    return arena_bytes_;
  }
  // Throw std::invalid_argument for an unknown name.
  SlotId find_slot(const std::string& name) const;
  ScalarId find_scalar(const std::string& name) const;

  // The schedule where every slot has a buffer of its own (see Bindings::schedule).
  const Schedule& schedule() const;
  Schedule schedule(const std::vector<Location>& slots) const;
  // Every conflicting pair that `schedule` does not keep apart by a barrier and by its edges. Looks
  // at all pairs, sharing no code with the scheduler. Also conflicts inside one dispatch.
  std::vector<Hazard> check_hazards(const Schedule& schedule,
                                    const std::vector<Location>& slots) const;
  std::vector<Hazard> check_hazards() const;
  std::vector<Location> own_locations() const;
  Report report(const Bindings* bindings = nullptr) const;

 private:
  void check_open() const;
  int pipeline_of(const Dispatch& d);
  void plan_scratch();
  void check_scratch_is_written_first() const;

  std::string name_;
  std::vector<Slot> slots_;
  std::unordered_map<std::string, int> slot_index_;
  std::vector<std::pair<std::string, Value>> scalars_;
  std::vector<Dispatch> dispatches_;
  std::vector<Pipeline> pipelines_;
  size_t arena_bytes_ = 0;
  bool finished_ = false, serial_ = false;
  Schedule schedule_;
};

// A buffer of some backend. `base` is what that backend needs (an address, an MTL::Buffer*); two
// Buffers are the same memory exactly when their ids are equal.
struct Buffer {
  uint64_t id = 0;
  void* base = nullptr;
  size_t bytes = 0;
};

struct Place {
  Buffer buffer;
  size_t offset = 0;
};

// What one step gives to a Program: a buffer for each slot, a value for each scalar.
class Bindings {
 public:
  // The Program must be finished and outlive this object.
  explicit Bindings(const Program& program);

  const Program& program() const {
    return *program_;
  }
  void bind(SlotId slot, Buffer buffer, size_t offset = 0);
  void bind_arena(Buffer buffer, size_t offset = 0);
  void set(ScalarId scalar, Value value);

  const Value& scalar(ScalarId id) const {
    return scalars_[id.index];
  }
  uint32_t extent(const Extent& e) const;
  size_t amount(const Amount& a) const;
  // The slot's place, scratch included. Valid after schedule().
  Place place(SlotId slot) const;
  Place place(const BufferArgument& argument) const;
  std::vector<Location> locations() const;
  // Throws std::invalid_argument, naming the slot, where one is not bound. Slots that were bound to
  // the same bytes get the levels that this needs; otherwise it is the Program's own schedule.
  const Schedule& schedule() const;

 private:
  using Alias = std::tuple<int, int, ptrdiff_t>;
  void put(int slot, Buffer buffer, size_t offset, const std::string& name, size_t bytes);
  std::vector<Alias> aliases() const;

  const Program* program_;
  std::vector<std::optional<Place>>
      places_;  // one a slot, then the arena; scratch slots stay empty
  std::vector<Value> scalars_;
  std::unordered_map<uint64_t, std::vector<int>> slots_of_;  // by buffer id
  int unbound_ = 0;
  mutable const Schedule* current_ = nullptr;
  mutable std::map<std::vector<Alias>, std::shared_ptr<const Schedule>> schedules_;
};

}  // namespace lily
