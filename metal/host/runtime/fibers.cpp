#include <cstddef>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

#include "runtime.h"

namespace msl {

thread_local Worker* worker = nullptr;

namespace {

constexpr size_t kStackBytes = 256 << 10;

extern "C" void msl_switch(void** save, void* to);
extern "C" void msl_enter();
#if defined(__x86_64__)
constexpr size_t kSavedWords = 6;
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size msl_switch, .-msl_switch
)");
#elif defined(__aarch64__)
constexpr size_t kSavedWords = 20;
asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch,%function
msl_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size msl_switch, .-msl_switch
)");
#else
#error "the Metal host's fibers know x86-64 and arm64"
#endif

// Stacks are kept between launches; each has a guard page below it.
class Stacks {
 public:
  char* take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) {
      constexpr size_t batch = 64;
      auto* memory = static_cast<char*>(mmap(nullptr, kStackBytes * batch, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
      if (memory == MAP_FAILED) {
        std::fprintf(stderr, "metal host: no memory for the stacks of the threads\n");
        std::abort();
      }
      for (size_t i = 0; i < batch; ++i) {
        mprotect(memory + kStackBytes * i, sysconf(_SC_PAGESIZE), PROT_NONE);
        free_.push_back(memory + kStackBytes * i);
      }
    }
    char* stack = free_.back();
    free_.pop_back();
    return stack;
  }
  void give(char* stack) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(stack);
  }

 private:
  std::mutex mutex_;
  std::vector<char*> free_;
};
Stacks stacks;

Fault fault(FaultKind kind, const Site* site, const Fiber* fiber) {
  Fault f{};
  f.kind = kind;
  f.site = site;
  f.thread = f.other = identify(fiber);
  f.buffer = -1;
  return f;
}

void makeReady(Worker& w, Fiber* fiber) {
  w.ready.push_back(fiber);
  if (w.launch->shuffled)
    std::swap(w.ready.back(), w.ready[w.random() % w.ready.size()]);
}

// Instances of one template meet at one barrier; its inlined copies have different sites.
bool samePlace(const Site* a, const Site* b) {
  return a == b || (a->line == b->line && a->column == b->column && a->file == b->file);
}

uint32_t fullMask(const Simdgroup& s) {
  return s.size == 32 ? 0xffffffffu : (1u << s.size) - 1;
}

// Ends the operation of the lanes in `mask`, which all wait at `site`.
void complete(Worker& w, Simdgroup& s, uint32_t mask, const Site* site, Fiber* running) {
  std::memcpy(s.exchanged.value, s.pending, sizeof s.pending);
  s.exchanged.mask = mask;
  s.exchanged.done = 0;
  ++w.exchanges;
  if (mask != fullMask(s)) {
    ++w.partial;
    if (w.checker) {
      Fault f = fault(kDivergentSimd, site, s.fibers[__builtin_ctz(mask)]);
      f.lanes = mask;
      w.checker->report(f);
    }
  }
  for (uint32_t lane = s.size; lane-- > 0;)
    if (mask >> lane & 1) {
      s.fibers[lane]->waiting = nullptr;
      if (s.fibers[lane] != running)
        makeReady(w, s.fibers[lane]);
    }
  s.arrived -= __builtin_popcount(mask);
  s.arrived_mask &= ~mask;
  s.mixed = false;
  s.site = nullptr;
  for (uint32_t lane = 0; lane < s.size; ++lane)
    if (s.arrived_mask >> lane & 1) {
      if (!s.site)
        s.site = s.fibers[lane]->waiting;
      if (s.site != s.fibers[lane]->waiting)
        s.mixed = true;
    }
}

void releaseBarrier(Worker& w) {
  ++w.barriers;
  if (w.checker) {
    if (w.barrier_other) {
      Fault f = fault(kDivergentBarrier, w.barrier_other, w.barrier_other_fiber);
      f.other = identify(w.barrier_fiber);
      f.other_site = w.barrier_site;
      f.lanes = w.waiting;
      w.checker->report(f);
    } else if (w.live != w.size) {
      Fault f = fault(kDivergentBarrier, w.barrier_site, w.barrier_fiber);
      f.lanes = w.waiting;
      w.checker->report(f);
    }
    w.checker->threadgroupBarrier(w.barrier_flags);
  }
  w.waiting = 0;
  w.barrier_site = w.barrier_other = nullptr;
  std::reverse(w.at_barrier.begin(), w.at_barrier.end());
  for (auto* fiber : w.at_barrier)
    makeReady(w, fiber);
  w.at_barrier.clear();
}

