#include "bindings_program.h"

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace lily {
namespace {

// A Python bool, int, float or bytes as a Value of the type that is expected of it.
Value to_value(nb::handle object, ScalarType type) {
  switch (type) {
    case ScalarType::boolean:
      return nb::cast<bool>(object);
    case ScalarType::int32:
      return nb::cast<int32_t>(object);
    case ScalarType::uint32:
      return nb::cast<uint32_t>(object);
    case ScalarType::int64:
      return nb::cast<int64_t>(object);
    case ScalarType::uint64:
      return nb::cast<uint64_t>(object);
    case ScalarType::float32:
      return nb::cast<float>(object);
    case ScalarType::bytes:
      break;
  }
  auto raw = nb::cast<nb::bytes>(object);
  return Value(ScalarType::bytes, raw.c_str(), raw.size());
}

Extent to_extent(nb::handle object) {
  if (nb::isinstance<ScalarId>(object))
    return nb::cast<ScalarId>(object);
  return nb::cast<uint32_t>(object);
}

Range to_range(size_t offset, std::optional<size_t> bytes) {
  return {offset, bytes.value_or(Range::kToEnd)};
}

std::string text(nb::handle dict, const char* key) {
  return nb::cast<std::string>(nb::borrow<nb::dict>(dict)[key]);
}

Kernel to_kernel(nb::dict d) {
  Kernel k;
  k.name = text(d, "kernel");
  k.file = text(d, "file");
  for (nb::handle h : nb::cast<nb::list>(d["constants"])) {
    auto c = nb::cast<nb::dict>(h);
    k.constants.push_back({nb::cast<int>(c["id"]), text(c, "name"), parse_type(text(c, "type"))});
  }
  for (nb::handle h : nb::cast<nb::list>(d["arguments"])) {
    auto a = nb::cast<nb::dict>(h);
    ArgumentLayout l{nb::cast<int>(a["index"]),
                     text(a, "name"),
                     parse_space(text(a, "space")),
                     parse_access(text(a, "access")),
                     text(a, "type"),
                     "",
                     0};
    if (a.contains("condition")) {
      l.condition = text(a, "condition");
    }
    if (a.contains("size")) {
      l.size = nb::cast<size_t>(a["size"]);
    }
    k.arguments.push_back(std::move(l));
  }
  if (d.contains("threadgroup_bytes")) {
    k.threadgroup_bytes = nb::cast<size_t>(d["threadgroup_bytes"]);
  }
  if (d.contains("max_threads")) {
    k.max_threads = nb::cast<uint32_t>(d["max_threads"]);
  }
  return k;
}

// Adds the kernels of `folder`/manifest.json and makes `folder` the place of their sources.
void load_manifest(KernelRegistry& registry, const std::string& folder) {
  nb::object file = nb::module_::import_("builtins").attr("open")(folder + "/manifest.json");
  nb::object list = nb::module_::import_("json").attr("load")(file);
  file.attr("close")();
  registry.set_folder(folder);
  for (nb::handle kernel : list)
    registry.add(to_kernel(nb::cast<nb::dict>(kernel)));
}

nb::object to_python(const Value& v) {
  auto as = [&](auto zero) {
    std::memcpy(&zero, v.bytes.data(), sizeof zero);
    return nb::cast(zero);
  };
  switch (v.type) {
    case ScalarType::boolean:
      return as(false);
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
  return nb::bytes(v.bytes.data(), v.bytes.size());
}

nb::dict constants_of(const Kernel& kernel, const std::vector<Constant>& constants) {
  nb::dict out;
  for (const ConstantLayout& c : kernel.constants) {
    for (const Constant& given : constants) {
      if (given.id == c.id) {
        out[c.name.c_str()] = to_python(given.value);
      }
    }
  }
  return out;
}

// One dispatch as plain Python data. With bindings, grids and bytes are those of that step.
nb::dict describe_dispatch(const Program& p, int i, const Bindings* b) {
  const Dispatch& d = p.dispatches().at(i);
  const Schedule& schedule = b ? b->schedule() : p.schedule();
  Bindings initial(p);
  const Bindings& values = b ? *b : initial;
  nb::dict out;
  out["index"] = i;
  out["level"] = schedule.level[i];
  out["after"] = schedule.predecessors[i];
  out["kernel"] = d.kernel->name;
  out["file"] = d.kernel->file;
  out["pipeline"] = d.pipeline;
  out["label"] = d.name;
  out["layer"] = d.layer_index >= 0 ? nb::cast(d.layer_index) : nb::none();
  out["phase"] = d.phase;
  out["constants"] = constants_of(*d.kernel, d.constants);
  nb::list grid;
  for (const Extent& e : d.grid_size)
    grid.append(values.extent(e));
  out["grid"] = grid;
  out["threadgroup"] = nb::make_tuple(d.group_size[0], d.group_size[1], d.group_size[2]);
  nb::list arguments;
  size_t read = 0, written = 0;
  for (const BufferArgument& a : d.buffers) {
    size_t moved = values.amount(a.traffic);
    read += reads(a.access) ? moved : 0;
    written += writes(a.access) ? moved : 0;
    nb::dict x;
    x["index"] = a.index;
    x["name"] = d.kernel->find(a.index, false)->name;
    x["slot"] = p.slots()[a.slot.index].name;
    x["offset"] = a.offset;
    x["bytes"] = a.bytes;
    x["access"] = to_string(a.access);
    x["traffic"] = moved;
    arguments.append(x);
  }
  for (const ScalarArgument& a : d.scalars) {
    nb::dict x;
    x["index"] = a.index;
    x["name"] = d.kernel->find(a.index, false)->name;
    x["scalar"] = p.scalars()[a.scalar.index].first;
    x["value"] = to_python(values.scalar(a.scalar));
    arguments.append(x);
  }
  for (const ValueArgument& a : d.values) {
    nb::dict x;
    x["index"] = a.index;
    x["name"] = d.kernel->find(a.index, false)->name;
    x["value"] = to_python(a.value);
    arguments.append(x);
  }
  out["arguments"] = arguments;
  nb::dict memory;
  for (const ThreadgroupMemory& t : d.threadgroup) {
    memory[d.kernel->find(t.index, true)->name.c_str()] = t.bytes;
  }
  out["threadgroup_memory"] = memory;
  out["read"] = read;
  out["written"] = written;
  return out;
}

nb::list slots_of(const Program& p) {
  nb::list out;
  for (const Slot& s : p.slots()) {
    nb::dict d;
    d["name"] = s.name;
    d["kind"] = to_string(s.kind);
    d["bytes"] = s.bytes;
    d["arena_offset"] =
        s.kind == SlotKind::scratch ? nb::cast(s.arena_offset) : nb::object(nb::none());
    out.append(d);
  }
  return out;
}

nb::list pipelines_of(const Program& p) {
  nb::list out;
  for (const Pipeline& pipeline : p.pipelines()) {
    out.append(describe(pipeline));
  }
  return out;
}

nb::dict report_of(const Program& p, const Bindings* b) {
  Report r = p.report(b);
  nb::dict out, labels;
  out["dispatches"] = r.dispatches;
  out["levels"] = r.levels;
  out["barriers"] = r.barriers;
  out["read"] = r.read;
  out["written"] = r.written;
  out["weights"] = r.weights;
  out["arena"] = r.arena;
  for (const auto& [label, bytes] : r.by_label) {
    nb::dict x;
    x["dispatches"] = bytes.dispatches;
    x["read"] = bytes.read;
    x["written"] = bytes.written;
    labels[label.c_str()] = x;
  }
  out["by_label"] = labels;
  return out;
}

nb::list hazards_of(const Program& p, const Bindings* b, std::optional<std::vector<int>> levels,
                    std::optional<std::vector<std::vector<int>>> after) {
  Schedule s = b ? b->schedule() : p.schedule();
  size_t n = p.dispatches().size();
  if (levels)
    s.level = *levels;
  if (after)
    s.predecessors = *after;
  if (s.level.size() != n || s.predecessors.size() != n) {
    throw std::invalid_argument("a level and a list of predecessors is needed for each of the " +
                                std::to_string(n) + " dispatches.");
  }
  nb::list out;
  for (const Hazard& h : p.check_hazards(s, b ? b->locations() : p.own_locations())) {
    nb::dict d;
    d["first"] = h.first;
    d["second"] = h.second;
    d["kind"] = h.kind;
    d["text"] = h.text;
    out.append(d);
  }
  return out;
}

}  // namespace

nb::dict describe(const Pipeline& pipeline) {
  nb::dict d;
  d["key"] = pipeline.key;
  d["kernel"] = pipeline.kernel->name;
  d["file"] = pipeline.kernel->file;
  d["constants"] = constants_of(*pipeline.kernel, pipeline.constants);
  return d;
}

void bind_program(nb::module_& m) {
  nb::class_<Kernel>(m, "Kernel", "A kernel's name, file, constants and arguments.")
      .def_ro("name", &Kernel::name)
      .def_ro("file", &Kernel::file);

  nb::class_<KernelRegistry>(m, "KernelRegistry", "The kernels known, by host name.")
      .def(nb::init<std::string>(), "folder"_a = "")
      .def(
          "add", [](KernelRegistry& r, nb::dict entry) { r.add(to_kernel(entry)); }, "entry"_a,
          "Add one entry of a kernel manifest.")
      .def("load", &load_manifest, "folder"_a, "Add all kernels of folder/manifest.json.")
      .def("at", &KernelRegistry::at, "name"_a, nb::rv_policy::reference_internal)
      .def("names", &KernelRegistry::names)
      .def_prop_ro("folder", &KernelRegistry::folder)
      .def(
          "source",
          [](const KernelRegistry& r, const std::string& file) {
            Source s = r.source(file);
            return nb::make_tuple(s.name, s.text);
          },
          "file"_a, "(library name with content hash, source with own #includes flattened).");
  m.def("kernels", &kernels, nb::rv_policy::reference, "The registry that the primitives use.");

  nb::class_<SlotId>(m, "SlotId");
  nb::class_<ScalarId>(m, "ScalarId");

  constexpr auto self = nb::rv_policy::reference;
  nb::class_<Dispatch>(m, "Dispatch", "One kernel launch; every method returns the dispatch.")
      .def(nb::init<const Kernel&>(), "kernel"_a, nb::keep_alive<1, 2>())
      .def(
          "constant",
          [](Dispatch& d, const std::string& name, nb::handle v) -> Dispatch& {
            return d.constant(name, to_value(v, d.kernel->constant(name).type));
          },
          "name"_a, "value"_a, self)
      .def(
          "read",
          [](Dispatch& d, const std::string& n, SlotId s, size_t o,
             std::optional<size_t> b) -> Dispatch& { return d.read(n, s, to_range(o, b)); },
          "name"_a, "slot"_a, "offset"_a = 0, "bytes"_a = nb::none(), self)
      .def(
          "write",
          [](Dispatch& d, const std::string& n, SlotId s, size_t o,
             std::optional<size_t> b) -> Dispatch& { return d.write(n, s, to_range(o, b)); },
          "name"_a, "slot"_a, "offset"_a = 0, "bytes"_a = nb::none(), self)
      .def(
          "read_write",
          [](Dispatch& d, const std::string& n, SlotId s, size_t o,
             std::optional<size_t> b) -> Dispatch& { return d.read_write(n, s, to_range(o, b)); },
          "name"_a, "slot"_a, "offset"_a = 0, "bytes"_a = nb::none(), self)
      .def(
          "traffic",
          [](Dispatch& d, size_t fixed, std::optional<ScalarId> scalar, size_t each) -> Dispatch& {
            return d.traffic({fixed, scalar.value_or(ScalarId{}), each});
          },
          "bytes"_a, "scalar"_a = nb::none(), "each"_a = 0, self)
      .def(
          "value",
          [](Dispatch& d, const std::string& name, nb::handle v) -> Dispatch& {
            return d.value(name, to_value(v, parse_type(d.kernel->argument(name).type)));
          },
          "name"_a, "value"_a, self)
      .def("scalar", &Dispatch::scalar, "name"_a, "scalar"_a, self)
      .def("threadgroup_memory", &Dispatch::threadgroup_memory, "name"_a, "bytes"_a, self)
      .def(
          "grid",
          [](Dispatch& d, nb::handle x, nb::handle y, nb::handle z) -> Dispatch& {
            return d.grid(to_extent(x), to_extent(y), to_extent(z));
          },
          "x"_a, "y"_a = 1, "z"_a = 1, self)
      .def("threads", &Dispatch::threads, "x"_a, "y"_a = 1, "z"_a = 1, self)
      .def("in_place", &Dispatch::in_place, "a"_a, "b"_a, self)
      .def("label", &Dispatch::label, "text"_a, self)
      .def("layer", &Dispatch::layer, "index"_a, "phase"_a = "", self);

  nb::class_<Program>(m, "Program", "An ordered list of kernel launches over buffer slots.")
      .def(nb::init<std::string>(), "name"_a)
      .def(
          "slot",
          [](Program& p, const std::string& name, const std::string& kind, size_t bytes) {
            return p.slot(name, parse_slot_kind(kind), bytes);
          },
          "name"_a, "kind"_a, "bytes"_a)
      .def("scratch", &Program::scratch, "name"_a, "bytes"_a)
      .def(
          "scalar",
          [](Program& p, const std::string& name, nb::handle initial, const std::string& type) {
            return p.scalar(name, to_value(initial, parse_type(type)));
          },
          "name"_a, "initial"_a, "type"_a = "int")
      .def(
          "add", [](Program& p, const Dispatch& d) { return p.add(d); }, "dispatch"_a,
          nb::keep_alive<1, 2>())
      .def("finish", &Program::finish)
      .def("find_slot", &Program::find_slot, "name"_a)
      .def("find_scalar", &Program::find_scalar, "name"_a)
      .def("describe", &describe_dispatch, "index"_a, "bindings"_a = nb::none())
      .def("report", &report_of, "bindings"_a = nb::none())
      .def("check_hazards", &hazards_of, "bindings"_a = nb::none(), "levels"_a = nb::none(),
           "after"_a = nb::none(),
           "Conflicting pairs that are not kept apart; by the given levels and predecessors, where "
           "they are given.")
      .def_prop_ro("name", &Program::name)
      .def_prop_ro("slots", &slots_of)
      .def_prop_ro("arena_bytes", &Program::arena_bytes)
      .def_prop_ro("pipelines", &pipelines_of,
                   "Kernels with their constants, each once: what a backend compiles.")
      .def("__len__", [](const Program& p) { return p.dispatches().size(); });

  nb::class_<Bindings>(m, "Bindings", "What one step gives to a Program: buffers and scalars.")
      .def(nb::init<const Program&>(), "program"_a, nb::keep_alive<1, 2>())
      .def(
          "bind",
          [](Bindings& b, SlotId s, uint64_t id, size_t bytes, size_t offset, uintptr_t base) {
            b.bind(s, {id, reinterpret_cast<void*>(base), bytes}, offset);
          },
          "slot"_a, "id"_a, "bytes"_a, "offset"_a = 0, "base"_a = 0)
      .def(
          "bind_arena",
          [](Bindings& b, uint64_t id, size_t bytes, size_t offset, uintptr_t base) {
            b.bind_arena({id, reinterpret_cast<void*>(base), bytes}, offset);
          },
          "id"_a, "bytes"_a, "offset"_a = 0, "base"_a = 0)
      .def(
          "set",
          [](Bindings& b, ScalarId s, nb::handle v) { b.set(s, to_value(v, b.scalar(s).type)); },
          "scalar"_a, "value"_a)
      .def_prop_ro("order", [](const Bindings& b) { return b.schedule().order; })
      .def_prop_ro("levels", [](const Bindings& b) { return b.schedule().level; });
}

}  // namespace lily
