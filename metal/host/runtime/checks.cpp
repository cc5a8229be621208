#include <algorithm>
#include <cstdio>
#include <cstring>

#include "runtime.h"

namespace msl {
namespace {

constexpr uint32_t kStore = 1, kAtomic = 2, kThreadgroup = 4,
                   kReads = 8;                             // as in frontend/trace.cpp
constexpr uint32_t kFlagDevice = 1, kFlagThreadgroup = 2;  // mem_flags
constexpr uint64_t kPage = 1024, kLine = 128;

}  // namespace

Checker::Checker(Launch& launch, Worker& owner) : launch_(launch), worker_(owner) {
  for (uint64_t i = 0; i < launch.variable_count; ++i) {
    const Variable& v = launch.variables[i];
    blocks_.push_back({v.name, static_cast<char*>(v.address()), v.bytes, {}, {}});
  }
  arguments_from_ = blocks_.size();
}

void Checker::addThreadgroupArgument(uint32_t index, char* data, uint64_t bytes) {
  blocks_.push_back({"threadgroup(" + std::to_string(index) + ")", data, bytes, {}, {}});
}

void Checker::beginThreadgroup(uint64_t index) {
  threadgroup_ = index;
  ++serial_;
  first_epoch_ = threadgroup_epoch_ = device_epoch_ = ++epoch_;
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

void Checker::report(Fault fault) {
  char key[128];
  std::snprintf(key, sizeof key, "%u %p %p %d", fault.kind, static_cast<const void*>(fault.site),
                static_cast<const void*>(fault.other_site), fault.buffer);
  auto [found, fresh] = known_.try_emplace(key, launch_.fault_count);
  if (fresh) {
    fault.count = 1;
    if (launch_.fault_count < launch_.fault_capacity)
      launch_.faults[launch_.fault_count] = fault;
    ++launch_.fault_count;
  } else if (found->second < launch_.fault_capacity) {
    ++launch_.faults[found->second].count;
  }
}

Fault Checker::begin(FaultKind kind, const Site* site, bool store) {
  Fault f{};
  f.kind = kind;
  f.store = store;
  f.site = site;
  f.thread = f.other = identify(worker_.current);
  f.buffer = -1;
  return f;
}

ThreadId Checker::other(const Access& access, bool device) const {
  ThreadId id = identify(worker_.current);
  id.thread = access.thread;
  id.simdgroup = access.thread / kSimdWidth;
  id.lane = access.thread % kSimdWidth;
  if (device) {
    const uint32_t* grid = launch_.grid;
    id.threadgroup[0] = access.threadgroup % grid[0];
    id.threadgroup[1] = access.threadgroup / grid[0] % grid[1];
    id.threadgroup[2] = access.threadgroup / grid[0] / grid[1];
  }
  return id;
}

// Two accesses to one byte, one of them a write, must have a barrier between them: of the
// threadgroup, or of the simdgroup when both threads are in it. Between threadgroups nothing orders
// them. Atomic accesses do not race with each other.
void Checker::track(Byte& byte, bool device, bool store, bool atomic, const Site* site,
                    Fault& fault) {
  const Context& context = worker_.current->context;
  const Simdgroup& group = *worker_.current->simdgroup;
  uint32_t epoch = device ? device_epoch_ : threadgroup_epoch_;
  uint32_t simd_epoch = device ? group.device_epoch : group.epoch;
  auto thread = static_cast<uint16_t>(context.thread_index_in_threadgroup);
  uint32_t simdgroup = context.simdgroup_index_in_threadgroup;

  auto conflicts = [&](const Access& a, bool many_lanes, bool many_groups) {
    if (!a.site || (a.atomic && atomic))
      return false;
    if (device && a.epoch < first_epoch_)
      return true;  // an earlier threadgroup
    if (a.epoch < epoch)
      return false;
    if (many_groups || a.thread / kSimdWidth != simdgroup)
      return true;
    return a.simd_epoch == simd_epoch && (many_lanes || a.thread != thread);
  };
  auto race = [&](const Access& a, bool writes) {
    bool grid = device && a.epoch < first_epoch_;
    fault.kind = grid ? kGridRace : device ? kDeviceRace : kThreadgroupRace;
    fault.store = store;
    fault.other_site = a.site;
    fault.other = other(a, device);
    fault.lanes = writes;
    report(fault);
  };

  if (conflicts(byte.write, false, false)) {
    race(byte.write, true);
  } else if (store) {
    if (byte.other_threadgroup && !(byte.read.atomic && atomic)) {
      Access earlier = byte.read;
      earlier.epoch = 0;
      race(earlier, false);
    } else if (conflicts(byte.read, byte.many_lanes, byte.many_simdgroups)) {
      race(byte.read, false);
    }
  }
  Access now{epoch, simd_epoch, static_cast<uint32_t>(threadgroup_), thread, atomic, site};
  if (store) {
    byte.write = now;
    return;
  }
  Access& read = byte.read;
  if (read.site && read.epoch >= first_epoch_ && read.epoch == epoch) {
    if (read.thread / kSimdWidth != simdgroup) {
      byte.many_simdgroups = true;
    } else if (read.simd_epoch != simd_epoch) {
      byte.many_lanes = false;
    } else if (read.thread != thread) {
      byte.many_lanes = true;
    }
    now.atomic = atomic && read.atomic;
  } else {
    if (read.site && device && read.epoch < first_epoch_)
      byte.other_threadgroup = true;
    byte.many_lanes = byte.many_simdgroups = false;
  }
  read = now;
}

char* Checker::threadgroupAccess(char* address, uint32_t size, uint32_t flags, const Site* site) {
  bool store = flags & kStore, reads = !store || flags & kReads;
  auto holds = [&](const Block& b) { return address >= b.data && address < b.data + b.bytes; };
  if (last_block_ >= blocks_.size() || !holds(blocks_[last_block_])) {
    auto found = std::find_if(blocks_.begin(), blocks_.end(), holds);
    if (found == blocks_.end()) {
      Fault f = begin(kOutOfBounds, site, store);
      f.lanes = size;
      const Block* nearest = nullptr;
      int64_t best = INT64_MAX;
      for (const Block& b : blocks_) {
        int64_t away = address < b.data ? b.data - address : address - (b.data + b.bytes) + 1;
        if (away < best) {
          best = away;
          nearest = &b;
        }
      }
      if (nearest) {
        f.byte = address - nearest->data;
        std::snprintf(f.variable, sizeof f.variable, "%s", nearest->name.c_str());
      }
      report(f);
      return size <= sizeof scratch_ ? scratch_ : nullptr;
    }
    last_block_ = found - blocks_.begin();
  }
  Block& block = blocks_[last_block_];
  if (block.shadow.empty()) {
    block.shadow.resize(block.bytes);
    block.written.resize(block.bytes);
  }
  Fault f = begin(kUninitialisedThreadgroup, site, store);
  std::snprintf(f.variable, sizeof f.variable, "%s", block.name.c_str());
  uint64_t at = address - block.data;
  if (at + size > block.bytes) {
    f.kind = kOutOfBounds;
    f.byte = at;
    f.lanes = size;
    report(f);
    return size <= sizeof scratch_ ? scratch_ : nullptr;
  }
  for (uint64_t i = at; i < at + size; ++i) {
    f.byte = i;
    if (reads && block.written[i] != serial_) {
      f.kind = kUninitialisedThreadgroup;
      f.other_site = nullptr;
      report(f);
      block.written[i] = serial_;  // once
    }
    if (store)
      block.written[i] = serial_;
    track(block.shadow[i], false, store, flags & kAtomic, site, f);
  }
  return address;
}

Checker::Byte& Checker::shadow(uint64_t address) {
  auto& page = pages_[address / kPage];
  if (page.empty())
    page.resize(kPage);
  return page[address % kPage];
}

char* Checker::access(char* address, uint32_t size, uint32_t flags, const Site* site) {
  if (flags & kThreadgroup)
    return threadgroupAccess(address, size, flags, site);
  bool store = flags & kStore, reads = !store || flags & kReads, atomic = flags & kAtomic;
  auto holds = [&](const Buffer& b) { return address >= b.data && address < b.data + b.bytes; };
  // Several arguments may share memory; a store belongs to one that may be written.
  auto fits = [&](const Buffer& b) { return holds(b) && (store ? b.may_write : b.may_read); };
  const Buffer* buffers = launch_.buffers;
  if (last_buffer_ >= launch_.buffer_count || !fits(buffers[last_buffer_])) {
    const Buffer* end = buffers + launch_.buffer_count;
    const Buffer* found = std::find_if(buffers, end, fits);
    if (found == end)
      found = std::find_if(buffers, end, holds);
    if (found == end) {
      Fault f = begin(kOutOfBounds, site, store);
      f.lanes = size;
      int64_t best = INT64_MAX;
      for (const Buffer* b = buffers; b != end; ++b) {
        int64_t away = address < b->data ? b->data - address : address - (b->data + b->bytes) + 1;
        if (away < best) {
          best = away;
          f.buffer = b->index;
          f.byte = address - b->data;
        }
      }
      report(f);
      return size <= sizeof scratch_ ? scratch_ : nullptr;
    }
    last_buffer_ = found - buffers;
  }
  const Buffer& buffer = buffers[last_buffer_];
  uint64_t at = address - buffer.data;
  Fault f = begin(kOutOfBounds, site, store);
  f.buffer = buffer.index;
  f.byte = at;
  if (at + size > buffer.bytes) {
    f.lanes = size;
    report(f);
    return size <= sizeof scratch_ ? scratch_ : nullptr;
  }
  if (store && !buffer.may_write) {
    f.kind = kWriteToReadOnly;
    report(f);
    return size <= sizeof scratch_ ? scratch_ : nullptr;
  }
  if (reads && !buffer.may_read) {
    f.kind = kReadOfWriteOnly;
    report(f);
  }
  Traffic& traffic = launch_.traffic[last_buffer_];
  if (store) {
    ++traffic.stores;
    traffic.store_bytes += size;
  }
  if (reads) {
    ++traffic.loads;
    traffic.load_bytes += size;
  }
  if (launch_.lines)
    countLines(last_buffer_, address, size, store, site);
  if (buffer.initialised) {
    for (uint64_t i = at; i < at + size; ++i) {
      if (reads && !buffer.initialised[i]) {
        f.kind = kUninitialisedDevice;
        f.byte = i;
        report(f);
        break;
      }
    }
    if (store)
      std::memset(buffer.initialised + at, 1, size);
  }
  if (buffer.shared_writable) {
    auto base = reinterpret_cast<uint64_t>(address);
    for (uint64_t i = 0; i < size; ++i) {
      f.byte = at + i;
      f.other_site = nullptr;
      track(shadow(base + i), true, store, atomic, site, f);
    }
  }
  return address;
}

// The n-th execution of one place by each lane of a simdgroup is one access of the simdgroup.
void Checker::countLines(uint32_t buffer, const char* address, uint32_t size, bool store,
                         const Site* site) {
  const Context& c = worker_.current->context;
  uint64_t key = reinterpret_cast<uint64_t>(site) * 0x9E3779B97F4A7C15ull +
                 (static_cast<uint64_t>(c.simdgroup_index_in_threadgroup) << 8) + buffer * 2 +
                 store;
  Lines& lines = lines_[key];
  if (!lines.site)
    lines = {site, buffer, store, {}, {}};
  uint32_t n = lines.executed[c.thread_index_in_simdgroup]++;
  auto first = reinterpret_cast<uint64_t>(address) / kLine;
  auto last = (reinterpret_cast<uint64_t>(address) + std::max(size, 1u) - 1) / kLine;
  for (uint64_t line = first; line <= last; ++line)
    lines.touched.push_back({n, line});
}

void Checker::endThreadgroup() {
  for (auto& [key, lines] : lines_) {
    auto& touched = lines.touched;
    std::sort(touched.begin(), touched.end());
    touched.erase(std::unique(touched.begin(), touched.end()), touched.end());
    uint64_t accesses = *std::max_element(lines.executed, lines.executed + kSimdWidth);
    Traffic& traffic = launch_.traffic[lines.buffer];
    (lines.store ? traffic.store_lines : traffic.load_lines) += touched.size();
    (lines.store ? traffic.store_accesses : traffic.load_accesses) += accesses;
  }
  lines_.clear();
}

extern "C" char* __msl_access(char* address, uint32_t size, uint32_t flags, const Site* site) {
  Worker* w = worker;
  if (!w || !w->checker || !size)
    return address;
  return w->checker->access(address, size, flags, site);
}

}  // namespace msl
