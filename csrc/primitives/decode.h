// The decode step: one primitive for the whole model, batch 1, one token.
//
// Weights are held by a DecodePlan, caches by a DecodeState; neither is a graph input. A step's
// inputs are the token and the token of the step before (its "ticket"), which orders steps that
// nothing else connects. The caller keeps the ticket: a state that held it would keep itself alive
// through the graph.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "primitives/gpu_decode.h"
#include "primitives/plan.h"

namespace lily {

// The caches of one sequence. A layer has (conv state, delta state) or (keys, values), absent until
// first needed. Buffers are written in place only while nothing else holds them; otherwise the step
// copies first. Steps hold the plan, and the state does not: caches that outlive their model keep
// no weights, but for steps that nobody has evaluated yet.
class DecodeState {
 public:
  DecodeState(const std::shared_ptr<const DecodePlan>& plan)
      : plan_(plan), layers_(plan->model.layers.size()) {}

  // Takes a layer's arrays over from Python. They are made contiguous and evaluated here.
  void put(int layer, std::optional<mx::array> first, std::optional<mx::array> second);

  // Gives a layer's arrays up; the steps built so far must have been evaluated. The state cannot
  // step afterwards.
  std::pair<std::optional<mx::array>, std::optional<mx::array>> take(int layer);

  // Bytes copied since construction: because somebody shared a buffer, and because keys and values
  // grew.
  int64_t copied_bytes() const {
    return copied_bytes_;
  }
  int64_t grown_bytes() const {
    return grown_bytes_;
  }
  // See GpuDecode::profile; empty on the CPU.
  std::vector<GpuDecode::Timing> profile(mx::StreamOrDevice s = {}) {
    auto weights = plan();
    return gpu_ ? gpu_->profile(mx::to_stream(s)) : std::vector<GpuDecode::Timing>{};
  }
  bool whole() const {
    return whole_;
  }
  // Throws where the plan is gone.
  std::shared_ptr<const DecodePlan> plan() const;

 private:
  friend class DecodeStep;
  std::weak_ptr<const DecodePlan> plan_;
  std::mutex mutex_;  // threads may share caches: what follows is theirs one at a time
  std::vector<CachePair> layers_;
  std::unique_ptr<GpuDecode> gpu_;  // made by the first step on a GPU
  int64_t copied_bytes_ = 0;
  int64_t grown_bytes_ = 0;
  bool whole_ = true;
};

// Returns {next token [1, 1] uint32} or, with_logits, {next token, logits [1, 1, vocabulary]
// float32}. `position` is the number of tokens already in the caches, `ticket` the next token that
// the state's last step returned. Nothing is computed or advanced until an output is evaluated.
std::vector<mx::array> decode_step(const std::shared_ptr<DecodeState>& state,
                                   const mx::array& token, const std::optional<mx::array>& ticket,
                                   int position, bool with_logits, mx::StreamOrDevice s = {});

}  // namespace lily
