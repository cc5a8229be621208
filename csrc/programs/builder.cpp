#include "programs/builder.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace lily {

std::string suffix(Type t) {
  return t == Type::bf16 ? "bf16" : t == Type::f16 ? "f16" : "f32";
}

std::string prefill_suffix(Type t) {
  return t == Type::bf16 ? "bf16" : "fp16";
}

void set_constants(Dispatch& d, const Constants& values) {
  for (const ConstantLayout& c : d.kernel->constants) {
    auto it = std::find_if(values.begin(), values.end(),
                           [&](const auto& given) { return c.name == given.first; });
    if (it == values.end()) {
      throw std::logic_error("kernel '" + d.kernel->name + "' has a function constant '" + c.name +
                             "' that its builder does not know.");
    }
    d.constant(c.name, it->second);
  }
}

size_t code_bytes(const MatrixDims& d, Type t) {
  const size_t values = size_t(d.experts) * d.rows * d.cols;
  return d.bits == 0 ? values * size_of(t) : values * d.bits / 8;
}

namespace {

size_t scale_bytes(const MatrixDims& d, Type t) {
  return size_t(d.experts) * d.rows * (d.cols / d.group) * size_of(t);
}

}  // namespace

SlotId Builder::weight(const std::string& name, size_t bytes) {
  SlotId s = program.slot(name, SlotKind::weight, bytes);
  weights.push_back(s);
  return s;
}

SlotId Builder::input(const std::string& name, size_t bytes) {
  return program.slot(name, SlotKind::input, bytes);
}

SlotId Builder::output(const std::string& name, size_t bytes) {
  return program.slot(name, SlotKind::output, bytes);
}

SlotId Builder::scratch(const std::string& name, size_t bytes) {
  return program.scratch(name, bytes);
}

SlotId Builder::table(const std::string& name, const void* data, size_t bytes) {
  SlotId s = program.slot(name, SlotKind::input, bytes);
  const char* p = static_cast<const char*>(data);
  tables.push_back({s, std::vector<char>(p, p + bytes)});
  return s;
}

MatrixSlots Builder::matrix(const std::string& name, const MatrixDims& d) {
  MatrixSlots m{d, t, weight(name + ".weight", code_bytes(d, t)), {}, {}};
  if (d.bits != 0) {
    m.scales = weight(name + ".scales", scale_bytes(d, t));
    m.biases = weight(name + ".biases", scale_bytes(d, t));
  }
  return m;
}

void Builder::add(Dispatch d, const std::string& label) {
  d.label(label).layer(layer, phase);
  program.add(std::move(d));
}

namespace {

void read_part(Dispatch& d, const std::string& name, SlotId slot, const MatrixDims& m,
               std::optional<int> experts, size_t bytes) {
  d.read(name, slot);
  if (experts) {
    d.traffic({bytes / m.experts * *experts, {}, 0});
  }
}

}  // namespace

void read_matrix(Dispatch& d, const MatrixSlots& m, const std::string& w, const std::string& scales,
                 const std::string& biases, std::optional<int> experts) {
  const Type t = m.t;
  read_part(d, w, m.w, m.dims, experts, code_bytes(m.dims, t));
  if (m.quantized()) {
    read_part(d, scales, m.scales, m.dims, experts, scale_bytes(m.dims, t));
    read_part(d, biases, m.biases, m.dims, experts, scale_bytes(m.dims, t));
  }
}

void read_matrix_always(Dispatch& d, const MatrixSlots& m, const std::string& w,
                        const std::string& scales, const std::string& biases,
                        std::optional<int> experts) {
  read_matrix(d, m, w, scales, biases, experts);
  if (!m.quantized()) {
    read_nothing(d, scales, m.w);
    read_nothing(d, biases, m.w);
  }
}

void read_nothing(Dispatch& d, const std::string& name, SlotId any) {
  d.read(name, any, {0, 1}).traffic({0, {}, 0});
}

// ---- One row

int kmax(int cols) {
  return cols <= 2048 ? 2048 : cols <= 4096 ? 4096 : 8192;
}

