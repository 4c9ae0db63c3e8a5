// The scheduler for cuda_host.h: the threads of a block are fibers scheduled at random; blocks run one after the other.
//
// A fiber is a stack and a saved stack pointer; switching is a dozen instructions on x86-64 and swapcontext elsewhere.
// AddressSanitizer is notified of every switch. A failed launch abandons its fibers, because kernels own no resources.
#include "common.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define ASAN 1
#else
#define ASAN 0
#endif

namespace hal_sim {

constexpr u32 kMaxThreads = 256, kMaxGridY = 65535, kMaxShared = 48 * 1024;
constexpr std::size_t kStack = ASAN ? 256 * 1024 : 64 * 1024;

Index thread, block, block_size, grid_size;
alignas(16) unsigned char dynamic_shared[kMaxShared];

namespace {

enum class State { ready, barrier, warp, done };

struct Fiber {
    unsigned char *stack = nullptr;
    void *context = nullptr;
    void *fake_stack = nullptr;
    State state = State::done;
    const char *file = "";
    int line = 0;
    u32 mask = 0, value = 0, result = 0;
    int lane = 0;
    Vote kind = Vote::any;
};

std::vector<Fiber> fibers;
std::vector<u64> ready;  // a heap: the smallest (rank << 32 | thread) runs next
std::vector<u32> ranks;
u32 current = 0;
const std::function<void()> *body = nullptr;
std::string error;
u64 random_state = 0x9E3779B97F4A7C15u;

u32 random_below(u32 n) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (u32)((random_state >> 32) * n >> 32);
}

// With fair random scheduling no thread gets far ahead of the others, which would hide a missing barrier between two
// uses of the same shared memory. So in most blocks some warps or threads have priority and run as far as they can
// before the others.
enum class Turns { random, favourite_warps, favourite_threads };
Turns turns = Turns::random;

void choose_turns() {
    turns = static_cast<Turns>(random_below(3));
    ranks.resize(block_size.x);
    for (u32 &rank : ranks) rank = random_below(1u << 30);
}

void make_ready(u32 id) {
    const u32 rank = turns == Turns::random            ? random_below(1u << 30)
                     : turns == Turns::favourite_warps ? ranks[id / 32 * 32] / 1024 * 1024 + random_below(1024)
                                                       : ranks[id];
    ready.push_back((u64)rank << 32 | id);
    std::push_heap(ready.begin(), ready.end(), std::greater<>());
}

u32 take_ready() {
    std::pop_heap(ready.begin(), ready.end(), std::greater<>());
    const u32 id = (u32)ready.back();
    ready.pop_back();
    return id;
}

void run_fiber();

#if defined(__x86_64__)
void *scheduler_context = nullptr;
// Saves the callee-saved registers on the stack, *save = stack pointer, continues where `next` was saved.
extern "C" void hal_sim_switch(void **save, void *next);
asm(R"(
.text
.type hal_sim_switch, @function
hal_sim_switch:
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
.size hal_sim_switch, .-hal_sim_switch
)");
void prepare(Fiber &f) {
    // The ABI demands an address 8 below a multiple of 16 at a function's entry.
    void **top = reinterpret_cast<void **>(f.stack + kStack) - 1;
    *top = nullptr;
    *--top = reinterpret_cast<void *>(&run_fiber);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    f.context = top;
}
void enter(Fiber &f) { hal_sim_switch(&scheduler_context, f.context); }
void leave(Fiber &f) { hal_sim_switch(&f.context, scheduler_context); }
#else
}  // namespace
}  // namespace hal_sim
#include <ucontext.h>
namespace hal_sim {
namespace {
ucontext_t scheduler_context;
void prepare(Fiber &f) {
    auto *context = static_cast<ucontext_t *>(f.context ? f.context : new ucontext_t);
    getcontext(context);
    context->uc_stack.ss_sp = f.stack;
    context->uc_stack.ss_size = kStack;
    context->uc_link = nullptr;
    makecontext(context, run_fiber, 0);
    f.context = context;
}
void enter(Fiber &f) { swapcontext(&scheduler_context, static_cast<ucontext_t *>(f.context)); }
void leave(Fiber &f) { swapcontext(static_cast<ucontext_t *>(f.context), &scheduler_context); }
#endif

#if ASAN
const void *scheduler_stack = nullptr;
std::size_t scheduler_size = 0;
#endif

void to_fiber(u32 id) {
    Fiber &f = fibers[id];
    current = id;
    thread.x = id;
#if ASAN
    void *fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, f.stack, kStack);
#endif
    enter(f);
#if ASAN
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void to_scheduler() {
    Fiber &f = fibers[current];
#if ASAN
    __sanitizer_start_switch_fiber(&f.fake_stack, scheduler_stack, scheduler_size);
#endif
    leave(f);
#if ASAN
    __sanitizer_finish_switch_fiber(f.fake_stack, &scheduler_stack, &scheduler_size);
#endif
}

void run_fiber() {
#if ASAN
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size);
#endif
    (*body)();
    fibers[current].state = State::done;
    to_scheduler();
    std::abort();  // a finished thread is never resumed
}

std::string place(const Fiber &f) {
    const char *name = std::strrchr(f.file, '/');
    return std::string(name ? name + 1 : f.file) + ":" + std::to_string(f.line);
}

std::string describe(u32 id) {
    const Fiber &f = fibers[id];
    const std::string who = "thread " + std::to_string(id);
    if (f.state == State::done) return who + " has returned";
    return who + (f.state == State::barrier ? " waits at the barrier in " : " waits in the warp operation at ") + place(f);
}

// Completes the warp operation of `id`'s warp if all lanes of its mask have arrived; false if one is missing.
bool complete_warp(u32 id) {
    const Fiber &first = fibers[id];
    const u32 base = id / 32 * 32;
    u32 any = 0;
    for (u32 lane = 0; lane < 32; lane++) {
        if (!(first.mask >> lane & 1)) continue;
        const Fiber &f = fibers[base + lane];
        if (f.state != State::warp || f.line != first.line || f.mask != first.mask || std::strcmp(f.file, first.file))
            return false;
        any |= f.value;
    }
    for (u32 lane = 0; lane < 32; lane++) {
        if (!(first.mask >> lane & 1)) continue;
        Fiber &f = fibers[base + lane];
        const int own = (int)lane;
        int source = f.kind == Vote::down ? own + f.lane : f.kind == Vote::exchange ? own ^ f.lane : f.lane;
        if (source < 0 || source > 31) source = own;  // as __shfl_down does at the end of a warp
        if (f.kind != Vote::any && !(first.mask >> source & 1))
            error = "thread " + std::to_string(base + lane) + " shuffles from lane " + std::to_string(source) +
                    ", which is not in the mask, at " + place(f);
        f.result = f.kind == Vote::any ? any : fibers[base + (u32)source].value;
    }
    for (u32 lane = 0; lane < 32; lane++)
        if (first.mask >> lane & 1) {
            fibers[base + lane].state = State::ready;
            make_ready(base + lane);
        }
    return true;
}

// Describes two threads that wait at different places, or one that waits for lanes that cannot arrive.
std::string divergence() {
    u32 waiting = 0;
    while (fibers[waiting].state == State::done) waiting++;
    const Fiber &f = fibers[waiting];
    std::string text = "the threads of block " + std::to_string(block.x) + "," + std::to_string(block.y) + " diverge: " +
                       describe(waiting);
    for (u32 id = 0; id < block_size.x; id++) {
        const Fiber &other = fibers[id];
        if (other.state != f.state || other.line != f.line || std::strcmp(other.file, f.file))
            return text + ", but " + describe(id);
    }
    return text + " for lanes of its mask that never arrive";
}

// No thread can run: either all wait at the same barrier, which then opens, or the kernel is wrong.
bool open_barrier() {
    u32 vote = 0;
    for (u32 id = 0; id < block_size.x; id++) {
        const Fiber &f = fibers[id], &first = fibers[0];
        if (f.state != State::barrier || f.line != first.line || std::strcmp(f.file, first.file)) {
            error = divergence();
            return false;
        }
        vote |= f.value;
    }
    for (u32 id = 0; id < block_size.x; id++) {
        fibers[id].result = vote;
        fibers[id].state = State::ready;
        make_ready(id);
    }
    return true;
}

void run_block(u32 shared) {
    // Bytes of all ones are NaN, which exposes kernels that read shared memory before writing it.
    std::memset(dynamic_shared, 0xff, shared);
    ready.clear();
    choose_turns();
    for (u32 id = 0; id < block_size.x; id++) {
        prepare(fibers[id]);
        fibers[id].state = State::ready;
        make_ready(id);
    }
    u32 done = 0;
    while (error.empty() && done < block_size.x) {
        if (ready.empty()) {
            if (!open_barrier()) return;
            continue;
        }
        const u32 id = take_ready();
        to_fiber(id);
        if (fibers[id].state == State::done) done++;
        if (fibers[id].state == State::warp) complete_warp(id);
    }
}

std::map<std::string, Bind> &kernels() {
    static std::map<std::string, Bind> all;
    return all;
}

bool make_fibers(u32 count) {
    while (fibers.size() < count) {
        void *stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
        if (stack == MAP_FAILED) return false;
        fibers.emplace_back();
        fibers.back().stack = static_cast<unsigned char *>(stack);
    }
    return true;
}

}  // namespace

