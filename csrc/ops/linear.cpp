#include "ops/linear.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "../metal/params.h"

namespace lily {

// ---- One row

int kmax(int cols) {
  return cols <= 2048 ? 2048 : cols <= 4096 ? 4096 : 8192;
}

namespace {

GemvTile lanes_tile(int cols, const std::vector<int>& bits, int rows) {
  int units = 0;
  for (int b : bits) {
    units = std::gcd(units, cols / unit_codes(b));
  }
  const int lanes = std::min(32, units & -units);
  const int steps = units / lanes;
  auto divides = [&](int n) { return steps % n == 0; };
  if (lanes < 32) {
    return {lanes, std::min(lanes, 2), 1, 1, 4, 1};
  }
  if (rows <= 512) {  // the router: few rows, so several simdgroups share one
    return {32, 1, 1, divides(4) ? 4 : divides(2) ? 2 : 1, 8, 1};
  }
  if (rows >= 65536) {
    return {32, 4, divides(2) ? 2 : 1, 1, 8, 3};
  }
  if (rows >= 4096) {
    return {32, 4, divides(2) ? 2 : 1, 1, 8, 1};
  }
  return {32, 1, divides(4) ? 4 : divides(2) ? 2 : 1, 1, 8, 1};
}

std::optional<GemvTile> mma_tile(const std::vector<MatrixSpec>& matrices, bool float32) {
  const int cols = matrices[0].cols, split = cols / 256;
  int blocks = 0;
  for (const MatrixSpec& m : matrices) {
    if (m.bits != 4 || m.group != 64) {
      return std::nullopt;
    }
    blocks += ceil_div(m.rows, 16);
  }
  const bool serves = !float32 && cols % 256 == 0 && (split == 8 || split == 16);
  if (!serves || blocks < kMultiprocessors / 2) {
    return std::nullopt;
  }
  // Sixteen simdgroups a multiprocessor at a time, and the same number of blocks for each.
  return GemvTile{2, 1, 2, split, split, ceil_div(blocks, kMultiprocessors * (16 / split)), true};
}

void check_tile(const GemvTile& tile, const std::vector<MatrixSpec>& matrices, Type t,
                const std::string& label) {
  // LILY_GEMV_SHAPES of gemv.h; gemv_mma.h.
  static const std::vector<std::pair<int, int>> lanes_shapes = {{1, 1}, {1, 2}, {1, 4}, {2, 1},
                                                                {2, 2}, {4, 1}, {4, 2}, {8, 1}};
  static const std::vector<std::pair<int, int>> mma_shapes = {{1, 2}, {1, 4}};
  const auto& shapes = tile.mma ? mma_shapes : lanes_shapes;
  bool fits = std::find(shapes.begin(), shapes.end(), std::pair{tile.r, tile.u}) != shapes.end() &&
              tile.simdgroups <= 16 && tile.simdgroups % tile.split == 0;
  for (const MatrixSpec& m : matrices) {
    const int units = m.cols / unit_codes(kernel_bits(m, t));
    fits = fits && (tile.mma ? m.cols == 128 * tile.u * tile.split
                             : units % (tile.lanes * tile.u * tile.split) == 0);
  }
  if (!fits) {
    throw std::invalid_argument(
        label + ": no kernel for lanes " + std::to_string(tile.lanes) + ", r " +
        std::to_string(tile.r) + ", u " + std::to_string(tile.u) + ", split " +
        std::to_string(tile.split) + ", simdgroups " + std::to_string(tile.simdgroups) + " with " +
        std::to_string(matrices[0].cols) + " columns; metal/linear/gemv.h has the shapes");
  }
}

}  // namespace

GemvTile gemv_tile(Type t, const std::vector<MatrixSpec>& matrices, const GemvOptions& options,
                   const std::string& label) {
  std::vector<int> bits;
  int rows = 0;
  for (const MatrixSpec& m : matrices) {
    bits.push_back(kernel_bits(m, t));
    rows += m.rows;
  }
  const auto mma = options.mma ? mma_tile(matrices, options.float32) : std::nullopt;
  GemvTile tile = mma ? *mma : lanes_tile(matrices[0].cols, bits, rows);
  override_field(tile.lanes, options.tiles, label + ".lanes");
  override_field(tile.r, options.tiles, label + ".r");
  override_field(tile.u, options.tiles, label + ".u");
  override_field(tile.split, options.tiles, label + ".split");
  override_field(tile.simdgroups, options.tiles, label + ".simdgroups");
  override_field(tile.blocks, options.tiles, label + ".blocks");
  check_tile(tile, matrices, t, label);
  return tile;
}

int gemv_groups(const std::vector<MatrixSpec>& matrices, const GemvTile& tile) {
  const int block_rows = tile.r * (32 / tile.lanes);
  int blocks = 0;
  for (const MatrixSpec& m : matrices) {
    blocks += ceil_div(m.rows, block_rows);
  }
  return ceil_div(ceil_div(blocks, tile.blocks) * tile.split, tile.simdgroups);
}

Constants gemv_constants(Type t, const std::vector<MatrixSpec>& matrices, const GemvTile& tile,
                         const GemvOptions& options) {
  auto rows = [&](size_t i) { return i < matrices.size() ? matrices[i].rows : 0; };
  auto bits = [&](size_t i) { return kernel_bits(matrices[i < matrices.size() ? i : 0], t); };
  auto quantized = [&](size_t i) { return i < matrices.size() && matrices[i].bits != 0; };
  int group = 0;
  for (const MatrixSpec& m : matrices) {
    group = std::max(group, m.group);
  }
  return {{"kK", int32_t{matrices[0].cols}},
          {"kRows0", int32_t{rows(0)}},
          {"kRows1", int32_t{rows(1)}},
          {"kRows2", int32_t{rows(2)}},
          {"kRows3", int32_t{rows(3)}},
          {"kBits0", int32_t{bits(0)}},
          {"kBits1", int32_t{bits(1)}},
          {"kBits2", int32_t{bits(2)}},
          {"kBits3", int32_t{bits(3)}},
          {"kGroup", int32_t{group == 0 ? 64 : group}},
          {"kLanes", int32_t{tile.lanes}},
          {"kR", int32_t{tile.r}},
          {"kU", int32_t{tile.u}},
          {"kSplit", int32_t{tile.split}},
          {"kSimdgroups", int32_t{tile.simdgroups}},
          {"kBlocks", int32_t{tile.blocks}},
          {"kNorm", options.norm.has_value()},
          {"kResidual", options.residual.has_value()},
          {"kWriteX", options.row.has_value()},
          {"kEps", options.eps},
          {"kHas1", rows(1) > 0},
          {"kHas2", rows(2) > 0},
          {"kHas3", rows(3) > 0},
          {"kQuantized0", quantized(0)},
          {"kQuantized1", quantized(1)},
          {"kQuantized2", quantized(2)},
          {"kQuantized3", quantized(3)}};
}

std::string gemv_refusal(const std::vector<MatrixSpec>& matrices, bool float32) {
  int group = 0;
  for (const MatrixSpec& m : matrices) {
    if (m.cols > (float32 ? 4096 : 8192)) {
      return "a row of " + std::to_string(m.cols) + " values does not fit threadgroup memory";
    }
    if (m.bits != 0 && group != 0 && m.group != group) {
      return "the weights of one launch differ in group size";
    }
    group = std::max(group, m.group);
  }
  return "";
}

void add_gemv(Builder& b, const std::string& label, const std::vector<MatrixSlots>& matrices,
              SlotId h, const std::vector<SlotId>& y, const GemvOptions& options) {
  const std::vector<MatrixSpec> specs = specs_of(matrices);
  const GemvTile tile = gemv_tile(b.t, specs, options, label);
  const int cols = specs[0].cols;
  Dispatch d(kernels().at((tile.mma ? "mma_gemv_" : "gemv_") + suffix(b.t) +
                          (options.float32 ? "_fp32_k" : "_k") + std::to_string(kmax(cols))));
  set_constants(d, gemv_constants(b.t, specs, tile, options));
  d.read("h", h, {0, b.size(cols)});
  if (options.norm) {
    d.read("norm_weight", *options.norm);
  }
  if (options.residual) {
    d.read("residual", *options.residual);
  }
  if (options.row) {
    d.write("x_out", *options.row);
  }
  for (size_t i = 0; i < matrices.size(); ++i) {
    const std::string n = std::to_string(i);
    read_matrix(d, matrices[i], "w" + n, "scales" + n, "biases" + n);
    d.write("y" + n, y[i], {0, size_t(specs[i].rows) * (options.float32 ? 4 : size_of(b.t))});
  }
  d.grid(gemv_groups(specs, tile)).threads(32 * tile.simdgroups);
  b.add(std::move(d), label);
}

// ---- Several rows

RowsTile rows_tile(int rows, int depth) {
  RowsTile t{rows <= 4 ? 4 : rows <= 8 ? 8 : kMostRowsTile, 2, 32};
  while (t.lanes > 1 && t.lanes * 16 > depth) {
    t.lanes /= 2;
  }
  return t;
}

namespace {

// The blocks of metal/linear/gemm_mma.h, and microseconds that a wave of them takes at K = 2048 on
// an H200 by how many a multiprocessor has, at most as many as fit (`python -m benchmarks
// gpu_gemm`).
struct MmaBlock {
  GemmBlock block;
  int fit;
  float wave[3];
};
constexpr MmaBlock kMmaBlocks[] = {{{16, 128, 128}, 3, {12, 17, 21}},
                                   {{32, 128, 128}, 3, {18, 25, 32}},
                                   {{64, 256, 256}, 1, {33}}};

float mma_time(const MmaBlock& b, int rows, int columns) {
  const int blocks = ceil_div(rows, b.block.rows) * ceil_div(columns, b.block.columns);
  const int full = b.fit * kMultiprocessors, rest = ceil_div(blocks % full, kMultiprocessors);
  return blocks / full * b.wave[b.fit - 1] + (rest > 0 ? b.wave[rest - 1] : 0.0f);
}

}  // namespace

const std::vector<int>& gemm_block_rows(Target target) {
  static const std::vector<int> all = {16, 32, 64}, tensor = {32, 64};
  return target == Target::metal_nax ? tensor : all;
}

GemmBlock gemm_block(Target target, int rows) {
  if (target == Target::cuda) {
    for (const MmaBlock& b : kMmaBlocks) {
      if (b.block.rows == rows) {
        return b.block;
      }
    }
  }
  return {rows, 64, 128};
}

GemmBlock gemm_block(Target target, int rows, int columns) {
  if (target == Target::cuda) {
    const auto* best = std::min_element(
        std::begin(kMmaBlocks), std::end(kMmaBlocks), [&](const MmaBlock& a, const MmaBlock& b) {
          return mma_time(a, rows, columns) < mma_time(b, rows, columns);
        });
    return best->block;
  }
  for (int block : gemm_block_rows(target)) {
    if (rows <= block) {
      return gemm_block(target, block);
    }
  }
  return gemm_block(target, gemm_block_rows(target).back());
}

std::string unit_prefix(Target target) {
  return target == Target::metal_nax ? "nax_" : target == Target::cuda ? "mma_" : "";
}

Constants weight_format(const MatrixSpec& m, Type t) {
  return {{"kBits", int32_t{kernel_bits(m, t)}}, {"kGroup", int32_t{m.bits != 0 ? m.group : 32}}};
}

MatrixSlots dequantized(Builder& b, const MatrixSlots& m) {
  if (!m.quantized()) {
    return m;
  }
  constexpr size_t kRows = 32768;  // of a dispatch
  const std::string table = "rows of a weight";
  std::optional<SlotId> ids;
  for (const Builder::Table& t : b.tables) {
    if (b.program.slots()[t.slot.index].name == table) {
      ids = t.slot;
    }
  }
  if (!ids) {
    std::vector<uint32_t> all(kRows);
    std::iota(all.begin(), all.end(), 0);
    ids = b.table(table, all.data(), 4 * kRows);
  }
  const size_t rows = size_t(m.spec.experts) * m.spec.rows;
  MatrixSlots plain{
      m.spec,
      b.scratch(b.program.slots()[m.w.index].name + " plain", b.size(rows * m.spec.cols)),
      {},
      {}};
  plain.spec.bits = plain.spec.group = 0;
  for (size_t first = 0; first < rows; first += kRows) {
    const size_t count = std::min(kRows, rows - first);
    auto part = [&](size_t row_bytes) { return Range{first * row_bytes, count * row_bytes}; };
    const size_t groups = b.size(m.spec.cols / m.spec.group);
    Dispatch d(kernels().at("embed_rows_" + suffix(b.t)));
    set_constants(d, weight_format(m.spec, b.t));
    d.read("ids", *ids, {0, 4 * count});
    d.read("w", m.w, part(size_t(m.spec.cols) * m.spec.bits / 8));
    d.read("scales", m.scales, part(groups)).read("biases", m.biases, part(groups));
    d.write("out", plain.w, part(b.size(m.spec.cols)));
    d.value("p", Value::of_struct(EmbedParams{static_cast<int>(count), m.spec.cols}));
    d.grid(ceil_div(m.spec.cols, 1024), static_cast<uint32_t>(count)).threads(128);
    b.add(std::move(d), "dequantize");
  }
  return plain;
}

namespace {

// What one launch takes of the matrices of a projection: the same format, up to four.
std::vector<std::vector<size_t>> batches(const std::vector<MatrixSlots>& matrices,
                                         bool bits_may_differ) {
  std::vector<std::vector<size_t>> out;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const MatrixSpec& m = matrices[i].spec;
    auto fits = [&](const std::vector<size_t>& batch) {
      return batch.size() < 4 && std::all_of(
                                     batch.begin(), batch.end(),
                                     [&](size_t j) {
                                       const MatrixSpec& o = matrices[j].spec;
                                       const bool same_group = o.group == m.group;
                                       return bits_may_differ
                                                  ? same_group || o.bits == 0 || m.bits == 0
                                                  : same_group && o.bits == m.bits;
                                     });
    };
    auto it = std::find_if(out.begin(), out.end(), fits);
    if (it == out.end()) {
      out.push_back({i});
    } else {
      it->push_back(i);
    }
  }
  return out;
}

std::string output_suffix(Type t, bool float32) {
  return suffix(t) + "_" + (float32 ? "fp32" : suffix(t));
}

std::string rows_kernel(Type t, bool float32, int most) {
  return "gemv_rows_multi_" + output_suffix(t, float32) + "_m" + std::to_string(most);
}

std::string gemm_kernel(Target target, Type t, bool float32, int block_rows) {
  return unit_prefix(target) + "qgemm_multi_" + output_suffix(t, float32) + "_m" +
         std::to_string(block_rows);
}

// The form that gemv_rows.h and qgemm.h share: up to four matrices side by side.
void add_multi(Builder& b, const std::string& label, const std::string& kernel, Value params,
               const std::vector<MatrixSlots>& matrices, SlotId x, const std::vector<SlotId>& y,
               int groups_x, int groups_y, int threads) {
  Dispatch d(kernels().at(kernel));
  set_constants(d, weight_format(matrices[0].spec, b.t));
  d.read("x", x);
  for (size_t i = 0; i < 4; ++i) {
    const std::string n = std::to_string(i);
    if (i < matrices.size()) {
      read_matrix_always(d, matrices[i], "w" + n, "scales" + n, "biases" + n);
      d.write("y" + n, y[i]);
    } else {
      for (const char* name : {"w", "scales", "biases", "y"}) {
        read_nothing(d, name + n, x);
      }
    }
  }
  d.value("p", std::move(params)).grid(groups_x, groups_y).threads(threads);
  b.add(std::move(d), label);
}

}  // namespace