// Nothing can run: lanes of one simdgroup wait at different places. The earliest place goes on with
// the lanes that it has, as a GPU would.
void resolveDivergence(Worker& w) {
  for (auto& s : w.simdgroups) {
    if (!s.arrived)
      continue;
    const Site* site = nullptr;
    uint32_t mask = 0;
    for (uint32_t lane = 0; lane < s.size; ++lane) {
      if (!(s.arrived_mask >> lane & 1))
        continue;
      const Site* at = s.fibers[lane]->waiting;
      if (!site || at->order < site->order) {
        site = at;
        mask = 0;
      }
      if (at == site)
        mask |= 1u << lane;
    }
    complete(w, s, mask, site, nullptr);
    return;
  }
  std::fprintf(stderr, "metal host: the scheduler is stuck; this is a fault of the host\n");
  std::abort();
}

// Leaves the current fiber for the next one that can run.
void yield(Worker& w, void** save) {
  while (w.ready.empty() && w.live)
    resolveDivergence(w);
  if (w.ready.empty()) {
    msl_switch(save, w.scheduler);
    return;
  }
  Fiber* next = w.ready.back();
  w.ready.pop_back();
  if (save == &w.current->stack_pointer && next == w.current)
    return;
  w.current = next;
  msl_switch(save, next->stack_pointer);
}

extern "C" void msl_fiber() {
  Worker& w = *worker;
  Fiber* fiber = w.current;
  w.launch->stub(&fiber->context, w.launch->arguments);
  Simdgroup& s = *fiber->simdgroup;
  --s.active;
  --w.live;
  if (s.arrived && s.arrived == s.active && !s.mixed)
    complete(w, s, s.arrived_mask, s.site, nullptr);
  if (w.live && w.waiting == w.live)
    releaseBarrier(w);
  void* unused;
  yield(w, &unused);
  __builtin_unreachable();
}

void prepareStack(Fiber& fiber) {
  auto* top = reinterpret_cast<uint64_t*>(fiber.stack + kStackBytes);
#if defined(__x86_64__)
  *--top = 0;  // as if called: the stack is 16-byte aligned before the return address
  *--top = reinterpret_cast<uint64_t>(&msl_fiber);
  for (size_t i = 0; i < kSavedWords; ++i)
    *--top = 0;
#else
  top -= kSavedWords;
  std::memset(top, 0, kSavedWords * 8);
  top[11] = reinterpret_cast<uint64_t>(&msl_fiber);  // x30
#endif
  fiber.stack_pointer = top;
}

void runThreadgroup(Worker& w, uint64_t index) {
  Launch& launch = *w.launch;
  const uint32_t* shape = launch.threadgroup;
  uint32_t size = shape[0] * shape[1] * shape[2];
  uint32_t simdgroups = (size + kSimdWidth - 1) / kSimdWidth;
  uint32_t position[3] = {static_cast<uint32_t>(index % launch.grid[0]),
                          static_cast<uint32_t>(index / launch.grid[0] % launch.grid[1]),
                          static_cast<uint32_t>(index / launch.grid[0] / launch.grid[1])};
  w.size = w.live = size;
  w.waiting = 0;
  w.barrier_site = w.barrier_other = nullptr;
  w.at_barrier.clear();
  w.ready.clear();
  for (uint32_t g = 0; g < simdgroups; ++g) {
    Simdgroup& s = w.simdgroups[g];
    s.size = s.active = std::min(kSimdWidth, size - g * kSimdWidth);
    s.arrived = s.arrived_mask = 0;
    s.mixed = false;
    s.site = nullptr;
    s.epoch = s.device_epoch = 0;
    std::memset(s.pending, 0, sizeof s.pending);
  }
  for (uint32_t i = size; i-- > 0;) {
    Fiber& fiber = w.fibers[i];
    Simdgroup& s = w.simdgroups[i / kSimdWidth];
    fiber.simdgroup = &s;
    fiber.waiting = nullptr;
    s.fibers[i % kSimdWidth] = &fiber;
    Context& c = fiber.context;
    uint32_t at[3] = {i % shape[0], i / shape[0] % shape[1], i / shape[0] / shape[1]};
    for (int k = 0; k < 3; ++k) {
      c.threadgroup_position_in_grid[k] = position[k];
      c.thread_position_in_threadgroup[k] = at[k];
      c.thread_position_in_grid[k] = position[k] * shape[k] + at[k];
      c.threads_per_threadgroup[k] = shape[k];
      c.threads_per_grid[k] = launch.grid[k] * shape[k];
      c.threadgroups_per_grid[k] = launch.grid[k];
    }
    c.thread_index_in_threadgroup = i;
    c.thread_index_in_simdgroup = i % kSimdWidth;
    c.simdgroup_index_in_threadgroup = i / kSimdWidth;
    c.simdgroups_per_threadgroup = simdgroups;
    prepareStack(fiber);
    makeReady(w, &fiber);
  }
  if (w.checker)
    w.checker->beginThreadgroup(index);
  w.current = nullptr;
  Fiber* first = w.ready.back();
  w.ready.pop_back();
  w.current = first;
  msl_switch(&w.scheduler, first->stack_pointer);
  w.current = nullptr;
  if (w.checker)
    w.checker->endThreadgroup();
}

