// The decode step as a Program: one token through the whole model, batch 1.
//
// Position and token are in buffers, so that the Program is the same for every step until the keys
// and values outgrow their capacity.
#pragma once

#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "programs/builder.h"

namespace lily {

struct DeltaDims {
  MatrixDims qkv, z, b, a, out;
  int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0, conv_width = 0;
  float eps = 0.0f;
};

struct AttentionDims {
  MatrixDims q, k, v, out;
  int heads = 0, kv_heads = 0, head_dim = 0, rotary = 0;
  float base = 0.0f, eps = 0.0f;
};

struct MoeDims {
  MatrixDims router, gate, up, down, shared_gate, shared_up, shared_down, shared_router;
  int top_k = 0;
  bool normalize = false;
};

struct LayerDims {
  std::optional<DeltaDims> delta;
  std::optional<AttentionDims> attention;
  MoeDims moe;
};

struct DecodeDims {
  Type t = Type::bf16;
  MatrixDims embedding, head;
  std::vector<LayerDims> layers;
  float eps = 0.0f;
};

// The fused form is the default; each switch off gives the form that a fusion replaces.
struct DecodeOptions {
  bool logits = false;           // logits go to memory too
  bool fuse_norm = true;         // RMS norm inside the projection that follows
  bool fuse_projections = true;  // projections of one row in one dispatch
  bool fuse_residual = true;     // the residual inside out_proj and o_proj
  bool fuse_delta = true;        // convolution, delta update and gated norm in one dispatch
  bool fuse_route = true;        // the experts are picked where they are needed
  bool fuse_shared = true;       // the shared expert with the routed ones
  bool fuse_head = true;         // the first stage of argmax inside the head
  int pack = 0;                  // query heads of one KV head a threadgroup; 0: by the backend
  bool coalesced = true;         // neighbouring lanes read neighbouring bytes of the cache
  int fixed_block_from =
      32768;            // tokens of capacity above which splits have a fixed length; < 0: never
  int context = 0;      // tokens attended to, for counts of bytes; 0: the capacity
  bool nvidia = false;  // splits and tiles for an NVIDIA card with 132 multiprocessors
  bool sync = false;    // its tensor cores, where they serve
  int splits = 0;       // of a KV cache, all of equal length; 0: by the capacity
  int ahead = 0;        // kilobytes of the next layer's input projections that moe_route asks for
  // Other threads for dispatches: "label.field", e.g. "delta in.simdgroups". Fields are those of
  // GemvTile; of "experts up" lanes, r, u, simdgroups; of "experts down" lanes, r, u; of "delta
  // step", "attention", "attention prepare", "attention merge" and "argmax" simdgroups.
  TileFields tiles;

  bool operator==(const DecodeOptions&) const = default;
};

// What the NVIDIA backend starts with. The experts are picked in a dispatch of its own there: it
// takes less than the pick in every threadgroup, and moe_gate_up and moe_down know them before they
// wait.
DecodeOptions nvidia_options();

struct DecodeProgram {
  explicit DecodeProgram(Program p) : program(std::move(p)) {}

  Program program;
  std::vector<SlotId> weights;  // in the order of DecodePlan::arrays()
  std::vector<Builder::Table> tables;
  struct Caches {
    SlotId first, first_next;  // conv state read and written, or keys (first_next is not used)
    SlotId second;             // DeltaNet state, updated in place, or values
  };
  std::vector<Caches> caches;  // by layer
  SlotId token, position, next;
  SlotId logits;  // with options.logits
};

// Why the kernels do not serve this model, empty when they do.
std::string decode_refusal(const DecodeDims& dims);

// capacities: rows of each layer's keys and values (0 for DeltaNet layers).
std::shared_ptr<DecodeProgram> decode_program(const DecodeDims& dims,
                                              const std::vector<int>& capacities,
                                              const DecodeOptions& options);

// The Programs of one model. Building one takes the CPU 5 ms at 40 layers, between a prompt and its
// first token, so all sequences share them; those used last are kept.
class DecodePrograms {
 public:
  explicit DecodePrograms(DecodeDims dims)
      : dims(std::move(dims)), refusal(decode_refusal(this->dims)) {}

  const DecodeDims dims;
  const std::string refusal;  // why there are none, or empty

  // Throws what decode_program throws. From any thread.
  std::shared_ptr<const DecodeProgram> at(const std::vector<int>& capacities,
                                          const DecodeOptions& options);
  size_t size() const;

 private:
  struct Kept {
    std::vector<int> capacities;
    DecodeOptions options;
    std::shared_ptr<const DecodeProgram> program;
  };
  mutable std::mutex mutex_;
  std::list<Kept> kept_;  // the one used last comes first
};

// ---- Parts that layer programs share

// base^(-2 i / rotary), i < rotary / 2.
std::vector<float> rotary_frequencies(int rotary, float base);

struct DeltaSlots {
  MatrixSlots qkv, z, b, a, out;
  SlotId conv, A_log, dt_bias, norm;
};
struct AttentionSlots {
  MatrixSlots q, k, v, out;
  SlotId q_norm, k_norm;
};
struct MoeSlots {
  MatrixSlots router, gate, up, down, shared_gate, shared_up, shared_down, shared_router;
};

DeltaSlots delta_slots(Builder& b, const std::string& name, const DeltaDims& d);
AttentionSlots attention_slots(Builder& b, const std::string& name, const AttentionDims& a);
MoeSlots moe_slots(Builder& b, const std::string& name, const MoeDims& m);

// One row's gated_delta as one dispatch; state and state_next may be one slot.
void add_delta_step(Builder& b, const DeltaDims& d, SlotId qkv, SlotId z, SlotId beta, SlotId a,
                    SlotId conv_weight, SlotId A_log, SlotId dt_bias, SlotId norm, SlotId conv,
                    SlotId conv_next, SlotId state, SlotId state_next, SlotId out,
                    int simdgroups = 16);

}  // namespace lily
