// The kernels that exist: where their source is and the constants and arguments they expect.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <type_traits>
#include <vector>

namespace lily {

enum class Access : uint8_t { read = 1, write = 2, read_write = 3 };
inline bool reads(Access a) {
  return (static_cast<int>(a) & 1) != 0;
}
inline bool writes(Access a) {
  return (static_cast<int>(a) & 2) != 0;
}
const char* to_string(Access a);
Access parse_access(const std::string& text);

// Types of function constants and of arguments passed by value; `bytes` is anything else.
enum class ScalarType : uint8_t { boolean, int32, uint32, int64, uint64, float32, bytes };
const char* to_string(ScalarType t);
// The ScalarType of a Metal spelling such as "int", "constant uint&" or "const float*".
ScalarType parse_type(const std::string& text);
// 0 for ScalarType::bytes.
size_t size_of(ScalarType t);

// A small typed value: a function constant, or an argument passed by value.
struct Value {
  ScalarType type;
  std::vector<uint8_t> bytes;

  Value(bool v) : Value(ScalarType::boolean, &v, sizeof v) {}
  Value(int32_t v) : Value(ScalarType::int32, &v, sizeof v) {}
  Value(uint32_t v) : Value(ScalarType::uint32, &v, sizeof v) {}
  Value(int64_t v) : Value(ScalarType::int64, &v, sizeof v) {}
  Value(uint64_t v) : Value(ScalarType::uint64, &v, sizeof v) {}
  Value(float v) : Value(ScalarType::float32, &v, sizeof v) {}
  template <typename T, typename = std::enable_if_t<std::is_class_v<T>>>
  static Value of_struct(const T& v) {
    static_assert(std::is_trivially_copyable_v<T>);
    return Value(ScalarType::bytes, &v, sizeof v);
  }
  Value(ScalarType type, const void* data, size_t size)
      : type(type),
        bytes(static_cast<const uint8_t*>(data), static_cast<const uint8_t*>(data) + size) {}

  std::string to_string() const;
  // The value as a count; throws when it is negative or no integer.
  uint64_t as_count() const;
};

enum class Space : uint8_t { device, constant, threadgroup };
const char* to_string(Space s);
Space parse_space(const std::string& text);

struct ConstantLayout {
  int id;
  std::string name;
  ScalarType type;
};

struct ArgumentLayout {
  int index;  // the buffer index, or the threadgroup index in Space::threadgroup
  std::string name;
  Space space;
  Access access;
  std::string type;
  // Name of the condition under which the argument exists, empty: always. Where it is a function
  // constant of the kernel, it is checked; where the source derives it from others, the argument is
  // optional here.
  std::string condition;
  size_t size = 0;  // bytes of what is pointed to, 0: not known
};

struct Kernel {
  std::string name;  // host_name
  std::string file;  // relative to the registry's folder, e.g. "gemv.metal"
  std::vector<ConstantLayout> constants;
  std::vector<ArgumentLayout> arguments;
  size_t threadgroup_bytes = 0;  // that the source itself declares
  uint32_t max_threads = 1024;   // of a threadgroup

  // Null when there is none.
  const ArgumentLayout* find(int index, bool is_threadgroup) const;
  // These throw std::invalid_argument, naming the kernel and what it does have.
  const ArgumentLayout& argument(const std::string& name) const;
  const ConstantLayout& constant(const std::string& name) const;
};

// One Metal library: a kernel file with the project's own headers put in place of their #includes.
struct Source {
  std::string name;  // file stem + content hash: never the same for two different texts
  std::string text;
};

class KernelRegistry {
 public:
  explicit KernelRegistry(std::string folder = "") : folder_(std::move(folder)) {}

  const std::string& folder() const {
    return folder_;
  }
  void set_folder(std::string folder) {
    folder_ = std::move(folder);
  }
  // Throws std::invalid_argument for a kernel that is there already or whose layout is not sound.
  void add(Kernel kernel);
  // The reference stays valid as long as the registry. Throws for an unknown name.
  const Kernel& at(const std::string& name) const;
  bool has(const std::string& name) const {
    return kernels_.count(name) != 0;
  }
  std::vector<std::string> names() const;
  // Reads and flattens `file`; throws when a file is missing or holds a byte that is not ASCII.
  Source source(const std::string& file) const;

 private:
  std::string folder_;
  std::map<std::string, Kernel> kernels_;
};

// The registry that the primitives use; Python fills it when the package is imported.
KernelRegistry& kernels();

}  // namespace lily
