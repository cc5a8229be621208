#include "primitives/decode_host.h"

#include <map>
#include <mutex>

#include "run.h"

namespace lily {

struct HostStep {
  std::shared_ptr<MetalHost> host;
  std::shared_ptr<const StepProgram> program;
  std::shared_ptr<Bindings> weights;
};

// A plan's steps on one Metal host.
struct HostSteps {
  std::mutex mutex;
  std::shared_ptr<MetalHost> host;
  std::map<std::pair<std::vector<int>, bool>, std::shared_ptr<const HostStep>> steps;
};

namespace {

std::string refusal(const DecodePlan& plan, Target target) {
  const Choice& choice = programs_of(plan, target)->choice;  // the plan keeps it
  if (!choice) {
    return choice.reason;
  }
  for (const mx::array* a : plan.arrays()) {
    if (std::string layout = layout_refusal(*a); !layout.empty()) {
      return layout;
    }
  }
  return "";
}

std::shared_ptr<HostSteps> steps_of(const DecodePlan& plan) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (!plan.host) {
    plan.host = std::make_shared<HostSteps>();
  }
  return plan.host;
}

}  // namespace

std::shared_ptr<const HostStep> host_step(const DecodePlan& plan,
                                          const std::vector<int>& capacities, bool with_logits) {
  std::shared_ptr<MetalHost> host = current_metal_host();
  if (!host) {
    return nullptr;
  }
  const Target target = host->options.target;
  if (const std::string reason = refusal(plan, target); !reason.empty()) {
    count_run("decode_step", "reference", reason);
    return nullptr;
  }
  std::shared_ptr<HostSteps> steps = steps_of(plan);
  std::lock_guard lock(steps->mutex);
  if (steps->host != host) {  // other options
    steps->steps.clear();
    steps->host = host;
  }
  std::shared_ptr<const HostStep>& found = steps->steps[{capacities, with_logits}];
  if (!found) {
    StepOptions options = host->options.step;
    options.logits = with_logits;
    HostStep step{host, programs_of(plan, target)->at(capacities, options), nullptr};
    host->prepare(step.program->program);
    step.weights = std::make_shared<Bindings>(step.program->program);
    bind_weights(*step.program, plan,
                 [&](SlotId slot, const mx::array& a) { bind_on_host(*step.weights, slot, a); });
    for (const Builder::Table& t : step.program->tables) {
      bind_on_host(*step.weights, t);
    }
    found = std::make_shared<const HostStep>(std::move(step));
  }
  return found;
}

void run_on_host(mx::Stream s, const std::shared_ptr<const HostStep>& step,
                 std::shared_ptr<const Successors> caches,
                 const std::vector<Successors::Used>& used, int position, const mx::array& token,
                 mx::array& next, mx::array* logits) {
  const StepProgram& p = *step->program;
  Bindings b = *step->weights;
  bind_caches(p, used, [&](SlotId slot, const mx::array& a) { bind_on_host(b, slot, a); });
  bind_on_host(b, p.token, token);
  bind_on_host(b, p.next, next);
  if (logits != nullptr) {
    bind_on_host(b, p.logits, *logits);
  }
  auto at = std::make_shared<int32_t>(position);
  b.bind(p.position, {reinterpret_cast<uint64_t>(at.get()), at.get(), sizeof(int32_t)});
  using Owners = std::tuple<std::shared_ptr<const HostStep>, std::shared_ptr<const Successors>,
                            std::shared_ptr<int32_t>>;
  MetalHost::queue(s, step->host, std::make_shared<Owners>(step, std::move(caches), at), p.program,
                   std::move(b));
  count_run("decode_step", "decode_step", "");
}

}  // namespace lily
