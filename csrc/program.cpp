#include "program.h"

#include <algorithm>
#include <set>
#include <stdexcept>

namespace lily {
namespace {

constexpr size_t kMaxThreadgroupMemory = 32768;

[[noreturn]] void fail(const std::string& text) {
  throw std::invalid_argument(text);
}

std::string quoted(const std::string& s) {
  return "'" + s + "'";
}

}  // namespace

const char* to_string(SlotKind k) {
  constexpr const char* names[] = {"weight", "cache", "input", "output", "scratch"};
  return names[static_cast<int>(k)];
}
SlotKind parse_slot_kind(const std::string& text) {
  for (SlotKind k :
       {SlotKind::weight, SlotKind::cache, SlotKind::input, SlotKind::output, SlotKind::scratch}) {
    if (text == to_string(k))
      return k;
  }
  fail("unknown slot kind " + quoted(text) + "; known are weight, cache, input, output, scratch.");
}

// ---- Dispatch

Dispatch::Dispatch(const Kernel& kernel) : kernel(&kernel), name(kernel.name) {}

const ArgumentLayout& Dispatch::take(const std::string& name, bool is_threadgroup) {
  const ArgumentLayout& a = kernel->argument(name);
  std::string who = "kernel " + quoted(kernel->name) + ": argument " + quoted(name);
  if ((a.space == Space::threadgroup) != is_threadgroup) {
    fail(who + " is in " + to_string(a.space) + " space; " +
         (is_threadgroup ? "only threadgroup memory has a length."
                         : "give its length with threadgroup_memory()."));
  }
  auto given = [&](const auto& list) {
    return std::any_of(list.begin(), list.end(), [&](auto& g) { return g.index == a.index; });
  };
  bool twice =
      is_threadgroup ? given(threadgroup) : given(buffers) || given(scalars) || given(values);
  if (twice)
    fail(who + " is given twice.");
  return a;
}

Dispatch& Dispatch::buffer(const std::string& name, SlotId slot, Range range, Access access) {
  const ArgumentLayout& a = take(name, false);
  if ((static_cast<int>(access) & ~static_cast<int>(a.access)) != 0) {
    fail("kernel " + quoted(kernel->name) + ": argument " + quoted(name) + " is declared " +
         to_string(access) + ", but the kernel's own signature allows " + to_string(a.access) +
         " only.");
  }
  buffers.push_back({a.index, slot, range.offset, range.bytes, access, {Range::kToEnd, {}, 0}});
  return *this;
}
Dispatch& Dispatch::read(const std::string& name, SlotId slot, Range range) {
  return buffer(name, slot, range, Access::read);
}
Dispatch& Dispatch::write(const std::string& name, SlotId slot, Range range) {
  return buffer(name, slot, range, Access::write);
}
Dispatch& Dispatch::read_write(const std::string& name, SlotId slot, Range range) {
  return buffer(name, slot, range, Access::read_write);
}

Dispatch& Dispatch::traffic(Amount amount) {
  if (buffers.empty())
    fail("traffic() follows the buffer argument that it speaks of.");
  buffers.back().traffic = amount;
  return *this;
}

Dispatch& Dispatch::value(const std::string& name, Value value) {
  const ArgumentLayout& a = take(name, false);
  ScalarType expected = parse_type(a.type);
  if (a.space != Space::constant || (expected != ScalarType::bytes && expected != value.type)) {
    fail("kernel " + quoted(kernel->name) + ": argument " + quoted(name) + " is " +
         to_string(a.space) + " " + a.type + " and cannot take the value " + value.to_string() +
         " (" + to_string(value.type) + ").");
  }
  if (expected == ScalarType::bytes && a.size != 0 && value.bytes.size() != a.size) {
    fail("kernel " + quoted(kernel->name) + ": argument " + quoted(name) + " is a " + a.type +
         " of " + std::to_string(a.size) + " bytes, not " + value.to_string() + ".");
  }
  values.push_back({a.index, std::move(value)});
  return *this;
}

Dispatch& Dispatch::scalar(const std::string& name, ScalarId scalar) {
  const ArgumentLayout& a = take(name, false);
  if (a.space != Space::constant) {
    fail("kernel " + quoted(kernel->name) + ": argument " + quoted(name) + " is in " +
         to_string(a.space) + " space and cannot take a scalar.");
  }
  scalars.push_back({a.index, scalar});
  return *this;
}

Dispatch& Dispatch::constant(const std::string& name, Value value) {
  const ConstantLayout& c = kernel->constant(name);
  std::string who = "kernel " + quoted(kernel->name) + ": function constant " + quoted(name);
  if (c.type != value.type) {
    fail(who + " is " + to_string(c.type) + ", not " + to_string(value.type) + ".");
  }
  for (const Constant& given : constants) {
    if (given.id == c.id)
      fail(who + " is given twice.");
  }
  constants.push_back({c.id, std::move(value)});
  return *this;
}

Dispatch& Dispatch::threadgroup_memory(const std::string& name, size_t bytes) {
  threadgroup.push_back({take(name, true).index, (bytes + 15) / 16 * 16});
  return *this;
}

Dispatch& Dispatch::grid(Extent x, Extent y, Extent z) {
  grid_size[0] = x;
  grid_size[1] = y;
  grid_size[2] = z;
  return *this;
}

Dispatch& Dispatch::threads(uint32_t x, uint32_t y, uint32_t z) {
  group_size[0] = x;
  group_size[1] = y;
  group_size[2] = z;
  return *this;
}

Dispatch& Dispatch::in_place(const std::string& a, const std::string& b) {
  may_alias.push_back({kernel->argument(a).index, kernel->argument(b).index});
  return *this;
}

Dispatch& Dispatch::label(std::string text) {
  name = std::move(text);
  return *this;
}

Dispatch& Dispatch::layer(int layer, std::string phase_name) {
  layer_index = layer;
  phase = std::move(phase_name);
  return *this;
}

// ---- Program

namespace {

// Every constant and argument that the kernel needs, and none that it does not have.
void check_complete(const Dispatch& d, const std::string& who) {
  const Kernel& k = *d.kernel;
  auto constant = [&](int id) -> const Value* {
    for (const Constant& c : d.constants) {
      if (c.id == id)
        return &c.value;
    }
    return nullptr;
  };
  for (const ConstantLayout& c : k.constants) {
    if (!constant(c.id))
      fail(who + ": function constant " + quoted(c.name) + " is missing.");
  }
  for (const ArgumentLayout& l : k.arguments) {
    auto given = [&](const auto& list) {
      return std::any_of(list.begin(), list.end(), [&](auto& g) { return g.index == l.index; });
    };
    bool is_given = l.space == Space::threadgroup
                        ? given(d.threadgroup)
                        : given(d.buffers) || given(d.scalars) || given(d.values);
    const Value* condition = nullptr;
    for (const ConstantLayout& c : k.constants) {
      if (c.name == l.condition)
        condition = constant(c.id);
    }
    bool is_optional = !l.condition.empty() && !condition;
    bool exists = !condition || condition->bytes[0];
    if (is_given && !exists) {
      fail(who + ": argument " + quoted(l.name) + " is given, but " + l.condition + " is false.");
    }
    if (!is_given && exists && !is_optional) {
      fail(who + ": argument " + quoted(l.name) + " (index " + std::to_string(l.index) +
           ") is missing.");
    }
  }
}

void check_limits(const Dispatch& d, const std::string& who) {
  const Kernel& k = *d.kernel;
  size_t memory = k.threadgroup_bytes;
  for (const ThreadgroupMemory& t : d.threadgroup)
    memory += t.bytes;
  if (memory > kMaxThreadgroupMemory) {
    fail(who + " takes " + std::to_string(memory) + " bytes of threadgroup memory; the limit is " +
         std::to_string(kMaxThreadgroupMemory) + ".");
  }
  uint64_t threads = uint64_t{d.group_size[0]} * d.group_size[1] * d.group_size[2];
  if (threads == 0 || threads > k.max_threads) {
    fail(who + " has " + std::to_string(threads) + " threads a threadgroup; 1 to " +
         std::to_string(k.max_threads) + " are allowed.");
  }
}

}  // namespace

void Program::check_open() const {
  if (finished_)
    fail("program " + quoted(name_) + " is finished; build another to change it.");
}

SlotId Program::slot(std::string name, SlotKind kind, size_t bytes) {
  check_open();
  if (bytes == 0)
    fail("slot " + quoted(name) + " has no bytes.");
  int index = static_cast<int>(slots_.size());
  if (!slot_index_.emplace(name, index).second) {
    fail("program " + quoted(name_) + " has two slots " + quoted(name) + ".");
  }
  slots_.push_back({std::move(name), kind, bytes});
  return {index};
}

ScalarId Program::scalar(std::string name, Value initial) {
  check_open();
  for (const auto& s : scalars_) {
    if (s.first == name) {
      fail("program " + quoted(name_) + " has two scalars " + quoted(name) + ".");
    }
  }
  scalars_.emplace_back(std::move(name), std::move(initial));
  return {static_cast<int>(scalars_.size()) - 1};
}

SlotId Program::find_slot(const std::string& name) const {
  auto it = slot_index_.find(name);
  if (it == slot_index_.end()) {
    fail("program " + quoted(name_) + " has no slot " + quoted(name) + ".");
  }
  return {it->second};
}

ScalarId Program::find_scalar(const std::string& name) const {
  for (size_t i = 0; i < scalars_.size(); ++i) {
    if (scalars_[i].first == name)
      return {static_cast<int>(i)};
  }
  fail("program " + quoted(name_) + " has no scalar " + quoted(name) + ".");
}

int Program::add(Dispatch d) {
  check_open();
  const Kernel& k = *d.kernel;
  std::string who = "dispatch " + quoted(d.name) + " of kernel " + quoted(k.name);
  auto check_scalar = [&](ScalarId s) {
    if (s.index < 0 || s.index >= static_cast<int>(scalars_.size())) {
      fail(who + " names a scalar that is not of program " + quoted(name_) + ".");
    }
  };

  for (BufferArgument& a : d.buffers) {
    std::string argument = quoted(k.find(a.index, false)->name);
    if (a.slot.index < 0 || a.slot.index >= static_cast<int>(slots_.size())) {
      fail(who + ": argument " + argument + " names a slot that is not of program " +
           quoted(name_) + ".");
    }
    Slot& slot = slots_[a.slot.index];
    if (a.bytes == Range::kToEnd && a.offset < slot.bytes)
      a.bytes = slot.bytes - a.offset;
    if (a.bytes == 0 || a.offset >= slot.bytes || a.bytes > slot.bytes - a.offset) {
      fail(who + ": argument " + argument + " takes " + std::to_string(a.bytes) +
           " bytes at offset " + std::to_string(a.offset) + " of slot " + quoted(slot.name) +
           ", which has " + std::to_string(slot.bytes) + ".");
    }
    if (a.traffic.fixed == Range::kToEnd)
      a.traffic.fixed = a.bytes;
    if (a.traffic.fixed > a.bytes) {
      fail(who + ": argument " + argument + " cannot move " + std::to_string(a.traffic.fixed) +
           " bytes of a range of " + std::to_string(a.bytes) + ".");
    }
    if (a.traffic.each != 0)
      check_scalar(a.traffic.scalar);
    if (writes(a.access) && (slot.kind == SlotKind::weight || slot.kind == SlotKind::input)) {
      fail(who + " writes slot " + quoted(slot.name) + ", which is a " + to_string(slot.kind) +
           ".");
    }
    slot.written |= writes(a.access);
  }
  for (const ScalarArgument& a : d.scalars) {
    check_scalar(a.scalar);
    const ArgumentLayout& l = *k.find(a.index, false);
    const auto& [scalar, initial] = scalars_[a.scalar.index];
    ScalarType expected = parse_type(l.type);
    if (expected != ScalarType::bytes && expected != initial.type) {
      fail(who + ": argument " + quoted(l.name) + " is " + l.type + ", but scalar " +
           quoted(scalar) + " is " + to_string(initial.type) + ".");
    }
  }

  check_complete(d, who);
  check_limits(d, who);
  for (const Extent& e : d.grid_size) {
    if (e.scalar.index >= 0) {
      check_scalar(e.scalar);
    } else if (e.count == 0) {
      fail(who + " has an empty grid.");
    }
  }

  d.pipeline = pipeline_of(d);
  dispatches_.push_back(std::move(d));
  return static_cast<int>(dispatches_.size()) - 1;
}

Pipeline pipeline_of(const Dispatch& d) {
  std::vector<Constant> constants = d.constants;
  std::sort(constants.begin(), constants.end(),
            [](const Constant& a, const Constant& b) { return a.id < b.id; });
  std::string key = d.kernel->name;
  for (const Constant& c : constants) {
    key.append("_").append(std::to_string(c.id)).append(":").append(c.value.to_string());
  }
  return {d.kernel, std::move(constants), key};
}

int Program::pipeline_of(const Dispatch& d) {
  Pipeline pipeline = lily::pipeline_of(d);
  auto it = std::find_if(pipelines_.begin(), pipelines_.end(),
                         [&](const Pipeline& p) { return p.key == pipeline.key; });
  int index = static_cast<int>(it - pipelines_.begin());
  if (it == pipelines_.end()) {
    pipelines_.push_back(std::move(pipeline));
  }
  return index;
}

void Program::finish() {
  check_open();
  check_scratch_is_written_first();
  plan_scratch();
  schedule_ = schedule(own_locations());
  finished_ = true;
  for (const Hazard& h : check_hazards())
    fail("program " + quoted(name_) + ": " + h.text);
}

const Schedule& Program::schedule() const {
  if (!finished_)
    fail("program " + quoted(name_) + " is not finished; call finish().");
  return schedule_;
}

std::vector<Location> Program::own_locations() const {
  std::vector<Location> out;
  for (size_t i = 0; i < slots_.size(); ++i) {
    bool is_scratch = slots_[i].kind == SlotKind::scratch;
    out.push_back(is_scratch ? Location{0, slots_[i].arena_offset} : Location{i + 1, 0});
  }
  return out;
}

Report Program::report(const Bindings* bindings) const {
  auto amount = [&](const Amount& a) -> size_t {
    if (bindings)
      return bindings->amount(a);
    return a.fixed + (a.each ? a.each * scalars_[a.scalar.index].second.as_count() : 0);
  };
  const Schedule& s = bindings ? bindings->schedule() : schedule();
  Report r;
  r.dispatches = static_cast<int>(dispatches_.size());
  r.levels = s.levels;
  r.barriers = s.barriers();
  r.arena = arena_bytes_;
  // By weight slot: the most that any dispatch moved of each distinct range.
  std::map<int, std::map<std::pair<size_t, size_t>, size_t>> weights;
  for (const Dispatch& d : dispatches_) {
    Bytes& label = r.by_label[d.name];
    ++label.dispatches;
    for (const BufferArgument& a : d.buffers) {
      size_t moved = amount(a.traffic);
      if (reads(a.access)) {
        label.read += moved;
        r.read += moved;
      }
      if (writes(a.access)) {
        label.written += moved;
        r.written += moved;
      }
      if (slots_[a.slot.index].kind == SlotKind::weight) {
        size_t& most = weights[a.slot.index][{a.offset, a.offset + a.bytes}];
        most = std::max(most, moved);
      }
    }
  }
  for (const auto& [slot, ranges] : weights) {
    size_t covered = 0, distinct = 0, moved = 0;
    for (const auto& [range, most] : ranges) {  // by first byte
      size_t begin = std::max(range.first, covered);
      if (range.second > begin)
        distinct += range.second - begin;
      covered = std::max(covered, range.second);
      moved += most;
    }
    r.weights += std::min(distinct, moved);
  }
  return r;
}

// ---- Bindings

Bindings::Bindings(const Program& program) : program_(&program) {
  program.schedule();  // throws unless finished
  places_.resize(program.slots().size() + 1);
  for (const auto& s : program.scalars())
    scalars_.push_back(s.second);
  for (const Slot& s : program.slots())
    unbound_ += s.kind != SlotKind::scratch;
  unbound_ += program.arena_bytes() > 0;
}

void Bindings::put(int slot, Buffer buffer, size_t offset, const std::string& name, size_t bytes) {
  if (offset > buffer.bytes || bytes > buffer.bytes - offset) {
    fail("slot " + quoted(name) + " needs " + std::to_string(bytes) + " bytes; the buffer has " +
         std::to_string(buffer.bytes) + ", bound at offset " + std::to_string(offset) + ".");
  }
  std::optional<Place>& place = places_[slot];
  if (place && place->buffer.id == buffer.id && place->offset == offset) {
    place->buffer = buffer;
    return;
  }
  if (place) {
    auto& shared = slots_of_[place->buffer.id];
    if (shared.size() > 1)
      current_ = nullptr;
    shared.erase(std::find(shared.begin(), shared.end(), slot));
    if (shared.empty())
      slots_of_.erase(place->buffer.id);
  } else {
    --unbound_;
  }
  place = Place{buffer, offset};
  auto& shared = slots_of_[buffer.id];
  shared.push_back(slot);
  if (shared.size() > 1)
    current_ = nullptr;
}

void Bindings::bind(SlotId id, Buffer buffer, size_t offset) {
  const Slot& slot = program_->slots().at(id.index);
  if (slot.kind == SlotKind::scratch) {
    fail("slot " + quoted(slot.name) + " is scratch: it lives in the arena (bind_arena).");
  }
  put(id.index, buffer, offset, slot.name, slot.bytes);
}

void Bindings::bind_arena(Buffer buffer, size_t offset) {
  if (program_->arena_bytes() == 0)
    return;
  put(static_cast<int>(places_.size()) - 1, buffer, offset, "scratch arena",
      program_->arena_bytes());
}

void Bindings::set(ScalarId id, Value value) {
  Value& scalar = scalars_.at(id.index);
  if (scalar.type != value.type || scalar.bytes.size() != value.bytes.size()) {
    fail("scalar " + quoted(program_->scalars()[id.index].first) + " is " + to_string(scalar.type) +
         ", not " + to_string(value.type) + ".");
  }
  scalar = std::move(value);
}

uint32_t Bindings::extent(const Extent& e) const {
  if (e.scalar.index < 0)
    return e.count;
  uint64_t count = scalars_[e.scalar.index].as_count();
  if (count == 0 || count > UINT32_MAX) {
    fail("scalar " + quoted(program_->scalars()[e.scalar.index].first) + " is " +
         std::to_string(count) + ", which is no grid size.");
  }
  return static_cast<uint32_t>(count);
}

size_t Bindings::amount(const Amount& a) const {
  return a.fixed + (a.each ? a.each * scalars_[a.scalar.index].as_count() : 0);
}

Place Bindings::place(SlotId id) const {
  const Slot& slot = program_->slots()[id.index];
  if (slot.kind != SlotKind::scratch)
    return *places_[id.index];
  const Place& arena = *places_.back();
  return {arena.buffer, arena.offset + slot.arena_offset};
}

Place Bindings::place(const BufferArgument& a) const {
  Place p = place(a.slot);
  p.offset += a.offset;
  return p;
}

std::vector<Location> Bindings::locations() const {
  std::vector<Location> out;
  for (int i = 0; i < static_cast<int>(program_->slots().size()); ++i) {
    Place p = place(SlotId{i});
    out.push_back({p.buffer.id, p.offset});
  }
  return out;
}

std::vector<Bindings::Alias> Bindings::aliases() const {
  int arena = static_cast<int>(places_.size()) - 1;
  auto bytes = [&](int i) {
    return i == arena ? program_->arena_bytes() : program_->slots()[i].bytes;
  };
  auto is_written = [&](int i) { return i == arena || program_->slots()[i].written; };
  std::vector<Alias> out;
  for (const auto& [buffer, slots] : slots_of_) {
    if (slots.size() < 2)
      continue;
    for (int a : slots) {
      if (!is_written(a))
        continue;
      for (int b : slots) {
        if (a == b || (is_written(b) && b < a))
          continue;
        size_t oa = places_[a]->offset, ob = places_[b]->offset;
        if (overlap(oa, bytes(a), ob, bytes(b))) {
          out.push_back({a, b, static_cast<ptrdiff_t>(ob - oa)});
        }
      }
    }
  }
  std::sort(out.begin(), out.end());
  return out;
}

const Schedule& Bindings::schedule() const {
  if (unbound_ > 0) {
    for (size_t i = 0; i < places_.size(); ++i) {
      bool is_arena = i + 1 == places_.size();
      bool is_needed =
          is_arena ? program_->arena_bytes() > 0 : program_->slots()[i].kind != SlotKind::scratch;
      if (is_needed && !places_[i]) {
        fail("program " + quoted(program_->name()) + ": " +
             (is_arena ? "the scratch arena" : "slot " + quoted(program_->slots()[i].name)) +
             " is not bound.");
      }
    }
  }
  if (current_)
    return *current_;
  std::vector<Alias> key = aliases();
  if (key.empty()) {
    current_ = &program_->schedule();
    return *current_;
  }
  auto it = schedules_.find(key);
  if (it == schedules_.end()) {
    std::vector<Location> where = locations();
    auto schedule = std::make_shared<const Schedule>(program_->schedule(where));
    for (const Hazard& h : program_->check_hazards(*schedule, where)) {
      fail("program " + quoted(program_->name()) + ": " + h.text);
    }
    it = schedules_.emplace(std::move(key), std::move(schedule)).first;
  }
  current_ = it->second.get();
  return *current_;
}

}  // namespace lily