u32 barrier(const char *file, int line, bool vote) {
    Fiber &f = fibers[current];
    f.state = State::barrier, f.file = file, f.line = line, f.value = vote;
    to_scheduler();
    return fibers[current].result;
}

u32 warp(u32 mask, u32 value, Vote kind, int lane, const char *file, int line) {
    Fiber &f = fibers[current];
    f.state = State::warp, f.file = file, f.line = line;
    f.mask = mask, f.value = value, f.kind = kind, f.lane = lane;
    to_scheduler();
    return fibers[current].result;
}

void add_kernel(const char *name, Bind bind) { kernels()[name] = std::move(bind); }

}  // namespace hal_sim

// Runs a kernel to completion. Returns "" or a description of the error (valid until the next call).
extern "C" const char *hal_sim_launch(const char *name, u32 grid_x, u32 grid_y, u32 threads, u32 shared,
                                      const unsigned char *parameters, u64 size) {
    using namespace hal_sim;
    static std::mutex one_at_a_time;
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    error.clear();
    const auto entry = kernels().find(name);
    if (entry == kernels().end()) {
        error = "there is no such kernel";
    } else if (!grid_x || !grid_y || grid_x > 0x7fffffff || grid_y > kMaxGridY || !threads || threads > kMaxThreads ||
               threads % 32 || shared > kMaxShared) {
        error = "a GPU refuses this launch: grid " + std::to_string(grid_x) + " x " + std::to_string(grid_y) + ", " +
                std::to_string(threads) + " threads, " + std::to_string(shared) + " bytes of shared memory";
    } else if (!make_fibers(threads)) {
        error = "no memory for " + std::to_string(threads) + " thread stacks";
    }
    if (!error.empty()) return error.c_str();
    const std::function<void()> run = entry->second(parameters, size);
    if (!run) {
        error = "the parameters are not " + std::to_string(size) + " bytes";
        return error.c_str();
    }
    body = &run;
    grid_size = {grid_x, grid_y, 1};
    block_size = {threads, 1, 1};
#if ASAN
    __asan_poison_memory_region(dynamic_shared + shared, kMaxShared - shared);
#endif
    // Blocks start at a random index, because no block may rely on another having run.
    const u64 blocks = (u64)grid_x * grid_y, first = random_below((u32)(blocks < 0xffffffff ? blocks : 0xffffffff));
    for (u64 i = 0; i < blocks && error.empty(); i++) {
        const u64 id = (first + i) % blocks;
        block = {(u32)(id % grid_x), (u32)(id / grid_x), 0};
        run_block(shared);
    }
#if ASAN
    __asan_unpoison_memory_region(dynamic_shared, kMaxShared);
    if (!error.empty())  // abandoned stacks still contain the red zones of their frames
        for (Fiber &f : fibers) __asan_unpoison_memory_region(f.stack, kStack);
#endif
    return error.c_str();
}

extern "C" void hal_sim_seed(u64 seed) { hal_sim::random_state = seed * 2 + 1; }
