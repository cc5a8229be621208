// The caches that a decode step goes on with, the same on every backend. A step makes them, queues
// its work, and only then swaps them into the state: one that throws leaves the state as it was.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "primitives/decode.h"
#include "primitives/gpu_decode.h"

namespace lily {

// Whoever queues work keeps this until that has run. Until commit() it holds what the step has
// made, afterwards what that has replaced; and the plan and the state at any time.
struct Successors {
  struct Layer {
    std::optional<mx::array> first, second;  // absent: the state's cache stays
    std::optional<mx::array> no_conv;        // zeros, where there is no conv state yet
  };
  // The arrays of one layer in a step: conv state (read, and the one that is written) and DeltaNet
  // state, or keys and values.
  struct Used {
    const mx::array *first, *second;
    const mx::array* first_next = nullptr;
  };

  std::shared_ptr<const DecodePlan> plan;
  std::shared_ptr<const DecodeState> state;
  std::vector<Layer> layers;
  int64_t copied = 0, grown = 0;  // bytes: see DecodeState

  // Every cache present, large enough, and ours alone where the step writes it.
  //   alone(array): whether nobody else holds its memory.
  //   padded(shape, dtype, source, rows): an array that begins each of `rows` rows with source's,
  //     zeros elsewhere; source may be absent.
  //   blank(layer, shape): the array for a layer's next conv state, its contents undefined.
  template <typename Alone, typename Padded, typename Blank>
  void make(const std::vector<CachePair>& now, int position, Alone alone, Padded padded,
            Blank blank) {
    layers.resize(now.size());
    for (size_t i = 0; i < now.size(); ++i) {
      const auto& [first, second] = now[i];
      Layer& next = layers[i];
      if (plan->model.layers[i].delta) {
        const GatedDelta<Weights>& d = *plan->model.layers[i].delta;
        const mx::Shape conv{1, d.shape.conv_width - 1, d.qkv.rows()};
        // The old conv state is only read, so it does not matter who else holds it.
        if (!first) {
          next.no_conv = padded(conv, plan->dtype, first, 1);
        }
        next.first = blank(i, conv);
        if (!second || !alone(*second)) {
          copied += second ? static_cast<int64_t>(second->nbytes()) : 0;
          next.second =
              padded(mx::Shape{1, d.shape.value_heads, d.shape.value_dim, d.shape.key_dim},
                     mx::float32, second, 1);
        }
        continue;
      }
      const Attention<Weights>& l = *plan->model.layers[i].attention;
      const int capacity = first ? first->shape(2) : 0;
      const bool grows = position >= capacity;
      const mx::Shape shape{1, l.shape.kv_heads,
                            grows ? grown_capacity(capacity, position + 1) : capacity,
                            l.shape.head_dim};
      for (auto [cache, to] : {std::pair{&first, &next.first}, std::pair{&second, &next.second}}) {
        if (grows || !alone(**cache)) {
          (grows ? grown : copied) += *cache ? static_cast<int64_t>((*cache)->nbytes()) : 0;
          *to = padded(shape, plan->dtype, *cache, l.shape.kv_heads);
        }
      }
    }
  }

  std::vector<Used> used(const std::vector<CachePair>& now) const {
    auto either = [](const std::optional<mx::array>& next, const std::optional<mx::array>& stays) {
      return next ? &*next : &*stays;
    };
    std::vector<Used> all;
    for (size_t i = 0; i < now.size(); ++i) {
      const Layer& next = layers[i];
      const mx::array* second = either(next.second, now[i].second);
      if (plan->model.layers[i].delta) {
        all.push_back({either(next.no_conv, now[i].first), second, &*next.first});
      } else {
        all.push_back({either(next.first, now[i].first), second});
      }
    }
    return all;
  }

  void commit(std::vector<CachePair>& now) {
    for (size_t i = 0; i < now.size(); ++i) {
      for (auto [cache, next] : {std::pair{&now[i].first, &layers[i].first},
                                 std::pair{&now[i].second, &layers[i].second}}) {
        if (*next) {
          std::swap(*cache, *next);
        }
      }
    }
  }
};

// Binds a plan's weights to a step's slots; bind(slot, array).
template <typename Bind>
void bind_weights(const StepProgram& program, const DecodePlan& plan, Bind&& bind) {
  const auto arrays = plan.arrays();
  for (size_t i = 0; i < arrays.size(); ++i) {
    bind(program.weights.at(i), *arrays[i]);
  }
}

// Binds a step's caches.
template <typename Bind>
void bind_caches(const StepProgram& program, const std::vector<Successors::Used>& used,
                 Bind&& bind) {
  for (size_t i = 0; i < used.size(); ++i) {
    const StepProgram::Caches& slots = program.caches.at(i);
    bind(slots.first, *used[i].first);
    bind(slots.second, *used[i].second);
    if (used[i].first_next != nullptr) {
      bind(slots.first_next, *used[i].first_next);
    }
  }
}

// Rows of each layer's keys and values, 0 for DeltaNet layers.
inline std::vector<int> capacities(const std::vector<Successors::Used>& used) {
  std::vector<int> rows;
  for (const Successors::Used& u : used) {
    rows.push_back(u.first_next != nullptr ? 0 : u.first->shape(2));
  }
  return rows;
}

}  // namespace lily
