// Levels, hazards and scratch of Programs: what may run beside what, and which bytes may serve
// twice.
#include <algorithm>
#include <set>
#include <stdexcept>

#include "program.h"

namespace lily {
namespace {

constexpr size_t kArenaAlignment = 256;

// A set of dispatch indices.
class Bitset {
 public:
  explicit Bitset(size_t n) : words_((n + 63) / 64) {}
  void set(int i) {
    words_[i / 64] |= uint64_t{1} << (i % 64);
  }
  bool has(int i) const {
    return words_[i / 64] >> (i % 64) & 1;
  }
  void merge(const Bitset& o) {
    for (size_t w = 0; w < words_.size(); ++w)
      words_[w] |= o.words_[w];
  }

 private:
  std::vector<uint64_t> words_;
};

// The dispatches that last touched each byte of one buffer, as non-overlapping segments.
class BufferHistory {
 public:
  // Adds to `before` the dispatches that must end before `dispatch` touches these bytes.
  void access(int dispatch, size_t begin, size_t bytes, bool is_write, std::set<int>& before) {
    if (bytes == 0)
      return;
    size_t end = begin + bytes;
    split(begin);
    split(end);
    size_t covered = begin;
    for (auto it = segments_.lower_bound(begin); covered < end;) {
      if (it == segments_.end() || it->first > covered) {
        size_t gap_end = it == segments_.end() ? end : std::min(end, it->first);
        it = segments_.emplace_hint(it, covered, Segment{gap_end, -1, {}});
      }
      Segment& s = it->second;
      if (s.writer >= 0)
        before.insert(s.writer);
      if (is_write) {
        before.insert(s.readers.begin(), s.readers.end());
        s.writer = dispatch;
        s.readers.clear();
      } else {
        s.readers.push_back(dispatch);
      }
      covered = s.end;
      ++it;
    }
  }

 private:
  struct Segment {
    size_t end;
    int writer;
    std::vector<int> readers;  // since that writer
  };

  void split(size_t at) {
    auto it = segments_.upper_bound(at);
    if (it == segments_.begin())
      return;
    --it;
    if (it->first == at || it->second.end <= at)
      return;
    Segment right = it->second;
    it->second.end = at;
    segments_.emplace(at, std::move(right));
  }

