#include "programs/decode_program.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <stdexcept>

namespace lily {
namespace {

constexpr int kHeadDim = 256;   // of attention
constexpr int kDeltaDim = 128;  // Dk and Dv of Gated DeltaNet

// How a KV cache of `capacity` rows is cut (attention_decode.h).
struct Splits {
  int count;
  int block;  // tokens, 0: splits of equal length
  int simdgroups;
  int pack = 4;       // query heads of one KV head a threadgroup
  bool sync = false;  // attention_decode_sync.h

  int used(int length) const {
    if (block > 0) {
      return std::min(ceil_div(length, block), count);
    }
    const int round = 4 * simdgroups;
    const int each = ceil_div(ceil_div(length, count), round) * round;
    return std::min(ceil_div(length, each), count);
  }
};

Splits splits_of(const AttentionDims& a, int capacity, const DecodeOptions& options) {
  const bool eight = a.heads / a.kv_heads == 8 && a.head_dim == kHeadDim;
  const bool sync = options.sync && eight && capacity > 1024;
  if (options.splits > 0) {
    return {options.splits, 0, 4, sync ? 8 : 4, sync};
  }
  if (sync) {
    // Threadgroups for every multiprocessor, of eight simdgroups where they have rows enough: those
    // fill its registers. Few rows are worth fewer splits, which cost less to merge.
    const int all = std::max(1, kMultiprocessors / a.kv_heads);
    if (capacity <= 6144) {
      return {std::max(1, all * 2 / 3), 0, 4, 8, true};
    }
    if (capacity <= 24576) {
      return {all, 0, 4, 8, true};
    }
    if (capacity <= 98304) {
      return {all, 0, 8, 8, true};
    }
    return {2 * all, 0, 4, 8, true};
  }
  if (options.nvidia) {
    if (capacity <= 1024) {
      return {16, 0, 4, 1};  // as many threadgroups as there can be
    }
    // Four threadgroups of query heads a split; three threadgroups fit a multiprocessor.
    return {99, 0, 4};
  }
  if (options.fixed_block_from >= 0 && eight && capacity > options.fixed_block_from) {
    return {ceil_div(capacity, 1024), 1024, 8};
  }
  return {capacity <= 1024 ? 8 : capacity <= 8192 ? 16 : 32, 0, 4};
}

bool wide_out(const MatrixDims& m) {
  return m.bits == 4 && m.cols == 4096;
}

// Tall enough for blocks of four rows (gemv_tile), with which nine simdgroups were measured.
bool tall_in(const AttentionDims& a) {
  return a.q.rows + a.k.rows + a.v.rows >= 4096;
}

// Where 132 multiprocessors of 64K registers want other threads than an Apple GPU: as many
// threadgroups as multiprocessors, or a small multiple of it that fits at once, all with the same
// work. A second wave that is nearly empty costs as much as a full one. Only for what was measured:
// the shapes of Qwen3.6-35B-A3B.
TileFields nvidia_tiles(const DecodeDims& dims, bool fuse_projections) {
  if (dims.embedding.cols != 2048) {
    return {};
  }
  TileFields tiles = {
      {"experts up.r", 1}, {"experts up.simdgroups", 12}, {"argmax.simdgroups", 16}};
  auto insert_out = [&](const std::string& label) {
    tiles.insert(
        {{label + ".r", 4}, {label + ".u", 1}, {label + ".split", 4}, {label + ".simdgroups", 16}});
  };
  auto all = [&](auto&& holds) {
    return std::all_of(dims.layers.begin(), dims.layers.end(), holds);
  };
  if (fuse_projections &&
      all([](const LayerDims& l) { return !l.attention || tall_in(*l.attention); })) {
    tiles.insert({{"attention in.u", 1}, {"attention in.simdgroups", 9}});
  }
  if (all([](const LayerDims& l) {
        return l.moe.router.bits == 8 && l.moe.shared_router.bits != 4;
      })) {
    tiles.insert(
        {{"router.r", 2}, {"router.u", 1}, {"router.split", 4}, {"router.simdgroups", 16}});
  }
  if (all([](const LayerDims& l) { return !l.delta || wide_out(l.delta->out); })) {
    insert_out("delta out");
  }
  if (all([](const LayerDims& l) { return !l.attention || wide_out(l.attention->out); })) {
    insert_out("attention out");
  }
  return tiles;
}

int largest_power(int n, int most) {
  return std::min(n & -n, most);
}

// Threads of the expert kernels (moe_decode.h).
struct MoeTile {
  int up_lanes, up_r, up_u, up_simdgroups;
  int down_lanes, down_r, down_u;