Choice linear_kernel(Target target, Type t, const std::vector<MatrixSpec>& matrices, int rows,
                     bool float32) {
  if (Choice c = first_refusal(check_activations(target, t), check_matrices(target, t, matrices));
      !c) {
    return c;
  }
  if (target == Target::cpu) {
    return chosen("reference");
  }
  const bool one_row =
      is_metal(target) && std::all_of(matrices.begin(), matrices.end(), [&](const MatrixSpec& m) {
        return gemv_refusal({m}, float32).empty();
      });
  if (rows == kAnyRows) {
    return chosen(one_row ? "gemv, gemv_rows, qgemm" : "gemv_rows, qgemm");
  }
  return chosen(rows == 1 && one_row ? "gemv" : rows <= kMostRowsTile ? "gemv_rows" : "qgemm");
}

void add_linear(Builder& b, const std::string& label, const std::string& kernel, int rows, SlotId x,
                const std::vector<MatrixSlots>& given, const std::vector<SlotId>& y, bool float32) {
  const bool one_row = kernel == "gemv";
  std::vector<MatrixSlots> matrices = given;
  if (b.form.dequantize && kernel == "qgemm") {
    for (MatrixSlots& m : matrices) {
      m = dequantized(b, m);
    }
  }
  for (const std::vector<size_t>& batch : batches(matrices, one_row)) {
    std::vector<MatrixSlots> w;
    std::vector<SlotId> to;
    int columns = 0;
    for (size_t i : batch) {
      w.push_back(matrices[i]);
      to.push_back(y[i]);
      columns += matrices[i].spec.rows;
    }
    const int depth = w[0].spec.cols;
    if (one_row) {
      GemvOptions options;
      options.float32 = float32;
      add_gemv(b, label, w, x, to, options);
    } else if (kernel == "gemv_rows") {
      const RowsTile tile = rows_tile(rows, depth);
      GemvRowsMultiParams p{rows, depth, tile.lanes, {}};
      int groups = 0;
      for (size_t i = 0; i < w.size(); ++i) {
        p.n[i] = w[i].spec.rows;
        groups += ceil_div(p.n[i], tile.made());
      }
      add_multi(b, label, rows_kernel(b.t, float32, tile.most), Value::of_struct(p), w, x, to,
                groups, 1, 128);
    } else {
      const GemmBlock block = gemm_block(b.target, rows, columns);
      QgemmMultiParams p{rows, depth, {}};
      int groups = 0;
      for (size_t i = 0; i < w.size(); ++i) {
        p.n[i] = w[i].spec.rows;
        groups += ceil_div(p.n[i], block.columns);
      }
      add_multi(b, label, gemm_kernel(b.target, b.t, float32, block.rows), Value::of_struct(p), w,
                x, to, groups, ceil_div(rows, block.rows), block.threads);
    }
  }
}