void setThreadgroupMemory(Worker& w) {
  constexpr size_t gap = 256;  // between the arguments, so that an overrun of one is seen
  size_t total = gap;
  for (uint32_t bytes : w.launch->threadgroup_bytes)
    total += (bytes + gap - 1) / gap * gap + gap;
  w.memory.assign(total + gap, 0);
  auto base = reinterpret_cast<uintptr_t>(w.memory.data());
  char* at = w.memory.data() + (gap - base % gap) % gap + gap;
  for (uint32_t i = 0; i < kMaxThreadgroupArguments; ++i) {
    uint32_t bytes = w.launch->threadgroup_bytes[i];
    for (auto& fiber : w.fibers)
      fiber.context.threadgroup_memory[i] = bytes ? at : nullptr;
    if (w.checker && bytes)
      w.checker->addThreadgroupArgument(i, at, bytes);
    at += (bytes + gap - 1) / gap * gap + gap;
  }
}

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE};
struct sigaction previous[std::size(kSignals)];

void onSignal(int signal, siginfo_t* info, void* context) {
  if (worker && worker->current) {
    ThreadId id = identify(worker->current);
    char text[256];
    char what[96] = "divided an integer by zero";
    if (signal != SIGFPE)
      std::snprintf(what, sizeof what, "touched memory at %p that no buffer holds, or misaligned",
                    info->si_addr);
    int n = std::snprintf(
        text, sizeof text, "metal host: threadgroup (%u,%u,%u) thread %u %s; %s\n",
        id.threadgroup[0], id.threadgroup[1], id.threadgroup[2], id.thread, what,
        worker->checker ? "the checked host does not see this access, or the stack is too small"
                        : "host=\"checked\" names the line");
    (void)!write(2, text, n);
  }
  const struct sigaction& old =
      previous[std::find(std::begin(kSignals), std::end(kSignals), signal) - kSignals];
  if (old.sa_flags & SA_SIGINFO && old.sa_sigaction)
    return old.sa_sigaction(signal, info, context);
  if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN)
    return old.sa_handler(signal);
  ::signal(signal, SIG_DFL);
}

}  // namespace

ThreadId identify(const Fiber* fiber) {
  const Context& c = fiber->context;
  return {{c.threadgroup_position_in_grid[0], c.threadgroup_position_in_grid[1],
           c.threadgroup_position_in_grid[2]},
          c.thread_index_in_threadgroup,
          c.simdgroup_index_in_threadgroup,
          c.thread_index_in_simdgroup};
}