  int up_rows() const {
    return up_simdgroups * up_r * (32 / up_lanes);
  }
  int down_rows() const {
    return down_r * (32 / down_lanes);
  }
};

MoeTile moe_tile(const MoeDims& m, Type t, const TileFields& tiles) {
  const int up = std::gcd(m.gate.cols * kernel_bits(m.gate, t) / 128,
                          m.shared_gate.cols * kernel_bits(m.shared_gate, t) / 128);
  const int down = std::gcd(m.down.cols * kernel_bits(m.down, t) / 128,
                            m.shared_down.cols * kernel_bits(m.shared_down, t) / 128);
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
                                "; metal/moe_decode.h has the shapes");
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

// A part of the experts: the routed ones, the shared one, or both.
struct MoePart {
  bool routed = true, shared = true;
  bool select = true;         // gate_up picks the experts
  bool shared_given = false;  // down adds a product made elsewhere
};

Constants moe_constants(const MoeDims& m, Type t, const MoeTile& tile, const MoePart& part) {
  const int top_k = part.routed ? m.top_k : 0;
  const int group = std::max(m.gate.group, m.shared_gate.group);
  return {{"kExperts", int32_t{m.router.rows}},
          {"kTopK", int32_t{top_k}},
          {"kNormTopK", m.normalize},
          {"kHidden", int32_t{m.gate.cols}},
          {"kWidth", int32_t{m.gate.rows}},
          {"kSharedWidth", int32_t{part.shared ? m.shared_gate.rows : 0}},
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
          {"kHasExperts", part.routed},
          {"kHasShared", part.shared},
          {"kExpertScales", part.routed && m.gate.bits != 0},
          {"kSharedScales", part.shared && m.shared_gate.bits != 0},
          {"kSelect", part.routed && part.select},
          {"kGivenIds", part.routed && !part.select},
          {"kSharedGiven", part.shared_given},
          {"kSharedGate", part.shared || part.shared_given}};
}

struct MoeRow {
  SlotId x, logits, shared_logit, ids, weights;
};

void add_gate_up(Builder& b, const std::string& label, const MoeDims& m, const MoeSlots& w,
                 const MoeTile& tile, const MoePart& part, const MoeRow& row, SlotId act) {
  const int hidden = m.gate.cols;
  Dispatch d(kernels().at("moe_gate_up_" + suffix(b.t) + "_k" + std::to_string(kmax(hidden))));
  set_constants(d, moe_constants(m, b.t, tile, part));
  d.read("x", row.x);
  if (part.routed && part.select) {
    d.read("logits", row.logits).write("ids", row.ids).write("weights", row.weights);
  }
  if (part.routed && !part.select) {
    d.read("given_ids", row.ids);
  }
  if (part.routed) {
    read_matrix(d, w.gate, "gate_w", "gate_scales", "gate_biases", m.top_k);
    read_matrix(d, w.up, "up_w", "up_scales", "up_biases", m.top_k);
  }
  if (part.shared) {
    read_matrix(d, w.shared_gate, "shared_gate_w", "shared_gate_scales", "shared_gate_biases");
    read_matrix(d, w.shared_up, "shared_up_w", "shared_up_scales", "shared_up_biases");
  }
  d.write("act", act);
  const int groups = (part.routed ? m.top_k * ceil_div(m.gate.rows, tile.up_rows()) : 0) +
                     (part.shared ? ceil_div(m.shared_gate.rows, tile.up_rows()) : 0);
  d.grid(groups).threads(32 * tile.up_simdgroups);
  b.add(std::move(d), label);
}

class DecodeBuilder {
 public:
  DecodeBuilder(const DecodeDims& dims, const std::vector<int>& capacities,
                const DecodeOptions& options)
      : dims_(dims),
        capacities_(capacities),
        o_(options),
        given_(options.tiles),
        b_("decode step", dims.t) {
    if (o_.nvidia) {
      const TileFields tiles = nvidia_tiles(dims, o_.fuse_projections);
      o_.tiles.insert(tiles.begin(), tiles.end());  // given ones stay
    }
  }

  std::shared_ptr<DecodeProgram> build() {
    token_ = b_.input("token", 4);
    position_ = b_.input("position", 4);
    MatrixSlots embedding = b_.matrix("embed_tokens", dims_.embedding);
    SlotId h = hidden("h");
    b_.phase = "embedding";
    add_embedding(embedding, h);
    for (size_t i = 0; i < dims_.layers.size(); ++i) {
      slots_.push_back(layer_slots(dims_.layers[i], layer_name(i)));
    }
    for (size_t i = 0; i < dims_.layers.size(); ++i) {
      b_.layer = static_cast<int>(i);
      h = add_layer(dims_.layers[i], layer_name(i), capacities_.at(i), h);
    }
    b_.layer = -1;
    b_.phase = "head";
    SlotId norm = b_.weight("norm.weight", b_.size(dims_.embedding.cols));
    add_head(norm, b_.matrix("lm_head", dims_.head), h);
    b_.program.finish();
    check_tiles();
    auto out = std::make_shared<DecodeProgram>(std::move(b_.program));
    out->weights = std::move(b_.weights);
    out->tables = std::move(b_.tables);
    out->caches = std::move(caches_);
    out->token = token_;
    out->position = position_;
    out->next = next_;
    out->logits = logits_;
    return out;
  }

