#include "builder.h"

#include <algorithm>
#include <stdexcept>

namespace lily {

std::string suffix(Type t) {
  return t == Type::bf16 ? "bf16" : t == Type::fp16 ? "fp16" : "fp32";
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

std::vector<MatrixSpec> specs_of(const std::vector<MatrixSlots>& matrices) {
  std::vector<MatrixSpec> specs;
  for (const MatrixSlots& m : matrices) {
    specs.push_back(m.spec);
  }
  return specs;
}

size_t code_bytes(const MatrixSpec& m) {
  const size_t values = size_t(m.experts) * m.rows * m.cols;
  return m.bits == 0 ? values * size_of(m.t) : values * m.bits / 8;
}

namespace {

size_t scale_bytes(const MatrixSpec& m) {
  return size_t(m.experts) * m.rows * (m.cols / m.group) * size_of(m.t);
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

MatrixSlots Builder::matrix(const std::string& name, MatrixSpec spec) {
  spec.t = t;  // on a GPU they have no other
  MatrixSlots m{spec, weight(name + ".weight", code_bytes(spec)), {}, {}};
  if (m.quantized()) {
    m.scales = weight(name + ".scales", scale_bytes(spec));
    m.biases = weight(name + ".biases", scale_bytes(spec));
  }
  return m;
}

void Builder::add(Dispatch d, const std::string& label) {
  d.label(label).layer(layer, phase);
  program.add(std::move(d));
}

namespace {

void read_part(Dispatch& d, const std::string& name, SlotId slot, const MatrixSpec& m,
               std::optional<int> experts, size_t bytes) {
  d.read(name, slot);
  if (experts) {
    d.traffic({bytes / m.experts * *experts, {}, 0});
  }
}

}  // namespace

void read_matrix(Dispatch& d, const MatrixSlots& m, const std::string& w, const std::string& scales,
                 const std::string& biases, std::optional<int> experts) {
  read_part(d, w, m.w, m.spec, experts, code_bytes(m.spec));
  if (m.quantized()) {
    read_part(d, scales, m.scales, m.spec, experts, scale_bytes(m.spec));
    read_part(d, biases, m.biases, m.spec, experts, scale_bytes(m.spec));
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

}  // namespace lily
