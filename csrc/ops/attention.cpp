#include "ops/attention.h"

#include <algorithm>
#include <cmath>

#include "../metal/params.h"

namespace lily {
namespace {

constexpr int kHeadDim = 256;
constexpr int kRotary = 64;  // of attention_prepare

}  // namespace

Choice attention_kernel(Target target, Type t, const AttentionShape& shape,
                        const VectorSpec& q_norm, const VectorSpec& k_norm,
                        const std::string& mask) {
  if (target == Target::cpu) {
    if (mask == "additive") {
      return refused(ReasonCode::masked,
                     "mask 'additive' has no kernel; none, causal and bool have.");
    }
    if (shape.head_dim % 16 != 0 || shape.head_dim < 16 || shape.head_dim > 512) {
      return refused(ReasonCode::head_dim, "head_dim " + std::to_string(shape.head_dim) +
                                               " is no multiple of 16 up to 512.");
    }
    return chosen("reference");
  }
  Choice c = first_refusal(check_activations(target, t),
                           check_range("head_dim", shape.head_dim, kHeadDim, kHeadDim),
                           check_range("rotary dims", shape.rotary, kRotary, kRotary),
                           check_vector(target, t, q_norm, "q_norm.weight"),
                           check_vector(target, t, k_norm, "k_norm.weight"));
  return c ? chosen("attention_prepare") : c;
}

Choice attention_step_kernel(Target target, Type t, const Attention<Specs>& l) {
  if (target == Target::cpu) {
    return attention_kernel(target, t, l.shape, l.q_norm, l.k_norm, "none");
  }
  const int rotary = l.shape.rotary;
  if (l.shape.head_dim != kHeadDim || rotary < 16 || rotary > 256 || (rotary & (rotary - 1)) != 0) {
    return refused(
        ReasonCode::head_dim,
        "attention heads of 256 with 16 to 256 rotary dims, a power of two, have a kernel.");
  }
  return first_refusal(check_activations(target, t),
                       check_vector(target, t, l.q_norm, "q_norm.weight"),
                       check_vector(target, t, l.k_norm, "k_norm.weight"));
}

namespace {

// base^(-2 i / rotary), i < rotary / 2. Layers with the same rotary share one table.
SlotId frequency_table(Builder& b, int rotary, float base) {
  const std::string name = "rotary frequencies";
  for (const Builder::Table& table : b.tables) {
    if (b.program.slots()[table.slot.index].name == name) {
      return table.slot;
    }
  }
  std::vector<float> f(rotary / 2);
  for (size_t i = 0; i < f.size(); ++i) {
    f[i] = static_cast<float>(std::pow(double(base), -2.0 * double(i) / rotary));
  }
  return b.table(name, f.data(), 4 * f.size());
}

std::string prepare_kernel(Type t) {
  return "attention_prepare_rows_" + suffix(t) + "_d" + std::to_string(kHeadDim) + "_r" +
         std::to_string(kRotary);
}

}  // namespace

// ---- Any batch and length

void add_attention_prepare(Builder& b, const AttentionShape& a, const AttentionRows& d,
                           SlotId q_gate, SlotId k, SlotId q_norm, SlotId k_norm, SlotId offset,
                           SlotId q_out, SlotId k_out) {
  const size_t rows = size_t(d.B) * d.T;
  SlotId frequencies = frequency_table(b, a.rotary, a.base);
  Dispatch p(kernels().at(prepare_kernel(b.t)));
  p.read("qg", q_gate).traffic({b.size(rows * a.heads * a.head_dim), {}, 0});
  p.read("k", k);
  read_nothing(p, "v", k);
  p.read("q_norm", q_norm).read("k_norm", k_norm).read("inv_freq", frequencies);
  p.read("offset", offset).write("q_out", q_out).write("k_cache", k_out);
  read_nothing(p, "v_cache", k);  // without v no threadgroup reaches it
  p.value("p", Value::of_struct(
                   AttentionPrepParams{d.T, a.heads, a.kv_heads, d.T, 0, d.offset_each, a.eps}));
  p.grid(ceil_div(d.T, 4), a.heads + a.kv_heads, d.B).threads(128);
  b.add(std::move(p), "attention prepare");
}

std::shared_ptr<LayerProgram> attention_prepare_program(Target target, Type t,
                                                        const AttentionShape& a,
                                                        const AttentionRows& d) {
  Builder b("attention_prepare", target, t);
  const size_t rows = size_t(d.B) * d.T;
  SlotId q_gate = b.input("q_gate", b.size(rows * a.heads * a.head_dim * 2));
  SlotId k = b.input("k", b.size(rows * a.kv_heads * a.head_dim));
  SlotId q_norm = b.weight("q_norm.weight", b.size(a.head_dim));
  SlotId k_norm = b.weight("k_norm.weight", b.size(a.head_dim));
  SlotId offset = b.input("offset", 4 * size_t(d.offset_each ? d.B : 1));
  SlotId q_out = b.output("q", b.size(rows * a.heads * a.head_dim));
  SlotId k_out = b.output("keys", b.size(rows * a.kv_heads * a.head_dim));
  add_attention_prepare(b, a, d, q_gate, k, q_norm, k_norm, offset, q_out, k_out);
  return finished(b, {q_gate, k, q_norm, k_norm, offset}, {q_out, k_out});
}

void attention_pipelines(Type t, Pipelines& out) {
  add_pipeline(out, prepare_kernel(t), {});
}

// ---- One row

namespace {

// How a KV cache of `capacity` rows is cut (attention_decode.h).
struct Splits {
  int count;
  int block;  // tokens, 0: splits of equal length
  int simdgroups;
  int pack = 4;      // query heads of one KV head a threadgroup
  bool mma = false;  // attention_decode_mma.h