 private:
  struct LayerSlots {
    SlotId input_norm, post_norm;
    std::optional<DeltaSlots> delta;
    std::optional<AttentionSlots> attention;
    MoeSlots moe;
  };

  static std::string layer_name(size_t i) {
    return "layers." + std::to_string(i) + ".";
  }

  LayerSlots layer_slots(const LayerDims& layer, const std::string& name) {
    const size_t row = b_.size(dims_.embedding.cols);
    LayerSlots s;
    s.input_norm = b_.weight(name + "input_layernorm.weight", row);
    s.post_norm = b_.weight(name + "post_attention_layernorm.weight", row);
    if (layer.delta) {
      s.delta = delta_slots(b_, name + "linear_attn.", *layer.delta);
    } else {
      s.attention = attention_slots(b_, name + "self_attn.", *layer.attention);
    }
    s.moe = moe_slots(b_, name + "mlp.", layer.moe);
    return s;
  }

  const LayerSlots& slots() const {
    return slots_[b_.layer];
  }

  // Every tile asked for is one of a dispatch that there is.
  void check_tiles() const {
    for (auto& [name, value] : given_) {
      const std::string label = name.substr(0, name.rfind('.'));
      const auto& all = b_.program.dispatches();
      if (std::none_of(all.begin(), all.end(), [&](auto& d) { return d.name == label; })) {
        throw std::invalid_argument("the decode step has no dispatch '" + label +
                                    "' whose threads '" + name + "' could set.");
      }
    }
  }

  SlotId hidden(const std::string& name) {
    return b_.scratch(name, b_.size(dims_.embedding.cols));
  }
  SlotId row(const std::string& name, int values) {
    return b_.scratch(name, b_.size(values));
  }

  void add_embedding(const MatrixSlots& m, SlotId h) {
    const int simdgroups = std::min(8, std::max(1, m.dims.cols / 256));
    Dispatch d(kernels().at("embed_row_" + suffix(b_.t)));
    set_constants(d, {{"kK", int32_t{m.dims.cols}},
                      {"kRows0", int32_t{m.dims.rows}},
                      {"kBits0", int32_t{kernel_bits(m.dims, b_.t)}},
                      {"kGroup", int32_t{m.quantized() ? m.dims.group : 64}},
                      {"kSimdgroups", int32_t{simdgroups}},
                      {"kQuantized0", m.quantized()}});
    d.read("token", token_);
    // One row of them.
    MatrixSlots rows = m;
    rows.dims.experts = m.dims.rows;
    rows.dims.rows = 1;
    read_matrix(d, rows, "w", "scales", "biases", 1);
    d.write("h", h);
    d.grid(ceil_div(m.dims.cols / 8, 32 * simdgroups)).threads(32 * simdgroups);
    b_.add(std::move(d), "embedding");
  }

  void add_norm(SlotId h, SlotId weight, SlotId x) {
    constexpr int kSimdgroups = 8;
    Dispatch d(kernels().at("norm_row_" + suffix(b_.t)));
    set_constants(d, {{"kK", int32_t{dims_.embedding.cols}},
                      {"kSimdgroups", int32_t{kSimdgroups}},
                      {"kEps", dims_.eps}});
    d.read("h", h).read("weight", weight).write("y", x).grid(1).threads(32 * kSimdgroups);
    b_.add(std::move(d), "norm");
  }

  // Products of norm(h); `row` gets norm(h) where a caller needs it.
  void add_products(const std::string& label, const std::string& name, SlotId h, SlotId norm,
                    const std::vector<MatrixSlots>& matrices, const std::vector<SlotId>& y,
                    bool float32, std::optional<SlotId> row) {
    GemvOptions options;
    options.float32 = float32;
    options.eps = dims_.eps;
    options.tiles = o_.tiles;
    options.sync = o_.sync && label == "delta in";  // others are faster lane by lane
    if (o_.fuse_norm) {
      options.norm = norm;
      options.row = row;
    } else {
      SlotId x = row ? *row : hidden(name + "x");
      add_norm(h, norm, x);
      h = x;
    }
    if (o_.fuse_projections) {
      add_gemv(b_, label, matrices, h, y, options);
      return;
    }
    for (size_t i = 0; i < matrices.size(); ++i) {
      add_gemv(b_, label, {matrices[i]}, h, {y[i]}, options);
      options.row.reset();
    }
  }

  // h + W y.
  SlotId add_out(const std::string& label, const std::string& name, const MatrixSlots& w, SlotId y,
                 SlotId h) {
    SlotId next = hidden(name + "h");
    GemvOptions options;
    options.tiles = o_.tiles;
    if (o_.fuse_residual) {
      options.residual = h;
      add_gemv(b_, label, {w}, y, {next}, options);
      return next;
    }
    SlotId product = hidden(name + "y");
    add_gemv(b_, label, {w}, y, {product}, options);
    const int n = dims_.embedding.cols;
    Dispatch d(kernels().at("add_rows_" + prefill_suffix(b_.t)));
    d.read("h", h).read("y", product).write("out", next).value("count", int32_t{n});
    d.grid(ceil_div(n, 1024)).threads(256);
    b_.add(std::move(d), "residual");
    return next;
  }

