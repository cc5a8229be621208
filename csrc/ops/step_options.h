// How a decode step's Program is built.
#pragma once

#include "builder.h"

namespace lily {

// The fused form is the default; each switch off gives the form that a fusion replaces, which
// benchmarks/ablate.py measures.
struct StepOptions {
  bool logits = false;           // logits go to memory too
  bool fuse_norm = true;         // RMS norm inside the projection that follows
  bool fuse_projections = true;  // projections of one row in one dispatch
  bool fuse_residual = true;     // the residual inside out_proj and o_proj
  bool fuse_delta = true;        // convolution, delta update and gated norm in one dispatch
  bool fuse_route = true;        // the experts are picked where they are needed
  bool serial_levels = false;    // each dispatch waits for the end of the one before
  int pack = 0;                  // query heads of one KV head a threadgroup; 0: by the target
  bool coalesced = true;         // neighbouring lanes read neighbouring bytes of the cache
  // Tokens of capacity above which splits have a fixed length; < 0: never.
  int fixed_block_from = 32768;
  int context = 0;   // tokens attended to, for counts of bytes; 0: the capacity
  bool mma = false;  // NVIDIA's tensor cores, where they serve
  int splits = 0;    // of a KV cache, all of equal length; 0: by the capacity
  int ahead = 0;     // kilobytes of the next layer's input projections that moe_route asks for
  // Other threads for dispatches: "label.field", e.g. "delta in.simdgroups". Fields are those of
  // GemvTile; of "experts up" lanes, r, u, simdgroups; of "experts down" lanes, r, u; of "delta
  // step", "attention", "attention prepare", "attention merge" and "argmax" simdgroups.
  TileFields tiles;

  bool operator==(const StepOptions&) const = default;
};

// What a target starts with. On NVIDIA GPUs the experts are picked in a dispatch of its own: it
// takes less than the pick in every threadgroup, and moe_gate_up and moe_down know them before they
// wait.
StepOptions step_options(Target target);

}  // namespace lily