  int used(int length) const {
    if (block > 0) {
      return std::min(ceil_div(length, block), count);
    }
    const int round = 4 * simdgroups;
    const int each = ceil_div(ceil_div(length, count), round) * round;
    return std::min(ceil_div(length, each), count);
  }
};

Splits splits_of(Target target, const AttentionShape& a, int capacity, const StepOptions& options) {
  const bool eight = a.heads / a.kv_heads == 8 && a.head_dim == kHeadDim;
  const bool mma = options.mma && eight && capacity > 1024;
  if (options.splits > 0) {
    return {options.splits, 0, 4, mma ? 8 : 4, mma};
  }
  if (mma) {
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
  if (target == Target::cuda) {
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

}  // namespace

void add_attention_row(Builder& b, const AttentionShape& a, const AttentionSlots& s, int capacity,
                       const std::string& name, const StepOptions& o) {
  const int D = a.head_dim, inner = a.heads * D, kv = a.kv_heads * D;
  SlotId frequencies = frequency_table(b, a.rotary, a.base);
  SlotId q = b.scratch(name + "q", b.size(inner));
  Splits splits = splits_of(b.target, a, capacity, o);
  override_field(splits.simdgroups, o.tiles, "attention.simdgroups");
  const int length = o.context > 0 ? std::min(o.context, capacity) : capacity;
  const int used = splits.used(length);
  const int share = a.heads / a.kv_heads;
  const int asked = o.pack > 0 && !splits.mma ? o.pack : splits.pack;
  const int pack = o.coalesced ? std::min(asked, largest_power(share, 8)) : 4;
  int prepare_simdgroups = b.target == Target::cuda ? 1 : 4,
      merge_simdgroups = splits.count > 32 ? 8 : 4;
  override_field(prepare_simdgroups, o.tiles, "attention prepare.simdgroups");
  override_field(merge_simdgroups, o.tiles, "attention merge.simdgroups");
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

  Dispatch p(kernels().at("attention_prepare_" + suffix(b.t)));
  set_constants(p, constants);
  p.read("q_gate", s.q_gate).traffic({b.size(inner), {}, 0});
  p.read("k", s.k).read("v", s.v).read("q_norm", s.q_norm).read("k_norm", s.k_norm);
  p.read("inv_freq", frequencies).read("position", s.position);
  p.value("capacity", int32_t{capacity}).write("q_out", q);
  p.write("k_cache", s.keys).traffic({b.size(kv), {}, 0});
  p.write("v_cache", s.values).traffic({b.size(kv), {}, 0});
  p.grid(ceil_div(a.heads + 2 * a.kv_heads, prepare_simdgroups)).threads(32 * prepare_simdgroups);
  b.add(std::move(p), "attention prepare");

  const size_t parts = size_t(a.heads) * splits.count;
  SlotId ml = b.scratch(name + "partial_ml", 8 * parts);
  SlotId sums = b.scratch(name + "partial_o", 4 * parts * D);
  const size_t used_parts = size_t(a.heads) * used;
  const char* form = splits.mma    ? "mma_attention_decode_"
                     : o.coalesced ? "attention_decode_"
                                   : "attention_decode_strided_";
  Dispatch d(kernels().at(form + suffix(b.t)));
  set_constants(d, constants);
  d.read("q", q);
  d.read("k_cache", s.keys).traffic({b.size(size_t(length) * kv), {}, 0});
  d.read("v_cache", s.values).traffic({b.size(size_t(length) * kv), {}, 0});
  d.read("position", s.position).value("capacity", int32_t{capacity});
  d.write("partial_ml", ml).traffic({8 * used_parts, {}, 0});
  d.write("partial_o", sums).traffic({4 * used_parts * D, {}, 0});
  d.grid(splits.count, a.heads / pack).threads(32 * splits.simdgroups);
  b.add(std::move(d), "attention");

  Dispatch m(kernels().at("attention_merge_" + suffix(b.t)));
  set_constants(m, constants);
  m.read("partial_ml", ml).traffic({8 * used_parts, {}, 0});
  m.read("partial_o", sums).traffic({4 * used_parts * D, {}, 0});
  m.read("q_gate", s.q_gate).traffic({b.size(inner), {}, 0});
  m.read("position", s.position).write("out", s.out);
  m.grid(D / 64, a.heads).threads(32 * merge_simdgroups);
  b.add(std::move(m), "attention merge");
}

}  // namespace lily