  SlotId add_layer(const LayerDims& layer, const std::string& name, int capacity, SlotId h) {
    if (layer.delta) {
      b_.phase = "gated_delta";
      h = add_delta(*layer.delta, name + "linear_attn.", h);
    } else {
      b_.phase = "attention";
      h = add_attention(*layer.attention, name + "self_attn.", capacity, h);
    }
    b_.phase = "moe";
    return add_moe(layer.moe, name + "mlp.", h);
  }

  SlotId add_delta(const DeltaDims& d, const std::string& name, SlotId h) {
    const DeltaSlots& w = *slots().delta;
    SlotId conv = b_.program.slot(name + "conv_state", SlotKind::cache,
                                  b_.size(size_t(d.conv_width - 1) * d.qkv.rows));
    SlotId conv_next = b_.program.slot(name + "conv_state_next", SlotKind::cache,
                                       b_.size(size_t(d.conv_width - 1) * d.qkv.rows));
    SlotId state = b_.program.slot(name + "state", SlotKind::cache,
                                   4 * size_t(d.value_heads) * d.value_dim * d.key_dim);
    caches_.push_back({conv, conv_next, state});
    SlotId qkv = row(name + "qkv", d.qkv.rows), z = row(name + "z", d.z.rows),
           beta = row(name + "b", d.b.rows), a = row(name + "a", d.a.rows),
           out = row(name + "out", d.z.rows);
    add_products("delta in", name, h, slots().input_norm, {w.qkv, w.z, w.b, w.a}, {qkv, z, beta, a},
                 false, std::nullopt);
    if (o_.fuse_delta) {
      int simdgroups = 16;
      override_field(simdgroups, o_.tiles, "delta step.simdgroups");
      if (simdgroups != 8 && simdgroups != 16 && simdgroups != 32) {
        throw std::invalid_argument("delta step: no kernel for " + std::to_string(simdgroups) +
                                    " simdgroups; 8, 16 and 32 have one");
      }
      add_delta_step(b_, d, qkv, z, beta, a, w.conv, w.A_log, w.dt_bias, w.norm, conv, conv_next,
                     state, state, out, simdgroups);
    } else {
      add_delta_apart(d, name, w, qkv, z, beta, a, conv, conv_next, state, out);
    }
    return add_out("delta out", name, w.out, out, h);
  }

  void add_delta_apart(const DeltaDims& d, const std::string& name, const DeltaSlots& w, SlotId qkv,
                       SlotId z, SlotId beta, SlotId a, SlotId conv, SlotId conv_next, SlotId state,
                       SlotId out) {
    constexpr int kSimdgroups = 8;
    const Constants constants{{"kKeyHeads", int32_t{d.key_heads}},
                              {"kValueHeads", int32_t{d.value_heads}},
                              {"kGdnSimdgroups", int32_t{kSimdgroups}},
                              {"kGdnEps", d.eps}};
    SlotId hat = row(name + "hat", d.qkv.rows);
    SlotId y = b_.scratch(name + "y32", 4 * size_t(d.z.rows));
    Dispatch c(kernels().at("gdn_conv_step_" + suffix(b_.t)));
    set_constants(c, constants);
    c.read("qkv", qkv).read("conv_state", conv).read("conv_weight", w.conv);
    c.write("conv_state_out", conv_next).write("hat", hat);
    c.grid(2 * d.key_heads + d.value_heads).threads(kDeltaDim);
    b_.add(std::move(c), "delta conv");
    Dispatch s(kernels().at("gdn_delta_step_" + suffix(b_.t)));
    set_constants(s, constants);
    s.read("hat", hat).read("b", beta).read("a", a).read("a_log", w.A_log);
    s.read("dt_bias", w.dt_bias).read("state", state).write("state_out", state).write("y", y);
    s.in_place("state", "state_out");
    s.grid(kDeltaDim / (4 * kSimdgroups), d.value_heads).threads(32 * kSimdgroups);
    b_.add(std::move(s), "delta update");
    Dispatch n(kernels().at("gdn_gated_norm_" + suffix(b_.t)));
    set_constants(n, constants);
    n.read("y", y).read("z", z).read("norm_weight", w.norm).write("out", out);
    n.grid(d.value_heads).threads(kDeltaDim);
    b_.add(std::move(n), "delta norm");
  }

