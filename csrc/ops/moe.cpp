#include "ops/moe.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <stdexcept>

#include "../metal/params.h"
#include "ops/linear.h"

namespace lily {
namespace {

constexpr int kMostExperts = 512, kMostTopK = 16;  // of the kernels
constexpr int kSmallRoute = 32;                    // rows that one threadgroup routes

Moe<Specs> specs_of(const Moe<Slots>& w) {
  return convert<Specs>(w, "", [](const std::string&, const MatrixSlots& m) { return m.spec; });
}

std::vector<MatrixSpec> matrices_of(const Moe<Specs>& m) {
  std::vector<MatrixSpec> all;
  Moe<Specs>::visit([&](Member, const MatrixSpec& x) { all.push_back(x); }, m);
  return all;
}

bool same_format(const MatrixSpec& a, const MatrixSpec& b) {
  return a.bits == b.bits && a.group == b.group;
}

Choice check_sizes(const Moe<Specs>& m, int most_experts, int most_top_k) {
  Choice c = first_refusal(check_range("experts", m.router.rows, 1, most_experts),
                           check_range("top_k", m.shape.top_k, 1, most_top_k));
  if (c && m.shape.top_k > m.router.rows) {
    c = refused(ReasonCode::out_of_range, "top_k " + std::to_string(m.shape.top_k) +
                                              " is more than experts " +
                                              std::to_string(m.router.rows) + ".");
  }
  return c;
}

}  // namespace

Choice moe_kernel(Target target, Type t, const Moe<Specs>& m, int rows) {
  Choice c = first_refusal(check_activations(target, t), check_matrices(target, t, matrices_of(m)));
  if (!c) {
    return c;
  }
  if (target == Target::cpu) {
    c = check_sizes(m, 1024, 32);
    return c ? chosen("reference") : c;
  }
  c = first_refusal(check_sizes(m, kMostExperts, kMostTopK),
                    check_multiple("expert width", m.gate.rows, 32),
                    check_multiple("shared expert width", m.shared_gate.rows, 32));
  if (!c) {
    return c;
  }
  if (!same_format(m.gate, m.up) || !same_format(m.shared_gate, m.shared_up)) {
    return refused(ReasonCode::unsupported_bits,
                   "gate_proj and up_proj differ in bits or group size.");
  }
  if (rows == kAnyRows) {
    return chosen("moe_rows, moe_gemm");
  }
  return chosen(rows <= kMostRowsTile ? "moe_rows" : "moe_gemm");
}

Choice moe_step_kernel(Target target, Type t, const Moe<Specs>& m) {
  Choice c = moe_kernel(target, t, m, 1);
  if (!c || target == Target::cpu) {
    return c;
  }
  auto no = [](const std::string& text) { return refused(ReasonCode::out_of_range, text); };
  if (m.router.rows % 32 != 0) {
    return no(std::to_string(m.router.rows) + " experts; multiples of 32 up to 512 have a kernel.");
  }
  if (!same_format(m.gate, m.down)) {
    return no("the experts' weights differ in bits or group size.");
  }
  if (!same_format(m.shared_gate, m.shared_down)) {
    return no("the shared expert's weights differ in bits or group size.");
  }
  if (m.gate.bits != 0 && m.shared_gate.bits != 0 && m.gate.group != m.shared_gate.group) {
    return no("the shared expert's group size differs from the others'.");
  }
  const std::string reason = gemv_refusal({m.router, m.shared_router}, true);
  return reason.empty() ? chosen("moe_step") : no(reason + ".");
}

// ---- Several rows

namespace {

// Rows of a block of one expert, by the rows that an expert gets on average.
int expert_rows(Target target, int rows, const Moe<Specs>& m, int asked) {
  const int mean = rows * m.shape.top_k / std::max(1, m.router.rows);
  const int block = asked > 0 ? asked : mean <= 16 ? 16 : mean <= 48 ? 32 : 64;
  return std::max(block, gemm_block_rows(target).front());
}

// Logits that a lane ranks, as routing kernels are named.
std::string experts_per_lane(int experts) {
  int n = 1;
  while (32 * n < experts) {
    n *= 2;
  }
  return std::to_string(n);
}

std::string rows_kernel(const char* which, Type t, int most) {
  return std::string(which) + "_rows_" + suffix(t) + "_m" + std::to_string(most);
}

std::string gemm_kernel(Target target, const char* which, Type t, int block_rows) {
  return unit_prefix(target) + which + "_" + suffix(t) + "_m" + std::to_string(block_rows);
}

struct Route {
  SlotId ids, weights, order, offsets, block_map;
  int entries;  // of the block map
};

Route add_route(Builder& b, int rows, int block, const MoeShape& shape, int experts, SlotId logits,
                const std::string& name) {
  const int assignments = rows * shape.top_k;
  Route r;
  // No more blocks than assignments: of experts that nobody chose there are none. Where a block
  // holds every row there is one an expert.
  r.entries =
      std::min(rows <= block ? experts : ceil_div(assignments, block) + experts, assignments);
  r.ids = b.scratch(name + "ids", 4 * size_t(assignments));
  r.weights = b.scratch(name + "weights", 4 * size_t(assignments));
  r.order = b.scratch(name + "order", 4 * size_t(assignments));
  r.offsets = b.scratch(name + "offsets", 4 * size_t(experts + 1));
  r.block_map = b.scratch(name + "block_map", 8 * size_t(r.entries));
  const std::string per_lane = experts_per_lane(experts);
  const Value p =
      Value::of_struct(RouteParams{rows, experts, shape.top_k, shape.normalize, block, r.entries});
  if (rows <= kSmallRoute) {
    Dispatch d(kernels().at("route_small_e" + per_lane));
    d.read("logits", logits).write("ids", r.ids).write("weights", r.weights);
    d.write("order", r.order).write("offsets", r.offsets).write("block_map", r.block_map);
    d.value("p", p).grid(1).threads(256);
    b.add(std::move(d), "route");
    return r;
  }
  const int token_blocks = ceil_div(rows, 32);
  SlotId counts = b.scratch(name + "counts", 4 * size_t(token_blocks) * experts);
  Dispatch top(kernels().at("route_topk_e" + per_lane));
  top.read("logits", logits).write("ids", r.ids).write("weights", r.weights);
  top.write("counts", counts).value("p", p).grid(token_blocks).threads(256);
  b.add(std::move(top), "route");
  Dispatch scan(kernels().at("route_scan"));
  scan.read_write("counts", counts).write("offsets", r.offsets).write("block_map", r.block_map);
  scan.value("p", p).grid(1).threads(256);
  b.add(std::move(scan), "route scan");
  Dispatch scatter(kernels().at("route_scatter"));
  scatter.read("ids", r.ids).read("starts", counts).write("order", r.order);
  scatter.value("p", p).grid(token_blocks).threads(256);
  b.add(std::move(scatter), "route scatter");
  return r;
}

// The shared expert's act: the experts' GEMM with one expert, or row products with fp32 sums, as
// the routed experts have.
SlotId add_shared_act(Builder& b, bool few, const std::string& product, int rows,
                      const Moe<Slots>& w, SlotId x, const std::string& name) {
  const int hidden = w.gate.spec.cols, width = w.shared_gate.spec.rows;
  SlotId act = b.scratch(name + "shared_act", b.size(size_t(rows) * width));
  if (few) {
    SlotId gate = b.scratch(name + "shared_gate", 4 * size_t(rows) * width);
    SlotId up = b.scratch(name + "shared_up", 4 * size_t(rows) * width);
    add_linear(b, "shared up", product, rows, x, {w.shared_gate, w.shared_up}, {gate, up}, true);
    Dispatch s(kernels().at("swiglu_rows_" + suffix(b.t)));
    s.read("gate", gate).read("up", up).write("act", act);
    s.value("count", int32_t{rows * width});
    s.grid(ceil_div(rows * width, 1024)).threads(256);
    b.add(std::move(s), "shared swiglu");
    return act;
  }
  const GemmBlock block = gemm_block(b.target, rows, 2 * width);
  Dispatch s(kernels().at(gemm_kernel(b.target, "moe_gate_up", b.t, block.rows)));
  set_constants(s, weight_format(w.shared_gate.spec, b.t));
  s.read("x", x);
  read_matrix_always(s, w.shared_gate, "gate", "gate_scales", "gate_biases");
  read_matrix_always(s, w.shared_up, "up", "up_scales", "up_biases");
  for (const char* unused : {"order", "offsets", "block_map"}) {
    read_nothing(s, unused, x);
  }
  s.write("act", act);
  s.value("p", Value::of_struct(MoeGateUpParams{rows, width, hidden, 1, 0}));
  s.grid(ceil_div(width, block.columns / 2), ceil_div(rows, block.rows)).threads(block.threads);
  b.add(std::move(s), "shared up");
  return act;
}

}  // namespace

void add_moe(Builder& b, int rows, const Moe<Slots>& weights, SlotId x, SlotId out,
             const std::string& name, std::optional<GivenLogits> given) {
  const bool few = rows <= kMostRowsTile;
  Moe<Slots> w = weights;
  if (b.form.dequantize && !few) {
    for (MatrixSlots* m : {&w.gate, &w.up, &w.down, &w.shared_gate, &w.shared_up}) {
      *m = dequantized(b, *m);
    }
  }
  const Moe<Specs> m = specs_of(w);
  const int hidden = m.gate.cols, width = m.gate.rows, experts = m.router.rows;
  const int assignments = rows * m.shape.top_k;
  const std::string product = few ? "gemv_rows" : "qgemm";
  if (!given) {
    given = {b.scratch(name + "logits", 4 * size_t(rows) * experts),
             b.scratch(name + "shared_logit", 4 * size_t(rows))};
    add_linear(b, "router", product, rows, x, {w.router, w.shared_router},
               {given->logits, given->shared_logit}, true);
  }
  const auto [logits, shared_logit] = *given;
  const GemmBlock block =
      few ? GemmBlock{16, 0, 128}
          : gemm_block(b.target, expert_rows(b.target, rows, m, b.form.block_rows));
  Route r = add_route(b, rows, block.rows, m.shape, experts, logits, name);

  // What is read at most: experts that somebody can have chosen.
  const int touched = std::min(experts, assignments);
  SlotId act = b.scratch(name + "act", b.size(size_t(assignments) * width));
  SlotId down = b.scratch(name + "down", 4 * size_t(assignments) * hidden);
  const RowsTile up_tile = rows_tile(rows, hidden), down_tile = rows_tile(rows, width);
  auto grouped = [&](const char* which) {
    Dispatch d(kernels().at(few ? rows_kernel(which, b.t, up_tile.most)
                                : gemm_kernel(b.target, which, b.t, block.rows)));
    d.read("order", r.order)
        .read("offsets", r.offsets)
        .read("block_map", r.block_map)
        .threads(block.threads);
    return d;
  };
  Dispatch u = grouped("moe_gate_up");
  set_constants(u, weight_format(m.gate, b.t));
  u.read("x", x);
  read_matrix_always(u, w.gate, "gate", "gate_scales", "gate_biases", touched);
  read_matrix_always(u, w.up, "up", "up_scales", "up_biases", touched);
  u.write("act", act);
  if (few) {
    u.value("p", Value::of_struct(MoeRowsParams{hidden, width, m.shape.top_k, up_tile.lanes}));
    u.grid(ceil_div(width, up_tile.made() / 2), r.entries);
  } else {
    u.value("p", Value::of_struct(MoeGateUpParams{assignments, width, hidden, m.shape.top_k, 1}));
    u.grid(ceil_div(width, block.columns / 2), r.entries);
  }
  b.add(std::move(u), "experts up");

  Dispatch d = grouped("moe_down");
  set_constants(d, weight_format(m.down, b.t));
  d.read("act", act);
  read_matrix_always(d, w.down, "w", "scales", "biases", touched);
  d.write("down", down);
  if (few) {
    d.value("p", Value::of_struct(MoeRowsParams{hidden, width, m.shape.top_k, down_tile.lanes}));
    d.grid(ceil_div(hidden, down_tile.made()), r.entries);
  } else {
    d.value("p", Value::of_struct(MoeDownParams{hidden, width}));
    d.grid(ceil_div(hidden, block.columns), r.entries);
  }
  b.add(std::move(d), "experts down");

  SlotId shared_act = add_shared_act(b, few, product, rows, w, x, name);
  SlotId shared_down = b.scratch(name + "shared_down", 4 * size_t(rows) * hidden);
  add_linear(b, "shared down", product, rows, shared_act, {w.shared_down}, {shared_down}, true);

  Dispatch c(kernels().at("moe_combine_" + suffix(b.t)));
  c.read("down", down).read("weights", r.weights).read("shared_down", shared_down);
  c.read("shared_gate", shared_logit);
  read_nothing(c, "h", x);
  c.write("out", out);
  c.value("p", Value::of_struct(CombineParams{hidden, m.shape.top_k, 1, 0}));
  c.grid(rows).threads(256);
  b.add(std::move(c), "combine");
}

std::shared_ptr<LayerProgram> moe_program(Target target, Type t, int rows, const Moe<Specs>& m,
                                          const LayerOptions& options, bool given) {
  Builder b("moe", target, t);
  b.form = options;
  std::vector<SlotId> inputs{b.input("x", b.size(size_t(rows) * m.gate.cols))};
  std::optional<GivenLogits> logits;
  if (given) {
    logits = {b.input("logits", 4 * size_t(rows) * m.router.rows),
              b.input("shared_logit", 4 * size_t(rows))};
    inputs.insert(inputs.end(), {logits->logits, logits->shared_logit});
  }
  Moe<Slots> w;
  w.shape = m.shape;
  Moe<Specs>::visit(
      [&](Member member, const MatrixSpec& from, MatrixSlots& to) {
        const bool unused = given && (&from == &m.router || &from == &m.shared_router);
        to = unused ? MatrixSlots{from, {}, {}, {}} : b.weight_slots()(member.path, from);
      },
      m, w);
  SlotId out = b.output("y", b.size(size_t(rows) * m.gate.cols));
  add_moe(b, rows, w, inputs[0], out, "", logits);
  inputs.insert(inputs.end(), b.weights.begin(), b.weights.end());
  return finished(b, inputs, {out});
}

void moe_pipelines(Target target, Type t, const Moe<Specs>& m, Pipelines& out) {
  for (const MatrixSpec* product :
       {&m.router, &m.shared_router, &m.shared_gate, &m.shared_up, &m.shared_down}) {
    linear_pipelines(target, t, *product, true, out);
  }
  for (int most : {4, 8, kMostRowsTile}) {
    add_pipeline(out, rows_kernel("moe_gate_up", t, most), weight_format(m.gate, t));
    add_pipeline(out, rows_kernel("moe_down", t, most), weight_format(m.down, t));
  }
  for (int rows : gemm_block_rows(target)) {
    add_pipeline(out, gemm_kernel(target, "moe_gate_up", t, rows), weight_format(m.gate, t));
    add_pipeline(out, gemm_kernel(target, "moe_gate_up", t, rows), weight_format(m.shared_gate, t));
    add_pipeline(out, gemm_kernel(target, "moe_down", t, rows), weight_format(m.down, t));
  }
  const std::string per_lane = experts_per_lane(m.router.rows), dtype = suffix(t);
  for (const std::string& name :
       {"route_small_e" + per_lane, "route_topk_e" + per_lane, std::string("route_scan"),
        std::string("route_scatter"), "swiglu_rows_" + dtype, "moe_combine_" + dtype}) {
    add_pipeline(out, name, {});
  }
}

// ---- One row, in the decode step

namespace {

MoeTile moe_tile(const Moe<Specs>& m, Type t, const TileFields& tiles) {
  auto units = [t](const MatrixSpec& w) { return w.cols / unit_codes(kernel_bits(w, t)); };
  const int up = std::gcd(units(m.gate), units(m.shared_gate));
  const int down = std::gcd(units(m.down), units(m.shared_down));
  MoeTile tile;
  tile.up_lanes = largest_power(up, 32);
  const bool wide = tile.up_lanes == 32;
  tile.up_u = wide && up / 32 % 2 == 0 ? 2 : 1;
  tile.up_r = std::min(tile.up_lanes, 2);
  tile.up_simdgroups = wide ? 8 : 4;
  tile.down_lanes = largest_power(down, 16);
  tile.down_r = tile.down_lanes >= 8 ? 4 : tile.down_lanes >= 2 ? 2 : 1;
  tile.down_u = 1;
  override_field(tile.up_lanes, tiles, "experts up.lanes");
  override_field(tile.up_r, tiles, "experts up.r");
  override_field(tile.up_u, tiles, "experts up.u");
  override_field(tile.up_simdgroups, tiles, "experts up.simdgroups");
  override_field(tile.down_lanes, tiles, "experts down.lanes");
  override_field(tile.down_r, tiles, "experts down.r");
  override_field(tile.down_u, tiles, "experts down.u");
  // LILY_UP_SHAPES and LILY_DOWN_SHAPES of moe_decode.h.
  static const std::set<std::pair<int, int>> up_shapes = {{1, 1}, {1, 2}, {2, 1}, {2, 2}, {4, 1}};
  static const std::set<std::pair<int, int>> down_shapes = {{1, 1}, {2, 1}, {4, 1},
                                                            {8, 1}, {2, 2}, {4, 2}};
  if (up_shapes.count({tile.up_r, tile.up_u}) == 0 ||
      down_shapes.count({tile.down_r, tile.down_u}) == 0) {
    throw std::invalid_argument("experts: no kernel for up r " + std::to_string(tile.up_r) +
                                ", u " + std::to_string(tile.up_u) + " with down r " +
                                std::to_string(tile.down_r) + ", u " + std::to_string(tile.down_u) +
                                "; metal/moe/moe_decode.h has the shapes");
  }
  if (up % (tile.up_lanes * tile.up_u) != 0 || down % (tile.down_lanes * tile.down_u) != 0) {
    throw std::invalid_argument("experts: a row of " + std::to_string(up) + " and " +
                                std::to_string(down) + " units is no multiple of lanes * u (up " +
                                std::to_string(tile.up_lanes) + " * " + std::to_string(tile.up_u) +
                                ", down " + std::to_string(tile.down_lanes) + " * " +
                                std::to_string(tile.down_u) + ")");
  }
  return tile;
}

// select: gate_up picks the experts.
Constants moe_constants(const Moe<Specs>& m, Type t, const MoeTile& tile, bool select) {
  const int group = std::max(m.gate.group, m.shared_gate.group);
  return {{"kExperts", int32_t{m.router.rows}},
          {"kTopK", int32_t{m.shape.top_k}},
          {"kNormTopK", m.shape.normalize},
          {"kHidden", int32_t{m.gate.cols}},
          {"kWidth", int32_t{m.gate.rows}},
          {"kSharedWidth", int32_t{m.shared_gate.rows}},
          {"kExpertBits", int32_t{kernel_bits(m.gate, t)}},
          {"kSharedBits", int32_t{kernel_bits(m.shared_gate, t)}},
          {"kMoeGroup", int32_t{group == 0 ? 64 : group}},
          {"kUpLanes", int32_t{tile.up_lanes}},
          {"kUpR", int32_t{tile.up_r}},
          {"kUpU", int32_t{tile.up_u}},
          {"kUpSimdgroups", int32_t{tile.up_simdgroups}},
          {"kDownLanes", int32_t{tile.down_lanes}},
          {"kDownR", int32_t{tile.down_r}},
          {"kDownU", int32_t{tile.down_u}},
          {"kExpertScales", m.gate.bits != 0},
          {"kSharedScales", m.shared_gate.bits != 0},
          {"kSelect", select},
          {"kGivenIds", !select}};
}

void add_gate_up(Builder& b, const Moe<Specs>& m, const Moe<Slots>& w, const MoeTile& tile,
                 bool select, const MoeRow& row, SlotId act) {
  const int hidden = m.gate.cols;
  Dispatch d(kernels().at("moe_gate_up_" + suffix(b.t) + "_k" + std::to_string(kmax(hidden))));
  set_constants(d, moe_constants(m, b.t, tile, select));
  d.read("x", row.x);
  if (select) {
    d.read("logits", row.logits).write("ids", row.ids).write("weights", row.weights);
  } else {
    d.read("given_ids", row.ids);
  }
  read_matrix(d, w.gate, "gate_w", "gate_scales", "gate_biases", m.shape.top_k);
  read_matrix(d, w.up, "up_w", "up_scales", "up_biases", m.shape.top_k);
  read_matrix(d, w.shared_gate, "shared_gate_w", "shared_gate_scales", "shared_gate_biases");
  read_matrix(d, w.shared_up, "shared_up_w", "shared_up_scales", "shared_up_biases");
  d.write("act", act);
  d.grid(m.shape.top_k * ceil_div(m.gate.rows, tile.up_rows()) +
         ceil_div(m.shared_gate.rows, tile.up_rows()));
  d.threads(32 * tile.up_simdgroups);
  b.add(std::move(d), "experts up");
}

void add_pick(Builder& b, const Moe<Specs>& m, const MoeTile& tile, const MoeRow& r,
              const MatrixSlots* ahead, const StepOptions& o) {
  if (o.ahead <= 0) {
    ahead = nullptr;
  }
  Dispatch d(kernels().at("moe_route"));
  Constants constants = moe_constants(m, b.t, tile, false);
  constants.push_back({"kAhead", ahead != nullptr});
  set_constants(d, constants);
  d.read("logits", r.logits).write("ids", r.ids).write("weights", r.weights);
  int groups = 1, lines = 0;
  if (ahead != nullptr) {
    const size_t bytes = std::min(size_t(o.ahead) * 1024, code_bytes(ahead->spec));
    d.read("ahead", ahead->w).traffic({0, {}, 0});  // they are the bytes of the next layer's kernel
    lines = static_cast<int>(bytes / 128);
    groups = kMultiprocessors;  // one picks
  }
  d.value("lines", int32_t{lines});
  d.grid(groups).threads(32 * tile.up_simdgroups);
  b.add(std::move(d), "route");
}

}  // namespace

MoeRow moe_row(Builder& b, const Moe<Slots>& w, const std::string& name) {
  const size_t top_k = 4 * size_t(w.shape.top_k);
  return {b.scratch(name + "x", b.size(w.gate.spec.cols)),
          b.scratch(name + "logits", 4 * size_t(w.router.spec.rows)),
          b.scratch(name + "shared_logit", 4), b.scratch(name + "ids", top_k),
          b.scratch(name + "weights", top_k)};
}

void add_moe_row(Builder& b, const Moe<Slots>& w, const MoeRow& r, const std::string& name,
                 SlotId h, SlotId out, const MatrixSlots* ahead, const StepOptions& o) {
  const Moe<Specs> m = specs_of(w);
  const MoeTile tile = moe_tile(m, b.t, o.tiles);
  const int top_k = m.shape.top_k;
  if (!o.fuse_route) {
    add_pick(b, m, tile, r, ahead, o);
  }
  SlotId act = b.scratch(name + "act", b.size(size_t(top_k) * m.gate.rows + m.shared_gate.rows));
  add_gate_up(b, m, w, tile, o.fuse_route, r, act);
  Dispatch d(kernels().at("moe_down_" + suffix(b.t)));
  set_constants(d, moe_constants(m, b.t, tile, o.fuse_route));
  d.read("act", act).read("ids", r.ids).read("weights", r.weights);
  read_matrix(d, w.down, "down_w", "down_scales", "down_biases", top_k);
  read_matrix(d, w.shared_down, "shared_down_w", "shared_down_scales", "shared_down_biases");
  d.read("shared_gate", r.shared_logit).read("h", h).write("out", out);
  d.grid(ceil_div(m.down.rows, tile.down_rows())).threads(32 * (top_k + 1));
  b.add(std::move(d), "experts down");
}

}  // namespace lily