extern "C" {

uint32_t __msl_lane() {
  return worker->current->context.thread_index_in_simdgroup;
}

Exchanged* __msl_exchange(uint64_t value, const Site* site) {
  Worker& w = *worker;
  Fiber* fiber = w.current;
  Simdgroup& s = *fiber->simdgroup;
  uint32_t lane = fiber->context.thread_index_in_simdgroup;
  s.pending[lane] = value;
  fiber->waiting = site;
  s.arrived_mask |= 1u << lane;
  if (!s.arrived++)
    s.site = site;
  if (s.site != site)
    s.mixed = true;
  if (s.arrived == s.active && !s.mixed) {
    bool stay = !w.launch->shuffled;
    complete(w, s, s.arrived_mask, site, stay ? fiber : nullptr);
    if (stay)
      return &s.exchanged;
  }
  yield(w, &fiber->stack_pointer);
  return &s.exchanged;
}

void __msl_simdgroup_barrier(uint32_t flags, const Site* site) {
  Simdgroup& s = *worker->current->simdgroup;
  Exchanged* x = __msl_exchange(0, site);
  if (worker->checker && !x->done) {
    x->done = 1;
    worker->checker->simdgroupBarrier(s, flags);
  }
}

void __msl_threadgroup_barrier(uint32_t flags, const Site* site) {
  Worker& w = *worker;
  Fiber* fiber = w.current;
  if (!w.waiting++) {
    w.barrier_site = site;
    w.barrier_fiber = fiber;
    w.barrier_flags = flags;
  } else if (!w.barrier_other && !samePlace(site, w.barrier_site)) {
    w.barrier_other = site;
    w.barrier_other_fiber = fiber;
  }
  w.barrier_flags &= flags;
  w.at_barrier.push_back(fiber);
  if (w.waiting == w.live)
    releaseBarrier(w);
  yield(w, &fiber->stack_pointer);
}

__attribute__((visibility("default"))) void msl_launch(Launch* launch) {
  static std::mutex one_launch;
  std::lock_guard<std::mutex> lock(one_launch);
  uint64_t total = static_cast<uint64_t>(launch->grid[0]) * launch->grid[1] * launch->grid[2];
  uint32_t size = launch->threadgroup[0] * launch->threadgroup[1] * launch->threadgroup[2];
  if (!total || !size)
    return;
  struct sigaction action = {};
  action.sa_sigaction = onSignal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (size_t i = 0; i < std::size(kSignals); ++i)
    sigaction(kSignals[i], &action, &previous[i]);

  std::vector<uint64_t> order;  // of the threadgroups, when shuffled
  if (launch->shuffled) {
    order.resize(total);
    for (uint64_t i = 0; i < total; ++i)
      order[i] = i;
    std::shuffle(order.begin(), order.end(), std::mt19937_64(launch->seed));
  }
  std::atomic<uint64_t> next{0};
  std::mutex sum;
  auto work = [&] {
    Worker w;
    worker = &w;
    std::vector<char> alternate(64 << 10);
    stack_t stack = {}, old_stack = {};
    stack.ss_sp = alternate.data();
    stack.ss_size = alternate.size();
    sigaltstack(&stack, &old_stack);
    w.launch = launch;
    w.random.seed(static_cast<uint32_t>(launch->seed) * 2654435761u + 1);
    w.fibers.resize(size);
    w.simdgroups.resize((size + kSimdWidth - 1) / kSimdWidth);
    w.ready.reserve(size);
    w.at_barrier.reserve(size);
    for (auto& fiber : w.fibers)
      fiber.stack = stacks.take();
    std::unique_ptr<Checker> checker;
    if (launch->checked)
      checker = std::make_unique<Checker>(*launch, w);
    w.checker = checker.get();
    setThreadgroupMemory(w);
    for (uint64_t i; (i = next++) < total;)
      runThreadgroup(w, order.empty() ? i : order[i]);
    for (auto& fiber : w.fibers)
      stacks.give(fiber.stack);
    sigaltstack(&old_stack, nullptr);
    worker = nullptr;
    std::lock_guard<std::mutex> guard(sum);
    launch->barriers += w.barriers;
    launch->exchanges += w.exchanges;
    launch->partial_exchanges += w.partial;
  };
  std::vector<std::thread> threads;
  uint32_t workers =
      launch->checked ? 1 : static_cast<uint32_t>(std::min<uint64_t>(launch->workers, total));
  for (uint32_t i = 1; i < workers; ++i)
    threads.emplace_back(work);
  work();
  for (auto& thread : threads)
    thread.join();
  for (size_t i = 0; i < std::size(kSignals); ++i)
    sigaction(kSignals[i], &previous[i], nullptr);
}


// For programs that embed the runtime and declare its structs themselves: what they must find.
extern const uint64_t msl_abi[];
const uint64_t msl_abi[] = {
    sizeof(msl::Site), sizeof(msl::Fault), offsetof(msl::Fault, variable), sizeof(msl::Buffer),
    sizeof(msl::Traffic), sizeof(msl::Variable), sizeof(msl::Launch),
    offsetof(msl::Launch, workers), offsetof(msl::Launch, buffers), offsetof(msl::Launch, faults),
    offsetof(msl::Launch, barriers), 0};

// A fault's kind in words.
const char* msl_fault_words(uint32_t kind) {
  constexpr const char* words[msl::kFaultKinds] = {
      "race on threadgroup memory",
      "race on device memory",
      "race between threadgroups",
      "access out of bounds",
      "barrier in divergent flow",
      "simdgroup operation in divergent flow",
      "read of threadgroup memory that nothing has written",
      "read of device memory that nothing has written",
      "write to an argument that the dispatch declares read",
      "read of an argument that the dispatch declares written",
      "misaligned vector access",
      "integer division by zero, or of the least integer by -1",
      "use of a thread's value that nothing has written"};
  return kind < msl::kFaultKinds ? words[kind] : "unknown fault";
}

}  // extern "C"
}  // namespace msl