  SlotId add_attention(const AttentionDims& a, const std::string& name, int capacity, SlotId h) {
    const AttentionSlots& w = *slots().attention;
    const int D = a.head_dim, inner = a.heads * D, kv = a.kv_heads * D;
    const size_t cache_bytes = b_.size(size_t(capacity) * kv);
    SlotId keys = b_.program.slot(name + "keys", SlotKind::cache, cache_bytes);
    SlotId values = b_.program.slot(name + "values", SlotKind::cache, cache_bytes);
    caches_.push_back({keys, {}, values});
    SlotId frequencies = frequency_table(a);
    SlotId q_gate = row(name + "q_gate", 2 * inner), k = row(name + "k", kv),
           v = row(name + "v", kv), q = row(name + "q", inner), out = row(name + "out", inner);
    add_products("attention in", name, h, slots().input_norm, {w.q, w.k, w.v}, {q_gate, k, v},
                 false, std::nullopt);

    Splits splits = splits_of(a, capacity, o_);
    override_field(splits.simdgroups, o_.tiles, "attention.simdgroups");
    const int length = o_.context > 0 ? std::min(o_.context, capacity) : capacity;
    const int used = splits.used(length);
    const int share = a.heads / a.kv_heads;
    const int asked = o_.pack > 0 && !splits.sync ? o_.pack : splits.pack;
    const int pack = o_.coalesced ? std::min(asked, largest_power(share, 8)) : 4;
    int prepare_simdgroups = o_.nvidia ? 1 : 4, merge_simdgroups = splits.count > 32 ? 8 : 4;
    override_field(prepare_simdgroups, o_.tiles, "attention prepare.simdgroups");
    override_field(merge_simdgroups, o_.tiles, "attention merge.simdgroups");
    const Constants constants{{"kQueryHeads", int32_t{a.heads}},
                              {"kKvHeads", int32_t{a.kv_heads}},
                              {"kRotary", int32_t{a.rotary}},
                              {"kHeadEps", a.eps},
                              {"kAttendSimdgroups", int32_t{splits.simdgroups}},
                              {"kSplits", int32_t{splits.count}},
                              {"kBlockTokens", int32_t{splits.block}},
                              {"kPack", int32_t{pack}},
                              {"kPrepareSimdgroups", int32_t{prepare_simdgroups}},
                              {"kMergeSimdgroups", int32_t{merge_simdgroups}}};

    Dispatch p(kernels().at("attention_prepare_" + suffix(b_.t)));
    set_constants(p, constants);
    p.read("q_gate", q_gate).traffic({b_.size(inner), {}, 0});
    p.read("k", k).read("v", v).read("q_norm", w.q_norm).read("k_norm", w.k_norm);
    p.read("inv_freq", frequencies).read("position", position_);
    p.value("capacity", int32_t{capacity}).write("q_out", q);
    p.write("k_cache", keys).traffic({b_.size(kv), {}, 0});
    p.write("v_cache", values).traffic({b_.size(kv), {}, 0});
    p.grid(ceil_div(a.heads + 2 * a.kv_heads, prepare_simdgroups)).threads(32 * prepare_simdgroups);
    b_.add(std::move(p), "attention prepare");

    const size_t parts = size_t(a.heads) * splits.count;
    SlotId ml = b_.scratch(name + "partial_ml", 8 * parts);
    SlotId o = b_.scratch(name + "partial_o", 4 * parts * D);
    const size_t used_parts = size_t(a.heads) * used;
    const char* form = splits.sync    ? "sync_attention_decode_"
                       : o_.coalesced ? "attention_decode_"
                                      : "attention_decode_strided_";
    Dispatch s(kernels().at(form + suffix(b_.t)));
    set_constants(s, constants);
    s.read("q", q);
    s.read("k_cache", keys).traffic({b_.size(size_t(length) * kv), {}, 0});
    s.read("v_cache", values).traffic({b_.size(size_t(length) * kv), {}, 0});
    s.read("position", position_).value("capacity", int32_t{capacity});
    s.write("partial_ml", ml).traffic({8 * used_parts, {}, 0});
    s.write("partial_o", o).traffic({4 * used_parts * D, {}, 0});
    s.grid(splits.count, a.heads / pack).threads(32 * splits.simdgroups);
    b_.add(std::move(s), "attention");

    Dispatch m(kernels().at("attention_merge_" + suffix(b_.t)));
    set_constants(m, constants);
    m.read("partial_ml", ml).traffic({8 * used_parts, {}, 0});
    m.read("partial_o", o).traffic({4 * used_parts * D, {}, 0});
    m.read("q_gate", q_gate).traffic({b_.size(inner), {}, 0});
    m.read("position", position_).write("out", out);
    m.grid(D / 64, a.heads).threads(32 * merge_simdgroups);
    b_.add(std::move(m), "attention merge");
    return add_out("attention out", name, w.out, out, h);
  }

  // Layers with the same rotary share one table.
  SlotId frequency_table(const AttentionDims& a) {
    if (frequencies_.index < 0) {
      std::vector<float> f = rotary_frequencies(a.rotary, a.base);
      frequencies_ = b_.table("rotary frequencies", f.data(), 4 * f.size());
    }
    return frequencies_;
  }

