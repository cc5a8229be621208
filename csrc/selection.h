// One table that says which kernel serves which shape on which device, and one function that
// answers "which kernel, or why not". Dispatch, tests' skips and lily_mlx.info all ask it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace lily {

enum class ReasonCode : uint8_t {
  ok,
  unsupported_bits,
  unsupported_group,
  unsupported_mode,
  unsupported_dtype,
  head_dim,
  not_divisible,
  out_of_range,
  masked,
  training,
  device_has_no_backend,
};
const char* to_string(ReasonCode code);

struct Reason {
  ReasonCode code = ReasonCode::ok;
  std::string text;
};

// What is asked. A field with several values (the bits of a layer's weights) must suit with each.
struct Shape {
  std::map<std::string, std::vector<int64_t>> numbers;
  std::map<std::string, std::vector<std::string>> words;
};

struct Choice {
  std::string kernel;  // empty: none
  Reason reason;
};

// kind: "project", "moe", "gated_delta", "attention" or "decode_step"; device: "cpu", "metal" or
// "cuda". Throws std::invalid_argument for an unknown kind, or a field that is missing or unknown.
Choice query(const std::string& kind, const std::string& device, const Shape& shape);

// The table, for people: one line a row.
struct TableRow {
  std::string kind, device, kernel;
  std::vector<std::string> rules;
};
std::vector<TableRow> selection_table();

}  // namespace lily
