// Products y_i = x W_i^T with quantized or plain weights, for any number of rows.
//
//   gemv       one row, lanes share a weight row; norm, residual and rounding fused
//   (metal/linear/gemv.h);
//              its form on NVIDIA's tensor cores (metal/linear/gemv_mma.h)
//   gemv_rows  up to 16 rows, each weight read once (metal/linear/gemv_rows.h)
//   qgemm      tiles of 16, 32 or 64 rows (metal/linear/qgemm.h, gemm_mma.h)
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "builder.h"
#include "layer_program.h"

namespace lily {

// Which of them serves, or why none does. float32: the sums are not rounded. kAnyRows: all that may
// be needed.
Choice linear_kernel(Target target, Type t, const std::vector<MatrixSpec>& matrices, int rows,
                     bool float32);

// `kernel` is linear_kernel's answer.
void add_linear(Builder& b, const std::string& label, const std::string& kernel, int rows, SlotId x,
                const std::vector<MatrixSlots>& matrices, const std::vector<SlotId>& y,
                bool float32);

std::shared_ptr<LayerProgram> linear_program(Target target, Type t, int rows,
                                             const std::vector<MatrixSpec>& matrices, bool float32,
                                             const LayerOptions& options = {});

// What a target may run for weights of this format, whatever their sizes and rows.
void linear_pipelines(Target target, Type t, const MatrixSpec& format, bool float32,
                      Pipelines& out);

// ---- One row, as the decode step fuses it

struct GemvOptions {
  std::optional<SlotId> norm;      // normalise h with this weight first
  std::optional<SlotId> residual;  // y = rnd(residual + rnd(W x))
  std::optional<SlotId> row;       // gets the normalised row
  bool float32 = false;            // y is fp32, unrounded
  float eps = 0.0f;
  TileFields tiles;
  bool mma = false;  // NVIDIA's tensor cores, where they serve
};

// Why gemv.h has no kernel for a product of these, empty when it has.
std::string gemv_refusal(const std::vector<MatrixSpec>& matrices, bool float32);

// y_i = W_i h for one to four matrices with the same columns and group, one dispatch.
void add_gemv(Builder& b, const std::string& label, const std::vector<MatrixSlots>& matrices,
              SlotId h, const std::vector<SlotId>& y, const GemvOptions& options);

// How many lanes, rows and units: see gemv.h.
struct GemvTile {
  int lanes, r, u, split, simdgroups, blocks;
  bool mma = false;  // of gemv_mma.h
};
// The tile of a launch, with what `tiles` says of `label`. Throws std::invalid_argument where no
// kernel is compiled for it, or K is no multiple of it.
GemvTile gemv_tile(Type t, const std::vector<MatrixSpec>& matrices, const GemvOptions& options,
                   const std::string& label);
Constants gemv_constants(Type t, const std::vector<MatrixSpec>& matrices, const GemvTile& tile,
                         const GemvOptions& options);
int gemv_groups(const std::vector<MatrixSpec>& matrices, const GemvTile& tile);
// The greatest K that a kernel for `cols` columns holds, as its name says.
int kmax(int cols);

// ---- Tiles, which the experts' kernels share

// Sums over lanes of gemv_rows.h: rows held, weight rows a lane, lanes a weight row.
struct RowsTile {
  int most, r, lanes;

  int made() const {
    return 4 * r * (32 / lanes);
  }
};
RowsTile rows_tile(int rows, int depth);
constexpr int kMostRowsTile = 16;

// What a threadgroup of a GEMM makes, and its threads.
struct GemmBlock {
  int rows, columns, threads;
};
GemmBlock gemm_block(Target target, int rows);
// `columns`: weight rows of the whole launch.
GemmBlock gemm_block(Target target, int rows, int columns);
const std::vector<int>& gemm_block_rows(Target target);
// Of kernels on a matrix unit: "" (simdgroup_matrix), "nax_" or "mma_".
std::string unit_prefix(Target target);

// Plain elements of a quantized weight, from dispatches of their own.
MatrixSlots dequantized(Builder& b, const MatrixSlots& m);

// Constants of kernels for one format.
Constants weight_format(const MatrixSpec& m, Type t);

}  // namespace lily