  SlotId add_moe(const MoeDims& m, const std::string& name, SlotId h) {
    const MoeSlots& w = slots().moe;
    const MoeTile tile = moe_tile(m, b_.t, o_.tiles);
    MoeRow r{hidden(name + "x"), b_.scratch(name + "logits", 4 * size_t(m.router.rows)),
             b_.scratch(name + "shared_logit", 4), b_.scratch(name + "ids", 4 * size_t(m.top_k)),
             b_.scratch(name + "weights", 4 * size_t(m.top_k))};
    add_products("router", name, h, slots().post_norm, {w.router, w.shared_router},
                 {r.logits, r.shared_logit}, true, r.x);
    MoePart part;
    part.select = o_.fuse_route;
    part.shared = o_.fuse_shared;
    part.shared_given = !o_.fuse_shared;
    if (!o_.fuse_route) {
      add_route(m, tile, part, r);
    }
    const int shared_width = m.shared_gate.rows;
    SlotId act = row(name + "act", m.top_k * m.gate.rows + (part.shared ? shared_width : 0));
    add_gate_up(b_, "experts up", m, w, tile, part, r, act);
    SlotId shared_product;
    if (!o_.fuse_shared) {
      SlotId shared_act = row(name + "shared_act", shared_width);
      MoePart alone;
      alone.routed = false;
      add_gate_up(b_, "shared up", m, w, tile, alone, r, shared_act);
      shared_product = b_.scratch(name + "shared_product", 4 * size_t(m.down.rows));
      GemvOptions options;
      options.float32 = true;
      add_gemv(b_, "shared down", {w.shared_down}, shared_act, {shared_product}, options);
    }

    SlotId next = hidden(name + "h");
    Dispatch d(kernels().at("moe_down_" + suffix(b_.t)));
    set_constants(d, moe_constants(m, b_.t, tile, part));
    d.read("act", act).read("ids", r.ids).read("weights", r.weights);
    read_matrix(d, w.down, "down_w", "down_scales", "down_biases", m.top_k);
    if (part.shared) {
      read_matrix(d, w.shared_down, "shared_down_w", "shared_down_scales", "shared_down_biases");
    }
    d.read("shared_gate", r.shared_logit);
    if (part.shared_given) {
      d.read("shared_product", shared_product);
    }
    d.read("h", h).write("out", next);
    d.grid(ceil_div(m.down.rows, tile.down_rows())).threads(32 * (m.top_k + part.shared));
    b_.add(std::move(d), "experts down");
    return next;
  }

  void add_route(const MoeDims& m, const MoeTile& tile, const MoePart& part, const MoeRow& r) {
    const bool ahead = o_.ahead > 0 && b_.layer + 1 < static_cast<int>(slots_.size());
    Dispatch d(kernels().at("moe_route"));
    Constants constants = moe_constants(m, b_.t, tile, part);
    constants.push_back({"kAhead", ahead});
    set_constants(d, constants);
    d.read("logits", r.logits).write("ids", r.ids).write("weights", r.weights);
    int groups = 1, lines = 0;
    if (ahead) {
      const LayerSlots& next = slots_[b_.layer + 1];
      const MatrixSlots& in = next.delta ? next.delta->qkv : next.attention->q;
      const size_t bytes = std::min(size_t(o_.ahead) * 1024, code_bytes(in.dims, b_.t));
      d.read("ahead", in.w).traffic({0, {}, 0});  // they are the bytes of the next layer's kernel
      lines = static_cast<int>(bytes / 128);
      groups = kMultiprocessors;  // one picks
    }
    d.value("lines", int32_t{lines});
    d.grid(groups).threads(32 * tile.up_simdgroups);
    b_.add(std::move(d), "route");
  }