std::shared_ptr<LayerProgram> linear_program(Target target, Type t, int rows,
                                             const std::vector<MatrixSpec>& matrices, bool float32,
                                             const LayerOptions& options) {
  Builder b("project", target, t);
  b.form = options;
  SlotId x = b.input("x", b.size(size_t(rows) * matrices[0].cols));
  std::vector<SlotId> inputs{x}, outputs;
  std::vector<MatrixSlots> slots;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const std::string number = std::to_string(i);
    slots.push_back(b.matrix(std::string("w").append(number), matrices[i]));
    outputs.push_back(b.output(std::string("y").append(number),
                               size_t(rows) * matrices[i].rows * (float32 ? 4 : size_of(t))));
  }
  inputs.insert(inputs.end(), b.weights.begin(), b.weights.end());
  const Choice choice = linear_kernel(target, t, matrices, rows, float32);
  add_linear(b, "project", choice.kernel, rows, x, slots, outputs, float32);
  return finished(b, inputs, outputs);
}

void linear_pipelines(Target target, Type t, const MatrixSpec& format, bool float32,
                      Pipelines& out) {
  const Constants constants = weight_format(format, t);
  for (int most : {4, 8, kMostRowsTile}) {
    add_pipeline(out, rows_kernel(t, float32, most), constants);
  }
  for (int rows : gemm_block_rows(target)) {
    // Metal's blocks of 16 rows are the experts': that few dense rows go to gemv_rows.
    if (target == Target::cuda || rows > kMostRowsTile) {
      add_pipeline(out, gemm_kernel(target, t, float32, rows), constants);
    }
  }
}

}  // namespace lily
