#include "kernels.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>

namespace lily {
namespace {

constexpr int kMaxBufferIndex = 30;  // Metal has 31 buffer indices

template <typename T>
T parse_name(const std::string& text, const char* what, std::initializer_list<T> all) {
  std::string known;
  for (T value : all) {
    if (text == to_string(value))
      return value;
    known += (known.empty() ? "" : ", ") + std::string(to_string(value));
  }
  throw std::invalid_argument(std::string("unknown ") + what + " '" + text + "'; known are " +
                              known + ".");
}

template <typename Layouts>
std::string names_of(const Layouts& layouts) {
  std::string out;
  for (const auto& l : layouts)
    out += (out.empty() ? "" : ", ") + l.name;
  return out.empty() ? "none" : out;
}

std::string read_ascii(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in)
    throw std::invalid_argument("kernel source " + path.string() + " cannot be read.");
  std::ostringstream buffer;
  buffer << in.rdbuf();
  std::string text = buffer.str();
  int line = 1;
  for (unsigned char c : text) {
    if (c == '\n')
      ++line;
    if (c > 126 || (c < 32 && c != '\n' && c != '\t')) {
      throw std::invalid_argument(path.string() + ":" + std::to_string(line) + " holds byte " +
                                  std::to_string(c) + "; kernel source must be plain ASCII.");
    }
  }
  return text;
}

// Returns "x.h" for a line `#include "x.h"`, else nothing.
std::string own_include(const std::string& line) {
  size_t i = line.find_first_not_of(" \t");
  if (i == std::string::npos || line.compare(i, 8, "#include") != 0)
    return "";
  size_t open = line.find('"', i);
  if (open == std::string::npos)
    return "";
  return line.substr(open + 1, line.find('"', open + 1) - open - 1);
}

void flatten(const std::filesystem::path& folder, const std::string& file,
             std::set<std::string>& seen, std::string& out) {
  if (!seen.insert(file).second)
    return;
  std::istringstream in(read_ascii(folder / file));
  for (std::string line; std::getline(in, line);) {
    std::string included = own_include(line);
    if (!included.empty()) {
      // A header may spell its neighbour's path from its own folder or from the kernels' folder.
      auto near = std::filesystem::path(file).parent_path() / included;
      bool is_near = std::filesystem::exists(folder / near);
      flatten(folder, is_near ? near.lexically_normal().generic_string() : included, seen, out);
    } else if (line.find("#pragma once") == std::string::npos) {
      out += line + "\n";
    }
  }
}

std::string hash_text(const std::string& text) {
  uint64_t h = 0xcbf29ce484222325ull;  // FNV-1a
  for (unsigned char c : text)
    h = (h ^ c) * 0x100000001b3ull;
  char hex[17];
  snprintf(hex, sizeof hex, "%016llx", static_cast<unsigned long long>(h));
  return hex;
}

}  // namespace

const char* to_string(Access a) {
  return a == Access::read ? "read" : a == Access::write ? "write" : "read_write";
}
Access parse_access(const std::string& text) {
  return parse_name(text, "access", {Access::read, Access::write, Access::read_write});
}

const char* to_string(Space s) {
  return s == Space::device ? "device" : s == Space::constant ? "constant" : "threadgroup";
}
Space parse_space(const std::string& text) {
  return parse_name(text, "address space", {Space::device, Space::constant, Space::threadgroup});
}

const char* to_string(ScalarType t) {
  constexpr const char* names[] = {"bool", "int", "uint", "long", "ulong", "float", "bytes"};
  return names[static_cast<int>(t)];
}
size_t size_of(ScalarType t) {
  constexpr size_t sizes[] = {1, 4, 4, 8, 8, 4, 0};
  return sizes[static_cast<int>(t)];
}
ScalarType parse_type(const std::string& text) {
  std::string spelt = text;
  for (char& c : spelt) {
    if (c == '&' || c == '*')
      c = ' ';
  }
  std::istringstream in(spelt);
  std::string base;
  for (std::string word; in >> word;) {
    if (word != "const" && word != "constant" && word != "device")
      base += word;
  }
  for (ScalarType t : {ScalarType::boolean, ScalarType::int32, ScalarType::uint32,
                       ScalarType::int64, ScalarType::uint64, ScalarType::float32}) {
    if (base == to_string(t))
      return t;
  }
  if (base == "int32_t")
    return ScalarType::int32;
  if (base == "uint32_t" || base == "unsigned" || base == "unsignedint")
    return ScalarType::uint32;
  if (base == "int64_t")
    return ScalarType::int64;
  if (base == "uint64_t" || base == "size_t" || base == "unsignedlong")
    return ScalarType::uint64;
  return ScalarType::bytes;
}