  void add_head(SlotId norm, const MatrixSlots& head, SlotId h) {
    const int vocabulary = head.dims.rows;
    next_ = b_.output("next", 4);
    const size_t logits_bytes = 4 * size_t(vocabulary);
    if (o_.logits) {
      logits_ = b_.output("logits", logits_bytes);
    }
    GemvOptions options;
    options.eps = dims_.eps;
    if (o_.fuse_norm) {
      options.norm = norm;
    } else {
      SlotId x = hidden("x");
      add_norm(h, norm, x);
      h = x;
    }
    const auto sync =
        o_.sync && o_.fuse_head ? sync_tile(b_.t, {head.dims}, false) : std::optional<GemvTile>();
    GemvTile tile =
        sync ? *sync : gemv_tile(head.dims.cols, {kernel_bits(head.dims, b_.t)}, head.dims.rows);
    override_tile(tile, o_.tiles, "head");
    check_tile(tile, {head.dims}, b_.t, sync.has_value(), "head");
    int partials = gemv_groups({head.dims}, tile), simdgroups = tile.simdgroups;
    if (!o_.fuse_head) {
      partials = std::min(64, ceil_div(vocabulary, 256));
    }
    SlotId values = b_.scratch("partial values", 4 * size_t(partials));
    SlotId ids = b_.scratch("partial ids", 4 * size_t(partials));
    auto stage = [&]() -> Constants {
      return {{"kRows0", int32_t{vocabulary}},
              {"kSimdgroups", int32_t{simdgroups}},
              {"kPartials", int32_t{partials}},
              {"kAdvance", false}};
    };
    if (o_.fuse_head) {
      Dispatch d(kernels().at((sync ? "sync_head_gemv_" : "head_gemv_") + suffix(b_.t) + "_k" +
                              std::to_string(kmax(head.dims.cols))));
      Constants constants = gemv_constants(b_.t, {head.dims}, tile, options);
      constants.push_back({"kWriteLogits", o_.logits});
      set_constants(d, constants);
      d.read("h", h);
      if (options.norm) {
        d.read("norm_weight", *options.norm);
      }
      read_matrix(d, head, "w", "scales", "biases");
      if (o_.logits) {
        d.write("logits", logits_);
      }
      d.write("partial_values", values).write("partial_ids", ids);
      d.grid(partials).threads(32 * simdgroups);
      b_.add(std::move(d), "head");
    } else {
      SlotId logits = o_.logits ? logits_ : b_.scratch("logits", logits_bytes);
      options.float32 = true;
      add_gemv(b_, "head", {head}, h, {logits}, options);
      Dispatch d(kernels().at("argmax_logits"));
      set_constants(d, stage());
      d.read("logits", logits).write("partial_values", values).write("partial_ids", ids);
      d.grid(partials).threads(32 * simdgroups);
      b_.add(std::move(d), "argmax stage");
    }
    override_field(simdgroups, o_.tiles, "argmax.simdgroups");
    Dispatch d(kernels().at("argmax_final"));
    set_constants(d, stage());
    d.read("partial_values", values).read("partial_ids", ids).write("token", next_);
    d.grid(1).threads(32 * simdgroups);
    b_.add(std::move(d), "argmax");
  }

