#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "bindings_cuda.h"
#include "bindings_host.h"
#include "bindings_program.h"
#include "bindings_programs.h"
#include "bindings_spec.h"
#include "mlx/version.h"
#include "primitives/decode.h"
#include "primitives/layers.h"
#include "reference/micro.h"
#include "reference/parallel.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace lily {
namespace {

// Remembers which objects a decode plan was built from: entries of modules (dicts) and of lists.
// changed() is asked before every step, so it compares pointers only. The root, a module which owns
// the plan and so this, is not held: changed() is told it.
class Watch {
 public:
  void root_entry(nb::dict root, nb::str key) {
    nb::object value = root[key];
    entries_.push_back({nb::object(), key, value, 0, array_id(value)});
  }
  void dict_entry(nb::dict owner, nb::str key) {
    root_entry(owner, key);
    entries_.back().owner = owner;
  }
  void list_entries(nb::list owner) {
    for (size_t i = 0; i < owner.size(); ++i) {
      entries_.push_back({owner, nb::object(), owner[i], i, 0});
    }
    lists_.push_back({owner, owner.size()});
  }
  bool changed(nb::dict root) const {
    for (const auto& [list, size] : lists_) {
      if (list.size() != size) {
        return true;
      }
    }
    for (const Entry& e : entries_) {
      PyObject* owner = e.owner.is_valid() ? e.owner.ptr() : root.ptr();
      PyObject* now = e.key.is_valid() ? PyDict_GetItemWithError(owner, e.key.ptr())
                                       : PyList_GetItem(owner, static_cast<Py_ssize_t>(e.index));
      if (now != e.value.ptr() || (e.array_id != 0 && array_id(nb::handle(now)) != e.array_id)) {
        PyErr_Clear();
        return true;
      }
    }
    return false;
  }

  // For the garbage collector: a module may refer back to what owns it.
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (nb::inst_ready(self)) {
      const Watch& w = *nb::inst_ptr<Watch>(self);
      for (const Entry& e : w.entries_) {
        Py_VISIT(e.owner.ptr());
        Py_VISIT(e.value.ptr());
      }
      for (const auto& [list, size] : w.lists_) {
        Py_VISIT(list.ptr());
      }
    }
    return 0;
  }
  static int clear(PyObject* self) {
    // Emptied before what was held dies, which may run any code.
    Watch held = std::exchange(*nb::inst_ptr<Watch>(self), Watch());
    return 0;
  }

 private:
  struct Entry {
    nb::object owner, key, value;
    size_t index;
    uintptr_t
        array_id;  // an mx.array assigned to in place keeps its Python object and changes this
  };
  static uintptr_t array_id(nb::handle value) {
    return nb::isinstance<mx::array>(value) ? nb::inst_ptr<mx::array>(value)->id() : 0;
  }
  std::vector<Entry> entries_;
  std::vector<std::pair<nb::list, size_t>> lists_;
};

PyType_Slot watch_slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(Watch::traverse)},
                             {Py_tp_clear, reinterpret_cast<void*>(Watch::clear)},
                             {0, nullptr}};

// What Python holds. A shared_ptr handed out by nanobind takes the GIL when it dies, which a
// stream's thread must never wait for; these hold plain ones.
struct Plan {
  std::shared_ptr<const DecodePlan> shared;
};
struct State {
  std::shared_ptr<DecodeState> shared;
};

void bind_layers(nb::module_& m) {
  nb::class_<Weight>(m, "Weight",
                     "A linear layer's weight: plain, or affine codes with scales and biases.")
      .def(nb::init<mx::array, std::optional<mx::array>, std::optional<mx::array>, int, int>(),
           "weight"_a, "scales"_a = nb::none(), "biases"_a = nb::none(), "bits"_a = 0,
           "group"_a = 0)
      .def_prop_ro("rows", &Weight::rows)
      .def_prop_ro("cols", &Weight::cols)
      .def_prop_ro("dtype", &Weight::dtype);
  nb::class_<MoeLayer>(m, "MoeLayer")
      .def(
          "__init__",
          [](MoeLayer* self, Weight router, Weight gate, Weight up, Weight down, Weight shared_gate,
             Weight shared_up, Weight shared_down, Weight shared_router, int top_k,
             bool normalize) {
            new (self)
                MoeLayer{std::move(router),      std::move(gate),          std::move(up),
                         std::move(down),        std::move(shared_gate),   std::move(shared_up),
                         std::move(shared_down), std::move(shared_router), {top_k, normalize}};
          },
          "router"_a, "gate"_a, "up"_a, "down"_a, "shared_gate"_a, "shared_up"_a, "shared_down"_a,
          "shared_router"_a, "top_k"_a, "normalize"_a);

  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a, "eps"_a, nb::kw_only(), "stream"_a = nb::none());
  m.def("project", &project, "x"_a, "weights"_a, "float32_out"_a = false, nb::kw_only(),
        "stream"_a = nb::none());
  m.def("embed", &embed, "ids"_a, "weight"_a, "dtype"_a, nb::kw_only(), "stream"_a = nb::none());
  m.def("gated_delta", &gated_delta, "qkv"_a, "z"_a, "b"_a, "a"_a, "conv_weight"_a, "A_log"_a,
        "dt_bias"_a, "norm_weight"_a, "eps"_a, "key_heads"_a, "value_heads"_a, "key_dim"_a,
        "value_dim"_a, "conv_state"_a = nb::none(), "state"_a = nb::none(), "mask"_a = nb::none(),
        "lengths"_a = nb::none(), nb::kw_only(), "stream"_a = nb::none());
  m.def("attention_prepare", &attention_prepare, "q_gate"_a, "k"_a, "q_norm"_a, "k_norm"_a,
        "offset"_a, "heads"_a, "kv_heads"_a, "rotary"_a, "base"_a, "eps"_a, nb::kw_only(),
        "stream"_a = nb::none());
  m.def("attend", &attend, "q"_a, "keys"_a, "values"_a, "q_gate"_a, "mask"_a = nb::none(),
        "causal"_a = false, nb::kw_only(), "stream"_a = nb::none());
  m.def("moe", &moe, "x"_a, "layer"_a, "logits"_a = nb::none(), "shared_logit"_a = nb::none(),
        nb::kw_only(), "stream"_a = nb::none());
}

