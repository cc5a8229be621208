#include <algorithm>
#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace msl {
namespace {

// As in frontend/trace.cpp.
constexpr uint32_t kStore = 1, kAtomic = 2, kThreadgroup = 4, kReads = 8, kConstant = 16;
constexpr uint32_t kAlignShift = 8, kMaxAlign = 16;  // buffers are copied to multiples of 16
// As in mem_flags.
constexpr uint32_t kFlagDevice = 1, kFlagThreadgroup = 2;
constexpr uint64_t kPage = 1024, kLine = 128, kManyLines = 1 << 20;

template <class Region>
bool holds(const Region& region, const char* address) {
  return address >= region.data && address < region.data + region.bytes;
}

template <class Region>
int64_t distance(const Region& region, const char* address) {
  if (holds(region, address))
    return 0;
  return address < region.data ? region.data - address : address - (region.data + region.bytes) + 1;
}

// The region that an address outside all of them is nearest to.
template <class Region>
const Region* nearest(const Region* begin, const Region* end, const char* address) {
  return std::min_element(begin, end, [&](const Region& a, const Region& b) {
    return distance(a, address) < distance(b, address);
  });
}

}  // namespace

Checker::Checker(Launch& launch, Worker& owner) : launch_(launch), worker_(owner) {
  for (uint64_t i = 0; i < launch.variable_count; ++i) {
    const Variable& v = launch.variables[i];
    blocks_.push_back({v.name, static_cast<char*>(v.address()), v.bytes, {}, {}});
  }
  for (uint64_t i = 0; i < launch.constant_count; ++i) {
    const Variable& v = launch.constants[i];
    tables_.push_back({v.name, static_cast<char*>(v.address()), v.bytes, {}, {}});
  }
}

void Checker::addThreadgroupArgument(uint32_t index, char* data, uint64_t bytes) {
  blocks_.push_back({"threadgroup(" + std::to_string(index) + ")", data, bytes, {}, {}});
}

void Checker::beginThreadgroup(uint64_t index) {
  threadgroup_ = index;
  ++serial_;
  first_epoch_ = threadgroup_epoch_ = device_epoch_ = ++epoch_;
}

void Checker::endThreadgroup() {
  for (auto& [key, lines] : lines_)
    flush(lines);
  lines_.clear();
}

void Checker::threadgroupBarrier(uint32_t flags) {
  ++epoch_;
  if (flags & kFlagThreadgroup)
    threadgroup_epoch_ = epoch_;
  if (flags & kFlagDevice)
    device_epoch_ = epoch_;
}

void Checker::simdgroupBarrier(Simdgroup& simdgroup, uint32_t flags) {
  if (flags & kFlagThreadgroup)
    ++simdgroup.epoch;
  if (flags & kFlagDevice)
    ++simdgroup.device_epoch;
}

// One entry for each kind at each pair of places.
void Checker::report(const Fault& fault) {
  char key[128];
  std::snprintf(key, sizeof key, "%u %p %p %d", fault.kind, static_cast<const void*>(fault.site),
                static_cast<const void*>(fault.other_site), fault.buffer);
  auto [found, fresh] = known_.try_emplace(key, launch_.fault_count);
  if (fresh) {
    if (launch_.fault_count < launch_.fault_capacity)
      launch_.faults[launch_.fault_count] = fault;
    ++launch_.fault_count;
  }
  if (found->second < launch_.fault_capacity)
    ++launch_.faults[found->second].count;
}

Fault Checker::describe(FaultKind kind, const Now& now, int64_t byte) const {
  Fault fault{};
  fault.kind = kind;
  fault.store = now.store;
  fault.site = now.site;
  fault.thread = fault.other = identify(worker_.current);
  fault.buffer = now.buffer ? now.buffer->index : -1;
  fault.byte = byte;
  if (now.block)
    std::snprintf(fault.variable, sizeof fault.variable, "%s", now.block->name.c_str());
  return fault;
}

// Reports, and gives the access another place to go to.
char* Checker::outOfBounds(const Now& now, int64_t byte) {
  Fault fault = describe(kOutOfBounds, now, byte);
  fault.lanes = now.size;
  report(fault);
  return scratch(now.size);
}

char* Checker::scratch(uint32_t size) {
  if (scratch_.size() < size + 64)
    scratch_.resize(size + 64);
  auto base = reinterpret_cast<uintptr_t>(scratch_.data());
  return scratch_.data() + (64 - base % 64) % 64;
}