std::string Value::to_string() const {
  auto as = [this](auto zero) {
    std::memcpy(&zero, bytes.data(), sizeof zero);
    if constexpr (std::is_integral_v<decltype(zero)>) {
      return std::to_string(zero);
    } else {
      char text[32];  // nine digits tell any two floats apart: pipeline keys are made of this
      std::snprintf(text, sizeof text, "%.9g", static_cast<double>(zero));
      return std::string(text);
    }
  };
  switch (type) {
    case ScalarType::boolean:
      return bytes[0] ? "true" : "false";
    case ScalarType::int32:
      return as(int32_t{});
    case ScalarType::uint32:
      return as(uint32_t{});
    case ScalarType::int64:
      return as(int64_t{});
    case ScalarType::uint64:
      return as(uint64_t{});
    case ScalarType::float32:
      return as(float{});
    case ScalarType::bytes:
      break;
  }
  return std::to_string(bytes.size()) + " bytes";
}

uint64_t Value::as_count() const {
  bool is_integer =
      type != ScalarType::float32 && type != ScalarType::bytes && type != ScalarType::boolean;
  if (!is_integer) {
    throw std::invalid_argument(to_string() + " (" + lily::to_string(type) + ") is not a count.");
  }
  int64_t v = 0;
  std::memcpy(&v, bytes.data(), bytes.size());
  if (type == ScalarType::int32)
    v = static_cast<int32_t>(v);
  if (v < 0)
    throw std::invalid_argument(to_string() + " is negative and cannot be a count.");
  return static_cast<uint64_t>(v);
}

const ArgumentLayout* Kernel::find(int index, bool is_threadgroup) const {
  for (const auto& a : arguments) {
    if (a.index == index && (a.space == Space::threadgroup) == is_threadgroup)
      return &a;
  }
  return nullptr;
}

const ArgumentLayout& Kernel::argument(const std::string& wanted) const {
  for (const auto& a : arguments) {
    if (a.name == wanted)
      return a;
  }
  throw std::invalid_argument("kernel '" + name + "' has no argument '" + wanted +
                              "'; it has: " + names_of(arguments) + ".");
}

const ConstantLayout& Kernel::constant(const std::string& wanted) const {
  for (const auto& c : constants) {
    if (c.name == wanted)
      return c;
  }
  throw std::invalid_argument("kernel '" + name + "' has no function constant '" + wanted +
                              "'; it has: " + names_of(constants) + ".");
}

void KernelRegistry::add(Kernel kernel) {
  if (kernel.name.empty())
    throw std::invalid_argument("a kernel of " + kernel.file + " has no name.");
  std::string who = "kernel '" + kernel.name + "'";
  std::set<std::pair<bool, int>> indices;
  std::set<std::string> names;
  for (const auto& a : kernel.arguments) {
    bool is_threadgroup = a.space == Space::threadgroup;
    if (a.index < 0 || a.index > kMaxBufferIndex) {
      throw std::invalid_argument(who + ": argument '" + a.name + "' has index " +
                                  std::to_string(a.index) + ", outside 0 to " +
                                  std::to_string(kMaxBufferIndex) + ".");
    }
    if (!indices.insert({is_threadgroup, a.index}).second || !names.insert(a.name).second) {
      throw std::invalid_argument(who + ": argument '" + a.name + "' (index " +
                                  std::to_string(a.index) + ") is given twice.");
    }
    if (a.space == Space::constant && writes(a.access)) {
      throw std::invalid_argument(who + ": argument '" + a.name +
                                  "' is constant and cannot be written.");
    }
  }
  for (const auto& c : kernel.constants) {
    if (c.type == ScalarType::bytes) {
      throw std::invalid_argument(who + ": function constant '" + c.name +
                                  "' must be bool, int, uint, long, ulong or float.");
    }
  }
  std::string name = kernel.name;
  if (!kernels_.emplace(name, std::move(kernel)).second) {
    throw std::invalid_argument(who + " is in the registry already.");
  }
}

const Kernel& KernelRegistry::at(const std::string& name) const {
  auto it = kernels_.find(name);
  if (it == kernels_.end()) {
    throw std::invalid_argument("unknown kernel '" + name + "'; the registry holds " +
                                std::to_string(kernels_.size()) + " from '" + folder_ +
                                "' (see KernelRegistry.names()).");
  }
  return it->second;
}

std::vector<std::string> KernelRegistry::names() const {
  std::vector<std::string> out;
  for (const auto& [name, kernel] : kernels_)
    out.push_back(name);
  return out;
}

Source KernelRegistry::source(const std::string& file) const {
  Source out;
  std::set<std::string> seen;
  flatten(folder_, file, seen, out.text);
  out.name = "lily_" + std::filesystem::path(file).stem().string() + "_" + hash_text(out.text);
  return out;
}

KernelRegistry& kernels() {
  static KernelRegistry registry;
  return registry;
}

}  // namespace lily
