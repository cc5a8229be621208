// The decode step on an Apple GPU: the Program's dispatches on MLX's command encoder, its slots
// bound anew each step. MLX sees one primitive a token; commands of two steps may be in flight.
#include <algorithm>
#include <stdexcept>

#include "backend/gpu.h"
#include "backend/metal.h"
#include "backend/planned_decode.h"
#include "run.h"

namespace lily {
namespace {

class MetalDecode : public PlannedDecode {
 public:
  explicit MetalDecode(const DecodePlan& plan) : PlannedDecode(plan, "Metal") {}

  void step(const std::vector<CachePair>& layers, const std::shared_ptr<Successors>& next,
            int position, const mx::array& token, std::vector<mx::array>& out,
            mx::Stream s) override {
    // First, so that copies which are queued have their memory also when the step throws.
    keep_until_done(s, next);
    next->make(
        layers, position, [](const mx::array& a) { return a.is_donatable(); },
        [&](mx::Shape shape, mx::Dtype dtype, const std::optional<mx::array>& source, int rows) {
          mx::array a = fresh(std::move(shape), dtype);
          copy(s, source, a, rows);
          return a;
        },
        [&](size_t, mx::Shape shape) { return fresh(std::move(shape), plan_.dtype); });
    const std::vector<Successors::Used> used = next->used(layers);
    if (capacities_ != capacities(used) || options_ != gpu_step_options()) {
      build(capacities(used));
    }
    Bindings bindings = *weights_;
    bind_caches(*program_, used,
                [&](SlotId slot, const mx::array& a) { bind_metal(bindings, slot, a); });
    const int32_t at = position;
    mx::array position_bytes = metal_bytes(sizeof at, &at);
    mx::array arena = metal_bytes(program_->program.arena_bytes());
    bind_metal(bindings, program_->position, position_bytes);
    bind_metal(bindings, program_->token, token);
    bind_metal(bindings, program_->next, out[0]);
    auto& encoder = mx::metal::get_command_encoder(s);
    if (out.size() > 1) {
      bind_metal(bindings, program_->logits, out[1]);
    } else {
      mx::array logits = fresh({plan_.model.head.rows()}, mx::float32);
      bind_metal(bindings, program_->logits, logits);
      encoder.add_temporary(std::move(logits));
    }
    bindings.bind_arena({reinterpret_cast<uint64_t>(arena.buffer().ptr()), arena.buffer().ptr(),
                         arena.buffer_size()});
    encoder.add_temporary(std::move(position_bytes));
    encoder.add_temporary(std::move(arena));
    for (const mx::array& table : tables_) {
      encoder.add_temporary(table);
    }
    // It compiles before it queues: what throws has written to no cache.
    MetalEncoder(s).encode(program_->program, bindings);
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

  void build(std::vector<int> capacities) {
    capacities_.clear();
    options_ = gpu_step_options();
    StepOptions options = *options_;
    options.logits = true;
    weights_.reset();
    program_ = programs_->at(capacities, options);
    weights_.emplace(program_->program);
    bind_weights(*program_, plan_,
                 [&](SlotId slot, const mx::array& a) { bind_metal(*weights_, slot, a); });
    tables_.clear();
    for (const auto& table : program_->tables) {
      tables_.push_back(metal_bytes(table.data.size(), table.data.data()));
      bind_metal(*weights_, table.slot, tables_.back());
    }
    capacities_ = std::move(capacities);
  }

  std::shared_ptr<const StepOptions> options_;  // the ones set when program_ was built
  std::optional<Bindings> weights_;             // after program_, which it points to
  std::vector<mx::array> tables_;
};

class MetalGpu : public Gpu {
 public:
  Target target() const override {
    return mx::metal::is_nax_available() ? Target::metal_nax : Target::metal;
  }
  void allocate(mx::array& out) const override {
    lily::allocate(out);
  }
  size_t start(const mx::array& a) const override {
    return reinterpret_cast<uintptr_t>(a.data<char>());
  }
  size_t alignment() const override {
    return 8;
  }
  void run(mx::Stream stream, const std::shared_ptr<const LayerProgram>& layer,
           const std::vector<mx::array>& in, const std::vector<mx::array>& out) const override {
    run_on_metal(stream, layer, in, out);
  }
  std::unique_ptr<GpuDecode> make_decode(const DecodePlan& plan) const override {
    return std::make_unique<MetalDecode>(plan);
  }
};

}  // namespace

const Gpu* gpu() {
  static const MetalGpu metal;
  return &metal;
}

}  // namespace lily
