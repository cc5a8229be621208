#include "selection.h"

#include <algorithm>
#include <functional>
#include <set>
#include <stdexcept>

namespace lily {
namespace {

using Words = std::vector<std::string>;
using Numbers = std::vector<int64_t>;

struct Rule {
  std::string text;
  std::function<Reason(const Shape&)> check;
};

struct Row {
  std::string kind, device, kernel;
  std::vector<Rule> rules;
};

struct MissingField {
  std::string name;
};

const Numbers& numbers(const Shape& s, const std::string& field) {
  auto it = s.numbers.find(field);
  if (it == s.numbers.end()) {
    throw MissingField{field};
  }
  return it->second;
}

const Words& words(const Shape& s, const std::string& field) {
  auto it = s.words.find(field);
  if (it == s.words.end()) {
    throw MissingField{field};
  }
  return it->second;
}

std::string quote(const std::string& s) {
  return "'" + s + "'";
}
std::string quote(int64_t n) {
  return std::to_string(n);
}

template <typename T>
std::string join(const std::vector<T>& list) {
  std::string out;
  for (const T& x : list) {
    out += (out.empty() ? "" : ", ") + (quote(x));
  }
  return out;
}

template <typename T>
Reason each_in(const std::vector<T>& values, const std::vector<T>& allowed, ReasonCode code,
               const std::string& field) {
  for (const T& v : values) {
    if (std::find(allowed.begin(), allowed.end(), v) == allowed.end()) {
      return {code, field + " " + quote(v) + " has no kernel; " + join(allowed) +
                        (allowed.size() == 1 ? " has." : " have.")};
    }
  }
  return {};
}

// ---- The rules that a row is made of

Rule dtype(Words allowed) {
  return {"dtype " + join(allowed), [=](const Shape& s) {
            return each_in(words(s, "dtype"), allowed, ReasonCode::unsupported_dtype, "dtype");
          }};
}

Rule mask(Words allowed) {
  return {"mask " + join(allowed), [=](const Shape& s) {
            return each_in(words(s, "mask"), allowed, ReasonCode::masked, "mask");
          }};
}

// Quantized weights; bits 0 stands for plain ones, which need no mode and no group.
Rule weights(Words modes, Numbers bits, Numbers groups) {
  return {"weights " + join(modes) + ", bits " + join(bits) + ", group " + join(groups),
          [=](const Shape& s) -> Reason {
            const Numbers& given = numbers(s, "bits");
            Numbers quantized;
            std::copy_if(given.begin(), given.end(), std::back_inserter(quantized),
                         [](int64_t b) { return b != 0; });
            if (!quantized.empty()) {
              Reason r = each_in(words(s, "mode"), modes, ReasonCode::unsupported_mode, "mode");
              if (r.code != ReasonCode::ok) {
                return r;
              }
              r = each_in(numbers(s, "group"), groups, ReasonCode::unsupported_group, "group");
              if (r.code != ReasonCode::ok) {
                return r;
              }
            }
            return each_in(given, bits, ReasonCode::unsupported_bits, "bits");
          }};
}

Rule between(std::string field, int64_t low, int64_t high) {
  return {field + " " + quote(low) + " to " + quote(high), [=](const Shape& s) -> Reason {
            for (int64_t v : numbers(s, field)) {
              if (v < low || v > high) {
                return {ReasonCode::out_of_range, field + " " + quote(v) + " is outside " +
                                                      quote(low) + " to " + quote(high) + "."};
              }
            }
            return {};
          }};
}

Rule multiple(std::string field, int64_t unit, ReasonCode code = ReasonCode::not_divisible) {
  return {field + " a multiple of " + quote(unit), [=](const Shape& s) -> Reason {
            for (int64_t v : numbers(s, field)) {
              if (v % unit != 0) {
                return {code, field + " " + quote(v) + " is no multiple of " + quote(unit) + "."};
              }
            }
            return {};
          }};
}

Rule head_dim(int64_t unit, int64_t most) {
  return {"head_dim a multiple of " + quote(unit) + " up to " + quote(most),
          [=](const Shape& s) -> Reason {
            for (int64_t v : numbers(s, "head_dim")) {
              if (v % unit != 0 || v < unit || v > most) {
                return {ReasonCode::head_dim, "head_dim " + quote(v) + " is no multiple of " +
                                                  quote(unit) + " up to " + quote(most) + "."};
              }
            }
            return {};
          }};
}

Rule at_most(std::string field, std::string other) {
  return {field + " at most " + other, [=](const Shape& s) -> Reason {
            const Numbers &a = numbers(s, field), &b = numbers(s, other);
            int64_t high = *std::max_element(a.begin(), a.end());
            int64_t low = *std::min_element(b.begin(), b.end());
            if (high > low) {
              return {ReasonCode::out_of_range, field + " " + quote(high) + " is more than " +
                                                    other + " " + quote(low) + "."};
            }
            return {};
          }};
}

// A range that the field must be known to lie in: rows of special kernels, which the general row of
// the table follows.
Rule row_count(int64_t low, int64_t high) {
  return {"rows " + quote(low) + " to " + quote(high), [=](const Shape& s) -> Reason {
            auto it = s.numbers.find("rows");
            for (int64_t v : it == s.numbers.end() ? Numbers{-1} : it->second) {
              if (v < low || v > high) {
                return {ReasonCode::out_of_range, "rows " + quote(v) + " is outside " + quote(low) +
                                                      " to " + quote(high) + "."};
              }
            }
            return {};
          }};
}

Rule without_mask() {
  return {"no mask", [](const Shape& s) -> Reason {
            auto it = s.words.find("mask");
            if (it == s.words.end() || it->second != Words{"none"}) {
              return {ReasonCode::masked, "a mask has no kernel here."};
            }
            return {};
          }};
}

// ---- The table. Rows of one kind and device: the special first, the most general last; its reason
// is the answer when none fits.

const std::vector<Row>& table() {
  static const Rule any_float = dtype({"bfloat16", "float16", "float32"});
  static const Rule affine = weights({"affine"}, {0, 4, 8}, {32, 64, 128});
  static const Rule masks = mask({"none", "causal", "bool"});
  static const Rule key_dim[] = {multiple("key_dim", 16), between("key_dim", 16, 256)};
  static const Rule value_dim[] = {multiple("value_dim", 4), between("value_dim", 4, 256)};
  static const Rule experts = between("experts", 1, 1024);
  static const Rule half = dtype({"bfloat16", "float16"});
  static const Rule bf16 = dtype({"bfloat16"});
  static const Rule columns = multiple("columns", 32);
  static const Rule gdn_dims[] = {between("key_dim", 128, 128), between("value_dim", 128, 128)};
  static const Rule metal_experts = between("experts", 1, 512);
  static const Rule metal_top_k = between("top_k", 1, 16);
  static const Rule top_k[] = {between("top_k", 1, 32), at_most("top_k", "experts")};
  // clang-format off
  static const std::vector<Row> rows = {
    {"project",     "cpu", "reference", {any_float, affine, multiple("columns", 32)}},
    {"moe",         "cpu", "reference", {any_float, affine, multiple("columns", 32), experts, top_k[0], top_k[1]}},
    {"gated_delta", "cpu", "reference", {any_float, key_dim[0], key_dim[1], value_dim[0], value_dim[1]}},
    {"attention",   "cpu", "reference", {any_float, masks, head_dim(16, 512)}},
    {"decode_step", "cpu", "reference", {any_float, affine, multiple("columns", 32), between("rows", 1, 1), head_dim(16, 512),
                                         key_dim[0], key_dim[1], value_dim[0], value_dim[1], experts, top_k[0], top_k[1]}},
    {"project",     "metal", "gemv",           {any_float, affine, columns, row_count(1, 1)}},
    {"project",     "metal", "gemv_rows",      {half, affine, columns, row_count(2, 16)}},
    {"project",     "metal", "qgemm",          {half, affine, columns}},
    {"moe",         "metal", "moe_rows",       {half, affine, columns, metal_experts, metal_top_k, top_k[1], row_count(1, 16)}},
    {"moe",         "metal", "moe_gemm",       {half, affine, columns, metal_experts, metal_top_k, top_k[1]}},
    {"gated_delta", "metal", "gdn_step",       {any_float, gdn_dims[0], gdn_dims[1], row_count(1, 1), without_mask()}},
    {"gated_delta", "metal", "gdn_scan",       {half, gdn_dims[0], gdn_dims[1]}},
    {"attention",   "metal", "attention_prep", {half, mask({"none", "causal", "bool", "additive"}), between("head_dim", 256, 256)}},
    {"decode_step", "metal", "decode_step",    {half, affine, columns, between("rows", 1, 1), between("head_dim", 256, 256),
                                                gdn_dims[0], gdn_dims[1], metal_experts, multiple("experts", 32), metal_top_k, top_k[1]}},
    {"project",     "cuda",  "gemv_rows",      {bf16, affine, columns, row_count(1, 16)}},
    {"project",     "cuda",  "qgemm",          {bf16, affine, columns}},
    {"moe",         "cuda",  "moe_rows",       {bf16, affine, columns, metal_experts, metal_top_k, top_k[1], row_count(1, 16)}},
    {"moe",         "cuda",  "moe_gemm",       {bf16, affine, columns, metal_experts, metal_top_k, top_k[1]}},
    {"gated_delta", "cuda",  "gdn_scan",       {bf16, gdn_dims[0], gdn_dims[1]}},
    {"attention",   "cuda",  "attention_prep", {bf16, mask({"none", "causal", "bool", "additive"}), between("head_dim", 256, 256)}},
    {"decode_step", "cuda",  "decode_step",    {half, affine, columns, between("rows", 1, 1), between("head_dim", 256, 256),
                                                gdn_dims[0], gdn_dims[1], metal_experts, multiple("experts", 32), metal_top_k, top_k[1]}},
  };
  // clang-format on
  return rows;
}

const std::set<std::string>& known_fields() {
  static const std::set<std::string> fields = {
      "dtype",   "mask",    "mode",  "bits",      "group",    "rows",  "columns",  "head_dim",
      "experts", "key_dim", "top_k", "value_dim", "training", "heads", "kv_heads", "context"};
  return fields;
}

}  // namespace

const char* to_string(ReasonCode code) {
  constexpr const char* names[] = {"ok",
                                   "unsupported_bits",
                                   "unsupported_group",
                                   "unsupported_mode",
                                   "unsupported_dtype",
                                   "head_dim",
                                   "not_divisible",
                                   "out_of_range",
                                   "masked",
                                   "training",
                                   "device_has_no_backend"};
  return names[static_cast<int>(code)];
}

Choice query(const std::string& kind, const std::string& device, const Shape& shape) {
  std::set<std::string> given;
  for (const auto& [name, values] : shape.numbers) {
    given.insert(name);
  }
  for (const auto& [name, values] : shape.words) {
    given.insert(name);
  }
  for (const std::string& name : given) {
    if (known_fields().count(name) == 0) {
      throw std::invalid_argument("query has no field " + quote(name) + "; it has " +
                                  join(Words(known_fields().begin(), known_fields().end())) + ".");
    }
  }
  std::set<std::string> kinds;
  for (const Row& row : table()) {
    kinds.insert(row.kind);
  }
  if (kinds.count(kind) == 0) {
    throw std::invalid_argument("query has no kind " + quote(kind) + "; it has " +
                                join(Words(kinds.begin(), kinds.end())) + ".");
  }
  auto training = shape.numbers.find("training");
  if (training != shape.numbers.end() && training->second.at(0) != 0) {
    return {"", {ReasonCode::training, "kernels have no gradient; training runs the stock ops."}};
  }
  Reason last{ReasonCode::device_has_no_backend,
              "device " + quote(device) + " has no kernel for " + kind + "."};
  for (const Row& row : table()) {
    if (row.kind != kind || row.device != device) {
      continue;
    }
    Reason reason;
    for (const Rule& rule : row.rules) {
      try {
        reason = rule.check(shape);
      } catch (const MissingField& missing) {
        throw std::invalid_argument("query " + quote(kind) + " needs " + missing.name + ".");
      }
      if (reason.code != ReasonCode::ok) {
        break;
      }
    }
    if (reason.code == ReasonCode::ok) {
      return {row.kernel, {}};
    }
    last = reason;
  }
  return {"", last};
}

std::vector<TableRow> selection_table() {
  std::vector<TableRow> out;
  for (const Row& row : table()) {
    out.push_back({row.kind, row.device, row.kernel, {}});
    for (const Rule& rule : row.rules) {
      out.back().rules.push_back(rule.text);
    }
  }
  return out;
}

}  // namespace lily