  const DecodeDims& dims_;
  const std::vector<int>& capacities_;
  DecodeOptions o_;
  TileFields given_;
  Builder b_;
  std::vector<LayerSlots> slots_;  // of all layers
  SlotId token_, position_, next_, logits_, frequencies_;
  std::vector<DecodeProgram::Caches> caches_;
};

std::string moe_refusal(const MoeDims& m, Type t) {
  if (m.router.rows % 32 != 0 || m.router.rows > 512) {
    return std::to_string(m.router.rows) + " experts; multiples of 32 up to 512 have a kernel";
  }
  if (m.top_k > 16) {
    return "top_k is " + std::to_string(m.top_k) + "; up to 16 has a kernel";
  }
  for (auto* x : {&m.up, &m.down}) {
    if (x->bits != m.gate.bits || x->group != m.gate.group) {
      return "the experts' weights differ in bits or group size";
    }
  }
  for (auto* x : {&m.shared_up, &m.shared_down}) {
    if (x->bits != m.shared_gate.bits || x->group != m.shared_gate.group) {
      return "the shared expert's weights differ in bits or group size";
    }
  }
  if (m.gate.bits != 0 && m.shared_gate.bits != 0 && m.gate.group != m.shared_gate.group) {
    return "the shared expert's group size differs from the others'";
  }
  return gemv_refusal(t, {m.router, m.shared_router}, true);
}

}  // namespace

std::vector<float> rotary_frequencies(int rotary, float base) {
  std::vector<float> f(rotary / 2);
  for (size_t i = 0; i < f.size(); ++i) {
    f[i] = static_cast<float>(std::pow(double(base), -2.0 * double(i) / rotary));
  }
  return f;
}

DeltaSlots delta_slots(Builder& b, const std::string& name, const DeltaDims& d) {
  DeltaSlots s;
  s.qkv = b.matrix(name + "in_proj_qkv", d.qkv);
  s.z = b.matrix(name + "in_proj_z", d.z);
  s.b = b.matrix(name + "in_proj_b", d.b);
  s.a = b.matrix(name + "in_proj_a", d.a);
  s.out = b.matrix(name + "out_proj", d.out);
  s.conv = b.weight(name + "conv1d.weight", b.size(size_t(d.qkv.rows) * d.conv_width));
  s.A_log = b.weight(name + "A_log", 4 * size_t(d.value_heads));
  s.dt_bias = b.weight(name + "dt_bias", b.size(d.value_heads));
  s.norm = b.weight(name + "norm.weight", b.size(d.value_dim));
  return s;
}

AttentionSlots attention_slots(Builder& b, const std::string& name, const AttentionDims& a) {
  AttentionSlots s;
  s.q = b.matrix(name + "q_proj", a.q);
  s.k = b.matrix(name + "k_proj", a.k);
  s.v = b.matrix(name + "v_proj", a.v);
  s.out = b.matrix(name + "o_proj", a.out);
  s.q_norm = b.weight(name + "q_norm.weight", b.size(a.head_dim));
  s.k_norm = b.weight(name + "k_norm.weight", b.size(a.head_dim));
  return s;
}

MoeSlots moe_slots(Builder& b, const std::string& name, const MoeDims& m) {
  MoeSlots s;
  s.router = b.matrix(name + "gate", m.router);
  s.gate = b.matrix(name + "switch_mlp.gate_proj", m.gate);
  s.up = b.matrix(name + "switch_mlp.up_proj", m.up);
  s.down = b.matrix(name + "switch_mlp.down_proj", m.down);
  s.shared_gate = b.matrix(name + "shared_expert.gate_proj", m.shared_gate);
  s.shared_up = b.matrix(name + "shared_expert.up_proj", m.shared_up);
  s.shared_down = b.matrix(name + "shared_expert.down_proj", m.shared_down);
  s.shared_router = b.matrix(name + "shared_expert_gate", m.shared_router);
  return s;
}

void add_delta_step(Builder& b, const DeltaDims& d, SlotId qkv, SlotId z, SlotId beta, SlotId a,
                    SlotId conv_weight, SlotId A_log, SlotId dt_bias, SlotId norm, SlotId conv,
                    SlotId conv_next, SlotId state, SlotId state_next, SlotId out, int simdgroups) {
  Dispatch s(kernels().at("gdn_step_" + suffix(b.t)));
  set_constants(s, {{"kKeyHeads", int32_t{d.key_heads}},
                    {"kValueHeads", int32_t{d.value_heads}},
                    {"kGdnSimdgroups", int32_t{simdgroups}},
                    {"kGdnEps", d.eps}});
  s.read("qkv", qkv).read("z", z).read("b", beta).read("a", a).read("conv_state", conv);
  s.read("conv_weight", conv_weight).read("a_log", A_log).read("dt_bias", dt_bias);
  s.read("norm_weight", norm).read("state", state).write("conv_state_out", conv_next);
  s.write("state_out", state_next).write("out", out).in_place("state", "state_out");
  s.grid(d.value_heads).threads(32 * simdgroups);
  b.add(std::move(s), "delta step");
}

DecodeOptions nvidia_options() {
  DecodeOptions o;
  o.logits = true;
  o.nvidia = true;
  o.sync = true;
  o.fuse_route = false;
  o.ahead = 8192;  // more would take memory from the experts
  return o;
}

std::string decode_refusal(const DecodeDims& dims) {
  if (dims.t == Type::f32) {
    return "float32 activations have no attention kernel";
  }
  auto fail = [](size_t layer, const std::string& text) {
    return "layer " + std::to_string(layer) + ": " + text;
  };
  for (size_t i = 0; i < dims.layers.size(); ++i) {
    const LayerDims& l = dims.layers[i];
    std::string reason = moe_refusal(l.moe, dims.t);
    if (reason.empty() && l.delta) {
      const DeltaDims& d = *l.delta;
      if (d.key_dim != kDeltaDim || d.value_dim != kDeltaDim || d.conv_width != 4) {
        reason = "DeltaNet heads of 128 and a convolution of width 4 have a kernel";
      } else {
        reason = gemv_refusal(dims.t, {d.qkv, d.z, d.b, d.a}, false);
        reason = reason.empty() ? gemv_refusal(dims.t, {d.out}, false) : reason;
      }
    } else if (reason.empty()) {
      const AttentionDims& a = *l.attention;
      const bool rotary = a.rotary >= 16 && a.rotary <= 256 && (a.rotary & (a.rotary - 1)) == 0;
      if (a.head_dim != kHeadDim || !rotary) {
        reason = "attention heads of 256 with 16 to 256 rotary dims, a power of two, have a kernel";
      } else {
        reason = gemv_refusal(dims.t, {a.q, a.k, a.v}, false);
        reason = reason.empty() ? gemv_refusal(dims.t, {a.out}, false) : reason;
      }
    }
    if (!reason.empty()) {
      return fail(i, reason);
    }
  }
  return gemv_refusal(dims.t, {dims.head}, true);
}

std::shared_ptr<DecodeProgram> decode_program(const DecodeDims& dims,
                                              const std::vector<int>& capacities,
                                              const DecodeOptions& options) {
  return DecodeBuilder(dims, capacities, options).build();
}

std::shared_ptr<const DecodeProgram> DecodePrograms::at(const std::vector<int>& capacities,
                                                        const DecodeOptions& options) {
  constexpr size_t kMost = 8;  // capacities grow by an eighth
  std::lock_guard lock(mutex_);
  auto it = std::find_if(kept_.begin(), kept_.end(), [&](const Kept& k) {
    return k.capacities == capacities && k.options == options;
  });
  if (it != kept_.end()) {
    kept_.splice(kept_.begin(), kept_, it);
  } else {
    kept_.push_front({capacities, options, decode_program(dims, capacities, options)});
    if (kept_.size() > kMost) {
      kept_.pop_back();
    }
  }
  return kept_.front().program;
}

size_t DecodePrograms::size() const {
  std::lock_guard lock(mutex_);
  return kept_.size();
}

}  // namespace lily