void Checker::race(const Access& earlier, bool grid, bool wrote, uint64_t at, const Now& now) {
  Fault fault = describe(grid         ? kGridRace
                         : now.device ? kDeviceRace
                                      : kThreadgroupRace,
                         now, static_cast<int64_t>(at));
  fault.other_site = earlier.site;
  fault.lanes = wrote;
  fault.other.thread = earlier.thread;
  fault.other.simdgroup = earlier.thread / kSimdWidth;
  fault.other.lane = earlier.thread % kSimdWidth;
  if (grid) {
    const uint32_t* size = launch_.grid;
    fault.other.threadgroup[0] = earlier.threadgroup % size[0];
    fault.other.threadgroup[1] = earlier.threadgroup / size[0] % size[1];
    fault.other.threadgroup[2] = earlier.threadgroup / size[0] / size[1];
  }
  report(fault);
}

// Two accesses to one byte, one of them a write, must have a barrier between them: of the
// threadgroup, or of the simdgroup when both threads are in it. Nothing orders two threadgroups.
// Atomic accesses do not race with each other.
void Checker::track(Byte* bytes, uint64_t at, const Now& now) {
  const Fiber& fiber = *worker_.current;
  const Simdgroup& group = *fiber.simdgroup;
  const uint32_t epoch = now.device ? device_epoch_ : threadgroup_epoch_;
  const uint32_t simd_epoch = now.device ? group.device_epoch : group.epoch;
  const auto thread = static_cast<uint16_t>(fiber.context.thread_index_in_threadgroup);
  const Access me{epoch,  simd_epoch, static_cast<uint32_t>(threadgroup_),
                  thread, now.atomic, now.site};

  auto grid = [&](const Access& a) { return now.device && a.epoch < first_epoch_; };
  auto conflicts = [&](const Access& a, bool many_lanes, bool many_groups) {
    if (!a.site || (a.atomic && now.atomic))
      return false;
    if (grid(a))
      return true;
    if (a.epoch < epoch)
      return false;
    if (many_groups || a.thread / kSimdWidth != thread / kSimdWidth)
      return true;
    return a.simd_epoch == simd_epoch && (many_lanes || a.thread != thread);
  };

  for (uint32_t i = 0; i < now.size; ++i) {
    Byte& byte = bytes[i];
    Access& read = byte.read;
    if (conflicts(byte.write, false, false)) {
      race(byte.write, grid(byte.write), true, at + i, now);
    } else if (conflicts(byte.plain, false, false)) {
      race(byte.plain, grid(byte.plain), true, at + i, now);
    } else if (now.store && conflicts(byte.foreign, false, false)) {
      race(byte.foreign, true, false, at + i, now);
    } else if (now.store && conflicts(read, byte.many_lanes, byte.many_simdgroups)) {
      race(read, grid(read), false, at + i, now);
    }
    if (now.store) {
      if (now.atomic && !byte.write.atomic)
        byte.plain = byte.write;
      byte.write = me;
      continue;
    }
    bool atomic = now.atomic;
    if (read.site && read.epoch == epoch) {
      if (read.thread / kSimdWidth != thread / kSimdWidth) {
        byte.many_simdgroups = true;
      } else if (read.simd_epoch != simd_epoch) {
        byte.many_lanes = false;
      } else if (read.thread != thread) {
        byte.many_lanes = true;
      }
      atomic = atomic && read.atomic;
    } else {
      if (read.site && grid(read))
        byte.foreign = read;
      byte.many_lanes = byte.many_simdgroups = false;
    }
    read = me;
    read.atomic = atomic;
  }
}

char* Checker::threadgroupAccess(char* address, Now& now) {
  if (last_block_ >= blocks_.size() || !holds(blocks_[last_block_], address)) {
    auto found = std::find_if(blocks_.begin(), blocks_.end(),
                              [&](const Block& b) { return holds(b, address); });
    if (found == blocks_.end()) {
      if (blocks_.empty())
        return outOfBounds(now, 0);
      now.block = nearest(blocks_.data(), blocks_.data() + blocks_.size(), address);
      return outOfBounds(now, address - now.block->data);
    }
    last_block_ = found - blocks_.begin();
  }
  Block& block = blocks_[last_block_];
  now.block = &block;
  uint64_t at = address - block.data;
  if (at + now.size > block.bytes)
    return outOfBounds(now, at);
  if (block.shadow.empty()) {
    block.shadow.resize(block.bytes);
    block.written.resize(block.bytes);
  }
  for (uint64_t i = at; now.reads && i < at + now.size; ++i)
    if (block.written[i] != serial_) {
      report(describe(kUninitialisedThreadgroup, now, i));
      block.written[i] = serial_;  // once
    }
  if (now.store)
    std::fill_n(block.written.begin() + at, now.size, serial_);
  track(&block.shadow[at], at, now);
  return address;
}