  std::map<size_t, Segment> segments_;  // by first byte
};

// The transitive closure of the predecessors; `reduce` drops those that others imply.
std::vector<Bitset> ancestors_of(std::vector<std::vector<int>>& predecessors, bool reduce) {
  size_t n = predecessors.size();
  std::vector<Bitset> all(n, Bitset(n));
  for (size_t i = 0; i < n; ++i) {
    std::vector<int> kept;
    auto& before = predecessors[i];
    for (auto p = before.rbegin(); p != before.rend(); ++p) {
      if (reduce && all[i].has(*p))
        continue;
      kept.insert(kept.begin(), *p);
      all[i].set(*p);
      all[i].merge(all[*p]);
    }
    if (reduce)
      before = std::move(kept);
  }
  return all;
}

}  // namespace

Schedule Program::schedule(const std::vector<Location>& slots) const {
  size_t n = dispatches_.size();
  Schedule s;
  s.level.resize(n);
  s.predecessors.resize(n);
  std::unordered_map<uint64_t, BufferHistory> history;
  for (size_t i = 0; i < n; ++i) {
    std::set<int> before;
    for (bool is_write : {false, true}) {
      for (const BufferArgument& a : dispatches_[i].buffers) {
        if (!(is_write ? writes(a.access) : reads(a.access)))
          continue;
        Location l = slots[a.slot.index];
        history[l.buffer].access(static_cast<int>(i), l.offset + a.offset, a.bytes, is_write,
                                 before);
      }
    }
    before.erase(static_cast<int>(i));
    if (serial_ && i > 0)
      before.insert(static_cast<int>(i) - 1);
    for (int p : before)
      s.level[i] = std::max(s.level[i], s.level[p] + 1);
    s.levels = std::max(s.levels, s.level[i] + 1);
    s.predecessors[i].assign(before.begin(), before.end());
  }
  ancestors_of(s.predecessors, /*reduce=*/true);
  s.order.resize(n);
  for (size_t i = 0; i < n; ++i)
    s.order[i] = static_cast<int>(i);
  std::stable_sort(s.order.begin(), s.order.end(),
                   [&](int a, int b) { return s.level[a] < s.level[b]; });
  return s;
}

// Two scratch slots may share bytes only when one is dead before the other is first used, both in
// program order and by level; so sharing adds no level.
void Program::plan_scratch() {
  std::vector<Location> apart;
  for (size_t i = 0; i < slots_.size(); ++i)
    apart.push_back({i, 0});
  std::vector<int> level = schedule(apart).level;

  struct Life {
    int slot;
    int first = INT32_MAX, last = -1, first_level = INT32_MAX, last_level = -1;
  };
  std::vector<Life> lives(slots_.size());
  for (size_t i = 0; i < dispatches_.size(); ++i) {
    for (const BufferArgument& a : dispatches_[i].buffers) {
      Life& l = lives[a.slot.index];
      l.first = std::min(l.first, static_cast<int>(i));
      l.last = std::max(l.last, static_cast<int>(i));
      l.first_level = std::min(l.first_level, level[i]);
      l.last_level = std::max(l.last_level, level[i]);
    }
  }
  std::vector<Life> todo;
  for (size_t i = 0; i < slots_.size(); ++i) {
    lives[i].slot = static_cast<int>(i);
    if (lives[i].last < 0) {
      throw std::invalid_argument("program " + ("\'" + name_ + "\'") + ": no dispatch uses slot " +
                                  ("\'" + slots_[i].name + "\'") + ".");
    }
    if (slots_[i].kind == SlotKind::scratch)
      todo.push_back(lives[i]);
  }
  std::stable_sort(todo.begin(), todo.end(), [&](const Life& a, const Life& b) {
    return slots_[a.slot].bytes > slots_[b.slot].bytes;
  });
  auto dies_before = [](const Life& a, const Life& b) {
    return a.last < b.first && a.last_level < b.first_level;
  };
  auto end_of = [&](const Life& l) {
    size_t end = slots_[l.slot].arena_offset + slots_[l.slot].bytes;
    return (end + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
  };
  std::vector<Life> placed;  // by offset
  arena_bytes_ = 0;
  for (const Life& life : todo) {
    Slot& slot = slots_[life.slot];
    slot.arena_offset = 0;
    for (const Life& other : placed) {
      if (dies_before(life, other) || dies_before(other, life))
        continue;
      const Slot& o = slots_[other.slot];
      if (overlap(slot.arena_offset, slot.bytes, o.arena_offset, o.bytes)) {
        slot.arena_offset = end_of(other);
      }
    }
    auto after = std::upper_bound(placed.begin(), placed.end(), life, [&](auto& a, auto& b) {
      return slots_[a.slot].arena_offset < slots_[b.slot].arena_offset;
    });
    placed.insert(after, life);
    arena_bytes_ = std::max(arena_bytes_, end_of(life));
  }
}

void Program::check_scratch_is_written_first() const {
  std::map<int, std::vector<std::pair<size_t, size_t>>> written;  // by slot: begin, end
  for (const Dispatch& d : dispatches_) {
    for (const BufferArgument& a : d.buffers) {
      if (slots_[a.slot.index].kind != SlotKind::scratch || !reads(a.access))
        continue;
      auto& ranges = written[a.slot.index];
      std::sort(ranges.begin(), ranges.end());
      size_t covered = a.offset;
      for (auto [begin, end] : ranges) {
        if (begin <= covered)
          covered = std::max(covered, end);
      }
      if (covered < a.offset + a.bytes) {
        throw std::invalid_argument("dispatch " + ("\'" + d.name + "\'") + " reads byte " +
                                    std::to_string(covered) + " of scratch slot " +
                                    ("\'" + slots_[a.slot.index].name + "\'") +
                                    ", which no earlier dispatch has written.");
      }
    }
    for (const BufferArgument& a : d.buffers) {
      if (writes(a.access))
        written[a.slot.index].push_back({a.offset, a.offset + a.bytes});
    }
  }
}

std::vector<Hazard> Program::check_hazards(const Schedule& s,
                                           const std::vector<Location>& slots) const {
  std::vector<Hazard> out;
  auto edges = s.predecessors;
  std::vector<Bitset> ancestors = ancestors_of(edges, /*reduce=*/false);
  auto where = [&](int i, const BufferArgument& a) {
    return "dispatch " + std::to_string(i) + " " + ("\'" + dispatches_[i].name + "\'") + " (" +
           to_string(a.access) + " of " + ("\'" + slots_[a.slot.index].name + "\'") + " bytes " +
           std::to_string(a.offset) + " to " + std::to_string(a.offset + a.bytes) + ")";
  };
  auto conflict = [&](const BufferArgument& a, const BufferArgument& b) {
    Location la = slots[a.slot.index], lb = slots[b.slot.index];
    return la.buffer == lb.buffer && (writes(a.access) || writes(b.access)) &&
           overlap(la.offset + a.offset, a.bytes, lb.offset + b.offset, b.bytes);
  };
  int n = static_cast<int>(dispatches_.size());
  for (int j = 0; j < n; ++j) {
    const Dispatch& d = dispatches_[j];
    for (size_t x = 0; x < d.buffers.size(); ++x) {
      for (size_t y = x + 1; y < d.buffers.size(); ++y) {
        const BufferArgument &a = d.buffers[x], &b = d.buffers[y];
        bool allowed = std::any_of(d.may_alias.begin(), d.may_alias.end(), [&](auto& p) {
          return p == std::pair(a.index, b.index) || p == std::pair(b.index, a.index);
        });
        if (!allowed && conflict(a, b)) {
          out.push_back({j, j, "alias",
                         where(j, a) + " also has these bytes as " + where(j, b) +
                             "; declare in_place() if the kernel allows it."});
        }
      }
    }
    for (int i = 0; i < j; ++i) {
      bool is_apart = s.level[i] < s.level[j], is_edge = ancestors[j].has(i);
      if (is_apart && is_edge)
        continue;
      for (const BufferArgument& a : dispatches_[i].buffers) {
        for (const BufferArgument& b : d.buffers) {
          if (!conflict(a, b))
            continue;
          auto report = [&](const char* kind) {
            out.push_back({i, j, kind,
                           std::string(kind) + ": " + where(i, a) + " and " + where(j, b) +
                               " have no " + (is_apart ? "edge" : "barrier") + " between them."});
          };
          if (writes(a.access) && reads(b.access))
            report("RAW");
          if (reads(a.access) && writes(b.access))
            report("WAR");
          if (writes(a.access) && writes(b.access))
            report("WAW");
        }
      }
    }
  }
  return out;
}

std::vector<Hazard> Program::check_hazards() const {
  return check_hazards(schedule(), own_locations());
}

}  // namespace lily
