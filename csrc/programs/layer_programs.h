// The layer primitives as Programs, for any batch and length. Each may be a Program of its own, or
// a part of a larger one (a whole prefill chunk).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "programs/decode_program.h"

namespace lily {

// Inputs and outputs in the order of the primitive's arrays; index -1: an input that no kernel
// reads.
struct LayerProgram {
  Program program;
  std::vector<SlotId> inputs, outputs;
  std::vector<Builder::Table> tables;
  mutable std::shared_ptr<const void> on_device;  // the tables there, kept by a backend
};

// The matrix unit that GEMMs are compiled for: simdgroup_matrix, Metal 4 tensor operations,
// NVIDIA's tensor cores.
enum class MatrixUnit : uint8_t { simdgroup, tensor, nvidia };

// y_i = x W_i^T for `rows` rows. kernel: "gemv", "gemv_rows" or "qgemm", by the selection table.
void add_project(Builder& b, const std::string& label, const std::string& kernel, int rows,
                 SlotId x, const std::vector<MatrixSlots>& matrices, const std::vector<SlotId>& y,
                 bool float32, MatrixUnit unit = MatrixUnit::simdgroup);
// Why no kernel serves one of the matrices, empty when one does.
std::string project_refusal(Type t, const std::string& kernel,
                            const std::vector<MatrixDims>& matrices, bool float32);
std::shared_ptr<LayerProgram> project_program(Type t, const std::string& kernel, int rows,
                                              const std::vector<MatrixDims>& matrices, bool float32,
                                              MatrixUnit unit = MatrixUnit::simdgroup);

void add_rms_norm(Builder& b, const std::string& label, int rows, int dim, float eps, SlotId x,
                  SlotId weight, SlotId y);
std::shared_ptr<LayerProgram> rms_norm_program(Type t, int rows, int dim, float eps);

void add_embed(Builder& b, const std::string& label, int count, SlotId ids, const MatrixSlots& m,
               SlotId y);
std::shared_ptr<LayerProgram> embed_program(Type t, int count, const MatrixDims& m);

// The forms of the scan: gdn_scan with the norm in the same kernel or apart, its block-staged form,
// and the matrix form over blocks of 32 tokens.
enum class Scan : uint8_t { norm, apart, block, chunk };

struct GatedDeltaDims {
  int B = 1, T = 1;
  int key_heads = 0, value_heads = 0;
  float eps = 0.0f;
  bool has_conv_state = false, has_state = false, has_mask = false, has_lengths = false;

  int channels() const {
    return (2 * key_heads + value_heads) * 128;
  }
};
struct GatedDeltaSlots {
  SlotId qkv, z, b, a, conv_weight, A_log, dt_bias, norm, conv_state, state, mask, lengths;
  SlotId out, conv_next, state_next;
};
// kernel: "gdn_step" (one row, no mask) or "gdn_scan".
void add_gated_delta(Builder& b, const std::string& kernel, const GatedDeltaDims& d,
                     const GatedDeltaSlots& s, const std::string& name, Scan scan = Scan::norm);
std::shared_ptr<LayerProgram> gated_delta_program(Type t, const std::string& kernel,
                                                  const GatedDeltaDims& d, Scan scan = Scan::norm);

struct PrepareDims {
  int B = 1, T = 1, heads = 0, kv_heads = 0, head_dim = 0, rotary = 0;
  float base = 0.0f, eps = 0.0f;
  bool offset_each = false;  // an offset a batch row
};
std::string prepare_refusal(Type t, const PrepareDims& d);
// k to [B, kv_heads, T, head_dim]; v too, where it is given.
void add_attention_prepare(Builder& b, const PrepareDims& d, SlotId q_gate, SlotId k,
                           std::optional<SlotId> v, SlotId q_norm, SlotId k_norm, SlotId offset,
                           SlotId q_out, SlotId k_out, std::optional<SlotId> v_out);
std::shared_ptr<LayerProgram> attention_prepare_program(Type t, const PrepareDims& d);

// rnd(o * sigmoid(gate)) for o [B, H, T, D], contiguous.
void add_attention_gate(Builder& b, int B, int T, int heads, int head_dim, SlotId o, SlotId q_gate,
                        SlotId out);

// kernel: "moe_rows" (up to 16 rows) or "moe_gemm". With h: out = rnd(h + rnd(y)).
void add_moe(Builder& b, const std::string& kernel, int rows, const MoeDims& m, const MoeSlots& w,
             SlotId x, SlotId out, const std::string& name, std::optional<SlotId> h = std::nullopt,
             MatrixUnit unit = MatrixUnit::simdgroup);
std::string layer_moe_refusal(Type t, const MoeDims& m);
std::shared_ptr<LayerProgram> moe_program(Type t, const std::string& kernel, int rows,
                                          const MoeDims& m,
                                          MatrixUnit unit = MatrixUnit::simdgroup);

// A prefill chunk of `tokens` tokens through the whole model. What
// mx.fast.scaled_dot_product_attention makes is an input; norms and residuals, which are MLX's on a
// GPU, stand in it as our own kernels.
std::shared_ptr<LayerProgram> prefill_program(const DecodeDims& dims, int tokens,
                                              Scan scan = Scan::norm,
                                              MatrixUnit unit = MatrixUnit::simdgroup);

}  // namespace lily