void bind_decode(nb::module_& m) {
  nb::class_<Plan>(m, "DecodePlan", "The weights that a decode step runs with; immutable.")
      .def(
          "__init__",
          [](Plan* self, nb::dict weights) {
            auto plan = std::make_shared<DecodePlan>();
            plan->model = to_model_weights(weights);
            plan->dtype = dtype_of(plan->model.t);
            {
              nb::gil_scoped_release release;
              plan->prepare();
            }
            new (self) Plan{std::move(plan)};
          },
          "weights"_a, "weights: as lily_mlx.spec.weights gives them.")
      .def_prop_ro(
          "programs",
          [](const Plan& p) { return p.shared->programs ? p.shared->programs->size() : 0; },
          "How many Programs are kept, for capacities and options that were used.");
  nb::class_<State>(m, "DecodeState", "The caches of one sequence while the decode step owns them.")
      .def(
          "__init__",
          [](State* self, const Plan& plan) {
            new (self) State{std::make_shared<DecodeState>(plan.shared)};
          },
          "plan"_a)
      .def(
          "put",
          [](State& self, int layer, std::optional<mx::array> first,
             std::optional<mx::array> second) {
            nb::gil_scoped_release release;
            self.shared->put(layer, std::move(first), std::move(second));
          },
          "layer"_a, "first"_a.none(), "second"_a.none())
      .def(
          "take", [](State& self, int layer) { return self.shared->take(layer); }, "layer"_a)
      .def(
          "profile",
          [](State& self, mx::StreamOrDevice stream) {
            std::vector<std::tuple<std::string, size_t, double>> rows;
            for (const auto& t : self.shared->profile(stream)) {
              rows.emplace_back(t.label, t.dispatches, t.seconds);
            }
            return rows;
          },
          nb::kw_only(), "stream"_a = nb::none(),
          "(label, dispatches, seconds) of the last step's kernels on a GPU.")
      .def_prop_ro("whole", [](const State& self) { return self.shared->whole(); })
      .def_prop_ro("copied_bytes", [](const State& self) { return self.shared->copied_bytes(); })
      .def_prop_ro("grown_bytes", [](const State& self) { return self.shared->grown_bytes(); });
  m.def(
      "decode_step",
      [](const State& state, const mx::array& token, const std::optional<mx::array>& ticket,
         int position, bool with_logits, mx::StreamOrDevice stream) {
        return decode_step(state.shared, token, ticket, position, with_logits, stream);
      },
      "state"_a, "token"_a, "ticket"_a.none(), "position"_a, "with_logits"_a, nb::kw_only(),
      "stream"_a = nb::none());

  nb::class_<Watch>(m, "Watch", nb::type_slots(watch_slots))
      .def(nb::init<>())
      .def("root_entry", &Watch::root_entry, "root"_a, "key"_a)
      .def("dict_entry", &Watch::dict_entry, "owner"_a, "key"_a)
      .def("list_entries", &Watch::list_entries, "owner"_a)
      .def("changed", &Watch::changed, "root"_a);
}

}  // namespace
}  // namespace lily

NB_MODULE(_ext, m) {
  // mlx.core registers array, Stream and Dtype, which the signatures below name.
  nb::module_::import_("mlx.core");
  m.attr("built_for_mlx") = std::to_string(MLX_VERSION_MAJOR) + "." +
                            std::to_string(MLX_VERSION_MINOR) + "." +
                            std::to_string(MLX_VERSION_PATCH);
  m.def("loaded_mlx", [] { return std::string(mx::version()); });
  m.def("echo", [](const mx::array& x) { return x; }, "x"_a);
  m.def("is_tracer", [](const mx::array& x) { return x.is_tracer(); }, "x"_a);
  m.def("num_threads", &lily::num_threads);
  m.def("instruction_set", [] { return std::string(lily::micro().name); });
  lily::bind_layers(m);
  lily::bind_decode(m);
  lily::bind_program(m);
  lily::bind_host(m);
  lily::bind_cuda(m);
  lily::bind_programs(m);
}