Checker::Byte* Checker::shadow(uint64_t page) {
  if (page != last_page_) {
    auto& bytes = pages_[page];
    if (bytes.empty())
      bytes.resize(kPage);
    last_page_ = page;
    last_shadow_ = bytes.data();
  }
  return last_shadow_;
}

// The table at program scope that an address lies in or, when no buffer is nearer, beside.
const Checker::Block* Checker::table(const char* address) {
  if (last_table_ < tables_.size() && holds(tables_[last_table_], address))
    return &tables_[last_table_];
  const Block* found = nearest(tables_.data(), tables_.data() + tables_.size(), address);
  if (tables_.empty())
    return nullptr;
  const Buffer* end = launch_.buffers + launch_.buffer_count;
  const Buffer* buffer = nearest(launch_.buffers, end, address);
  if (buffer != end && distance(*buffer, address) < distance(*found, address))
    return nullptr;
  last_table_ = found - tables_.data();
  return found;
}

char* Checker::deviceAccess(char* address, Now& now) {
  const Buffer* begin = launch_.buffers;
  const Buffer* end = begin + launch_.buffer_count;
  // Several arguments may share memory; a store belongs to one that may be written.
  auto fits = [&](const Buffer& b) {
    return holds(b, address) && (now.store ? b.may_write : b.may_read);
  };
  if (last_buffer_ >= launch_.buffer_count || !fits(begin[last_buffer_])) {
    const Buffer* found = std::find_if(begin, end, fits);
    if (found == end)
      found = std::find_if(begin, end, [&](const Buffer& b) { return holds(b, address); });
    if (found == end) {
      if (const Block* table = now.constant ? this->table(address) : nullptr) {
        now.block = table;
        int64_t at = address - table->data;
        bool inside = at >= 0 && at + now.size <= table->bytes;
        return inside ? address : outOfBounds(now, at);
      }
      if (begin == end)
        return outOfBounds(now, 0);
      now.buffer = nearest(begin, end, address);
      return outOfBounds(now, address - now.buffer->data);
    }
    last_buffer_ = found - begin;
  }
  const Buffer& buffer = begin[last_buffer_];
  now.buffer = &buffer;
  uint64_t at = address - buffer.data;
  if (at + now.size > buffer.bytes)
    return outOfBounds(now, at);
  if (now.store && !buffer.may_write) {
    report(describe(kWriteToReadOnly, now, at));
    return std::copy_n(address, now.size, scratch(now.size)) - now.size;  // an update reads it
  }
  if (now.reads && !buffer.may_read)
    report(describe(kReadOfWriteOnly, now, at));
  Traffic& traffic = launch_.traffic[last_buffer_];
  traffic.stores += now.store;
  traffic.store_bytes += now.store ? now.size : 0;
  traffic.loads += now.reads;
  traffic.load_bytes += now.reads ? now.size : 0;
  if (launch_.lines)
    countLines(address, now);
  if (buffer.initialised) {
    uint8_t* flags = buffer.initialised + at;
    const uint8_t* fresh = now.reads ? std::find(flags, flags + now.size, 0) : flags + now.size;
    if (fresh != flags + now.size)
      report(describe(kUninitialisedDevice, now, static_cast<int64_t>(fresh - flags + at)));
    if (now.store)
      std::memset(flags, 1, now.size);
  }
  if (buffer.shared_writable) {
    auto base = reinterpret_cast<uint64_t>(address);
    Now part = now;
    for (uint64_t done = 0; done < now.size; done += part.size) {
      uint64_t offset = (base + done) % kPage;
      part.size = static_cast<uint32_t>(std::min<uint64_t>(now.size - done, kPage - offset));
      track(shadow((base + done) / kPage) + offset, at + done, part);
    }
  }
  return address;
}