GemvTile gemv_tile(int cols, const std::vector<int>& bits, int rows) {
  int units = 0;
  for (int b : bits) {
    units = std::gcd(units, cols * b / 128);
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

std::optional<GemvTile> sync_tile(Type t, const std::vector<MatrixDims>& matrices, bool float32) {
  const int cols = matrices[0].cols, split = cols / 256;
  int blocks = 0;
  for (const MatrixDims& m : matrices) {
    if (m.bits != 4 || m.group != 64) {
      return std::nullopt;
    }
    blocks += ceil_div(m.rows, 16);
  }
  const bool serves = t != Type::f32 && !float32 && cols % 256 == 0 && (split == 8 || split == 16);
  if (!serves || blocks < kMultiprocessors / 2) {
    return std::nullopt;
  }
  // Sixteen simdgroups a multiprocessor at a time, and the same number of blocks for each.
  return GemvTile{2, 1, 2, split, split, ceil_div(blocks, kMultiprocessors * (16 / split))};
}

void check_tile(const GemvTile& tile, const std::vector<MatrixDims>& matrices, Type t, bool sync,
                const std::string& label) {
  // LILY_GEMV_SHAPES of gemv.h; gemv_sync.h.
  static const std::vector<std::pair<int, int>> lanes_shapes = {{1, 1}, {1, 2}, {1, 4}, {2, 1},
                                                                {2, 2}, {4, 1}, {4, 2}, {8, 1}};
  static const std::vector<std::pair<int, int>> sync_shapes = {{1, 2}, {1, 4}};
  const auto& shapes = sync ? sync_shapes : lanes_shapes;
  bool fits = std::find(shapes.begin(), shapes.end(), std::pair{tile.r, tile.u}) != shapes.end() &&
              tile.simdgroups <= 16 && tile.simdgroups % tile.split == 0;
  for (const MatrixDims& m : matrices) {
    const int units = m.cols * kernel_bits(m, t) / 128;
    fits = fits && (sync ? m.cols == 128 * tile.u * tile.split
                         : units % (tile.lanes * tile.u * tile.split) == 0);
  }
  if (!fits) {
    throw std::invalid_argument(
        label + ": no kernel for lanes " + std::to_string(tile.lanes) + ", r " +
        std::to_string(tile.r) + ", u " + std::to_string(tile.u) + ", split " +
        std::to_string(tile.split) + ", simdgroups " + std::to_string(tile.simdgroups) + " with " +
        std::to_string(matrices[0].cols) + " columns; metal/gemv.h has the shapes");
  }
}

void override_tile(GemvTile& tile, const TileFields& tiles, const std::string& label) {
  override_field(tile.lanes, tiles, label + ".lanes");
  override_field(tile.r, tiles, label + ".r");
  override_field(tile.u, tiles, label + ".u");
  override_field(tile.split, tiles, label + ".split");
  override_field(tile.simdgroups, tiles, label + ".simdgroups");
  override_field(tile.blocks, tiles, label + ".blocks");
}

int gemv_groups(const std::vector<MatrixDims>& matrices, const GemvTile& tile) {
  const int block_rows = tile.r * (32 / tile.lanes);
  int blocks = 0;
  for (const MatrixDims& m : matrices) {
    blocks += ceil_div(m.rows, block_rows);
  }
  return ceil_div(ceil_div(blocks, tile.blocks) * tile.split, tile.simdgroups);
}

Constants gemv_constants(Type t, const std::vector<MatrixDims>& matrices, const GemvTile& tile,
                         const GemvOptions& options) {
  auto rows = [&](size_t i) { return i < matrices.size() ? matrices[i].rows : 0; };
  auto bits = [&](size_t i) { return kernel_bits(matrices[i < matrices.size() ? i : 0], t); };
  auto quantized = [&](size_t i) { return i < matrices.size() && matrices[i].bits != 0; };
  int group = 0;
  for (const MatrixDims& m : matrices) {
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

std::string gemv_refusal(Type t, const std::vector<MatrixDims>& matrices, bool float32) {
  int group = 0;
  for (const MatrixDims& m : matrices) {
    if (m.cols > (float32 || t == Type::f32 ? 4096 : 8192)) {
      return "a row of " + std::to_string(m.cols) + " values does not fit threadgroup memory";
    }
    if (m.bits != 0 && group != 0 && m.group != group) {
      return "the weights of one launch differ in group size";
    }
    group = std::max(group, m.group);
    if (m.cols * kernel_bits(m, t) % 128 != 0) {
      return "a weight row of " + std::to_string(m.cols) + " columns is no multiple of 16 bytes";
    }
  }
  return "";
}

void add_gemv(Builder& b, const std::string& label, const std::vector<MatrixSlots>& matrices,
              SlotId h, const std::vector<SlotId>& y, const GemvOptions& options) {
  std::vector<MatrixDims> dims;
  std::vector<int> bits;
  int rows = 0;
  for (const MatrixSlots& m : matrices) {
    dims.push_back(m.dims);
    bits.push_back(kernel_bits(m.dims, b.t));
    rows += m.dims.rows;
  }
  const auto sync =
      options.sync ? sync_tile(b.t, dims, options.float32) : std::optional<GemvTile>();
  GemvTile tile = sync ? *sync : gemv_tile(dims[0].cols, bits, rows);
  override_tile(tile, options.tiles, label);
  check_tile(tile, dims, b.t, sync.has_value(), label);
  const bool wide = options.float32 && b.t != Type::f32;
  Dispatch d(kernels().at((sync ? "sync_gemv_" : "gemv_") + suffix(b.t) + (wide ? "_f32_k" : "_k") +
                          std::to_string(kmax(dims[0].cols))));
  set_constants(d, gemv_constants(b.t, dims, tile, options));
  d.read("h", h, {0, b.size(dims[0].cols)});
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
    const size_t bytes = size_t(dims[i].rows) * (options.float32 ? 4 : size_of(b.t));
    d.write("y" + n, y[i], {options.offsets ? (*options.offsets)[i] : 0, bytes});
  }
  d.grid(gemv_groups(dims, tile)).threads(32 * tile.simdgroups);
  b.add(std::move(d), label);
}

}  // namespace lily
