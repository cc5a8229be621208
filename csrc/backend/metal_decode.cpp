// The decode step on an Apple GPU: the Program's dispatches on MLX's command encoder, its slots
// bound anew each step. MLX sees one primitive a token; commands of two steps may be in flight.
#include <algorithm>
#include <stdexcept>

#include "backend/metal.h"
#include "backend/planned_decode.h"

namespace lily {
namespace {

class MetalDecode : public PlannedDecode {
 public:
  explicit MetalDecode(const DecodePlan& plan) : PlannedDecode(plan, "Metal") {}

  void step(std::vector<CachePair>& layers, int position, const mx::array& token,
            std::vector<mx::array>& out, mx::Stream s, int64_t& copied, int64_t& grown,
            std::shared_ptr<void> owner) override {
    auto& encoder = mx::metal::get_command_encoder(s);
    prepare(layers, position, s, copied, grown);
    if (!program_ || capacities_ != capacities(layers)) {
      build(layers);
    }
    Bindings bindings = *weights_;
    for (size_t i = 0; i < layers.size(); ++i) {
      const DecodeProgram::Caches& slots = program_->caches[i];
      auto& [first, second] = layers[i];
      bind_metal(bindings, slots.first, *first);
      bind_metal(bindings, slots.second, *second);
      if (plan_.layers[i].delta) {
        // The old conv state is only read, so it does not matter who else holds it.
        mx::array next = fresh(first->shape(), first->dtype());
        bind_metal(bindings, slots.first_next, next);
        encoder.add_temporary(*first);
        first = next;
      }
    }
    const int32_t at = position;
    mx::array position_bytes = metal_bytes(sizeof at, &at);
    mx::array arena = metal_bytes(program_->program.arena_bytes());
    bind_metal(bindings, program_->position, position_bytes);
    bind_metal(bindings, program_->token, token);
    bind_metal(bindings, program_->next, out[0]);
    if (out.size() > 1) {
      bind_metal(bindings, program_->logits, out[1]);
    } else {
      mx::array logits = fresh({plan_.head.rows()}, mx::float32);
      bind_metal(bindings, program_->logits, logits);
      encoder.add_temporary(std::move(logits));
    }
    bindings.bind_arena({reinterpret_cast<uint64_t>(arena.buffer().ptr()), arena.buffer().ptr(),
                         arena.buffer_size()});
    MetalEncoder(s).encode(program_->program, bindings);
    encoder.add_temporary(std::move(position_bytes));
    encoder.add_temporary(std::move(arena));
    for (const mx::array& table : tables_) {
      encoder.add_temporary(table);
    }
    keep_until_done(s, std::move(owner));
  }

  std::vector<Timing> profile(mx::Stream) override {
    throw std::runtime_error(
        "profile: Metal has no timer of single dispatches; use Xcode's capture");
  }

 private:
  // dst [rows, ...] = rows of src (none: zeros), padded with zeros.
  static void copy(mx::Stream s, const std::optional<mx::array>& src, const mx::array& dst,
                   int rows) {
    const auto units = [rows](const mx::array& a) {
      return static_cast<uint32_t>(a.nbytes() / rows / 16);
    };
    Program program("copy a cache");
    const SlotId from = program.slot("src", SlotKind::input, (src ? *src : dst).nbytes());
    const SlotId to = program.slot("dst", SlotKind::output, dst.nbytes());
    Dispatch d(kernels().at("copy_rows"));
    d.read("src", from).write("dst", to);
    d.value("src_units", src ? units(*src) : uint32_t{0}).value("dst_units", units(dst));
    d.grid((units(dst) + 255) / 256, static_cast<uint32_t>(rows)).threads(256).label("copy");
    if (!src) {
      d.in_place("src", "dst");
    }
    program.add(std::move(d));
    program.finish();
    Bindings bindings(program);
    bind_metal(bindings, from, src ? *src : dst);
    bind_metal(bindings, to, dst);
    MetalEncoder(s).encode(program, bindings);
  }

  // Every cache present, large enough, and ours alone where it is written.
  void prepare(std::vector<CachePair>& layers, int position, mx::Stream s, int64_t& copied,
               int64_t& grown) {
    auto& encoder = mx::metal::get_command_encoder(s);
    auto replace = [&](std::optional<mx::array>& a, mx::Shape shape, mx::Dtype dtype, int rows) {
      mx::array next = fresh(std::move(shape), dtype);
      copy(s, a, next, rows);
      if (a) {
        encoder.add_temporary(*a);
      }
      a = next;
    };
    for (size_t i = 0; i < layers.size(); ++i) {
      auto& [first, second] = layers[i];
      if (plan_.layers[i].delta) {
        const DeltaLayer& d = *plan_.layers[i].delta;
        if (!first) {
          replace(first, {1, d.conv.shape(1) - 1, d.qkv.rows()}, plan_.dtype, 1);
        }
        if (!second || !second->is_donatable()) {
          copied += second ? static_cast<int64_t>(second->nbytes()) : 0;
          replace(second, {1, d.value_heads, d.value_dim, d.key_dim}, mx::float32, 1);
        }
        continue;
      }
      const AttentionLayer& l = *plan_.layers[i].attention;
      const int capacity = first ? first->shape(2) : 0;
      for (auto* cache : {&first, &second}) {
        if (position >= capacity) {
          grown += *cache ? static_cast<int64_t>((*cache)->nbytes()) : 0;
          replace(*cache, {1, l.kv_heads, grown_capacity(capacity, position + 1), l.head_dim},
                  plan_.dtype, l.kv_heads);
        } else if (!(*cache)->is_donatable()) {
          copied += static_cast<int64_t>((*cache)->nbytes());
          replace(*cache, (*cache)->shape(), plan_.dtype, l.kv_heads);
        }
      }
    }
  }

  void build(const std::vector<CachePair>& layers) {
    capacities_ = capacities(layers);
    DecodeOptions options;
    options.logits = true;
    weights_.reset();
    program_ = programs_of(plan_)->at(capacities_, options);
    weights_.emplace(program_->program);
    const auto arrays = plan_.arrays();
    for (size_t i = 0; i < arrays.size(); ++i) {
      bind_metal(*weights_, program_->weights[i], *arrays[i]);
    }
    tables_.clear();
    for (const auto& table : program_->tables) {
      tables_.push_back(metal_bytes(table.data.size(), table.data.data()));
      bind_metal(*weights_, table.slot, tables_.back());
    }
  }

  std::optional<Bindings> weights_;  // after program_, which it points to
  std::vector<mx::array> tables_;
};

}  // namespace

std::unique_ptr<GpuDecode> make_gpu_decode(const DecodePlan& plan) {
  return std::make_unique<MetalDecode>(plan);
}

}  // namespace lily