char* Checker::access(char* address, uint32_t size, uint32_t flags, const Site* site) {
  bool store = flags & kStore, device = !(flags & kThreadgroup);
  Now now{site,
          size,
          store,
          !store || flags & kReads,
          (flags & kAtomic) != 0,
          device,
          (flags & kConstant) != 0,
          {},
          {}};
  char* place = device ? deviceAccess(address, now) : threadgroupAccess(address, now);
  uint32_t align = std::min(flags >> kAlignShift, kMaxAlign);
  if (place != address || reinterpret_cast<uintptr_t>(address) % align == 0)
    return place;
  Fault fault =
      describe(kMisaligned, now, address - (now.block ? now.block->data : now.buffer->data));
  fault.lanes = align;
  report(fault);
  // An atomic operation may not cross a line everywhere.
  return now.atomic ? std::copy_n(address, size, scratch(size)) - size : address;
}

// A thread's own array; the compiler has left only those accesses that may miss it.
char* Checker::threadAccess(char* address, uint32_t size, bool store, const char* array,
                            uint32_t bytes, const Site* site) {
  int64_t at = address - array;
  if (at >= 0 && at + size <= bytes)
    return address;
  return outOfBounds({site, size, store, !store, false, false, false, {}, {}}, at);
}

void Checker::reportHere(FaultKind kind, const Site* site, uint32_t detail) {
  Fault fault = describe(kind, {site, 0, false, true, false, false, false, {}, {}}, 0);
  fault.lanes = detail;
  report(fault);
}

// The n-th execution of one place by each lane of a simdgroup is one access of the simdgroup.
void Checker::countLines(const char* address, const Now& now) {
  const Context& c = worker_.current->context;
  uint64_t key = (reinterpret_cast<uint64_t>(now.site) << 12) ^
                 (static_cast<uint64_t>(c.simdgroup_index_in_threadgroup) << 7) ^
                 (last_buffer_ << 1) ^ now.store;
  Lines& lines = lines_[key];
  lines.site = now.site;
  lines.buffer = static_cast<uint32_t>(last_buffer_);
  lines.store = now.store;
  uint32_t n = lines.executed[c.thread_index_in_simdgroup]++;
  auto base = reinterpret_cast<uint64_t>(address);
  for (uint64_t line = base / kLine; line <= (base + now.size - 1) / kLine; ++line)
    lines.touched.push_back({n, line});
  if (lines.touched.size() > kManyLines) {  // drop repeats early
    std::sort(lines.touched.begin(), lines.touched.end());
    lines.touched.erase(std::unique(lines.touched.begin(), lines.touched.end()),
                        lines.touched.end());
  }
}

void Checker::flush(Lines& lines) {
  auto& touched = lines.touched;
  std::sort(touched.begin(), touched.end());
  touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
  uint64_t accesses = *std::max_element(lines.executed, lines.executed + kSimdWidth);
  Traffic& traffic = launch_.traffic[lines.buffer];
  (lines.store ? traffic.store_lines : traffic.load_lines) += touched.size();
  (lines.store ? traffic.store_accesses : traffic.load_accesses) += accesses;
}

extern "C" char* __msl_access(char* address, uint32_t size, uint32_t flags, const Site* site) {
  Worker* w = worker;
  if (!w || !w->checker || !size)
    return address;
  return w->checker->access(address, size, flags, site);
}

extern "C" char* __msl_thread_access(char* address, uint32_t size, uint32_t flags,
                                     const char* array, uint32_t bytes, const Site* site) {
  Worker* w = worker;
  if (!w || !w->checker)
    return address;
  return w->checker->threadAccess(address, size, flags & kStore, array, bytes, site);
}

// The divisor to use. bits: of a signed division, 0 for an unsigned one.
extern "C" int64_t __msl_divisor(int64_t dividend, int64_t divisor, uint32_t bits,
                                 const Site* site) {
  bool overflows = bits && divisor == -1 && dividend == INT64_MIN >> (64 - bits);
  if (divisor && !overflows)
    return divisor;
  if (Worker* w = worker; w && w->checker)
    w->checker->reportHere(kDivision, site, overflows);
  return 1;
}

// An index into a thread's part of a cooperative tensor that is outside it.
extern "C" int32_t __msl_index(int32_t index, uint32_t capacity, uint32_t size, const Site* site) {
  if (Worker* w = worker; w && w->checker)
    w->checker->threadAccess(reinterpret_cast<char*>(static_cast<int64_t>(index) * size), size,
                             false, nullptr, capacity * size, site);
  return 0;
}

extern "C" void __msl_uninitialised(const Site* site) {
  if (Worker* w = worker; w && w->checker)
    w->checker->reportHere(kUninitialisedThread, site, 0);
}

}  // namespace msl
