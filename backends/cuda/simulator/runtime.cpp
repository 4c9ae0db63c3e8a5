// The scheduler for cuda_host.h: the threads of a block are fibers scheduled at random; blocks run one after the other.
//
// A fiber is a stack and a saved stack pointer; switching is a dozen instructions on x86-64 and swapcontext elsewhere.
// A failed launch abandons its fibers, because kernels own no resources.
//
// The kernels, but not this file, are compiled with the sanitizers' instrumentation (build.py), whose calls this file
// defines: __tsan_read4(p) before each access to memory, and __ubsan_handle_* when a check has failed. So each access
// is compared with the tensors of the launch before it is made, and a wrong one ends the launch, not the process.
#include "common.h"

#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace hal_sim {

constexpr u32 kMaxThreads = 256, kMaxGridY = 65535, kMaxShared = 48 * 1024;
constexpr std::size_t kStack = 64 * 1024;

Index thread, block, block_size, grid_size;
// Outside of this library's own memory, which kernels may access, so that an access beyond it is an error.
unsigned char *dynamic_shared = nullptr;

namespace {

enum class State { ready, barrier, warp, done };

struct Fiber {
    unsigned char *stack = nullptr;
    void *context = nullptr;
    State state = State::done;
    const char *file = "";
    int line = 0;
    u32 mask = 0, value = 0, result = 0;
    int lane = 0;
    Vote kind = Vote::any;
    u32 warp_operations = 0;
};

std::vector<Fiber> fibers;
Copies all_copies[kMaxThreads];  // static, so that instrumented code may access them
std::vector<u64> ready;  // a heap: the smallest (rank << 32 | thread) runs next
std::vector<u32> ranks;
u32 current = 0;
void (*body)() = nullptr;
std::string error;

struct Region {
    u64 begin = 0, end = 0;
    bool holds(u64 at, u64 size) const { return begin <= at && at < end && size <= end - at; }
};

std::vector<Region> regions;  // what the kernel may access besides its thread's stack
Region recent;                // the one accessed last
bool running = false;         // whether the instrumented code that runs is a kernel's
Fault fault;
u32 shared_size = 0;
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

void to_fiber(u32 id) {
    Fiber &f = fibers[id];
    current = id;
    thread.x = id;
    enter(f);
}

void to_scheduler() {
    Fiber &f = fibers[current];
    leave(f);
}

void run_fiber() {
    body();
    fibers[current].state = State::done;
    to_scheduler();
    std::abort();  // a finished thread is never resumed
}

std::string hexadecimal(u64 number) {
    char text[32];
    std::snprintf(text, sizeof text, "%#llx", number);
    return text;
}

// Ends the launch because of what the instruction before `code` does: the thread that runs is never resumed.
[[gnu::cold]] void refuse(const std::string &what, void *code) {
    if (!running) return;
    fault.code = (u64)code;
    const std::string where = std::to_string(block.x) + "," + std::to_string(block.y);
    error = "thread " + std::to_string(current) + " of block " + where + " " + what;
    to_scheduler();
    std::abort();
}

// Called before each access of a kernel. code: the address of the instruction after the call.
inline void access(void *p, u64 size, bool write, void *code) {
    const u64 at = (u64)p;
    if (recent.holds(at, size) || !running) return;
    const u64 stack = (u64)fibers[current].stack;
    if (Region{stack, stack + kStack}.holds(at, size)) return;
    for (const Region &region : regions)
        if (region.holds(at, size)) {
            recent = region;
            return;
        }
    std::string what = (write ? "writes " : "reads ") + std::to_string(size) + " bytes at " + hexadecimal(at);
    if (const u64 offset = at - (u64)dynamic_shared; offset < kMaxShared)
        what += ", byte " + std::to_string(offset) + " of " + std::to_string(shared_size) + " bytes of shared memory";
    else
        fault = {at, size, 0};
    refuse(what, code);
}

// The memory of this library: static shared memory, constants, and the parameters of the launch.
Region find_own_memory() {
    Region own;
    dl_iterate_phdr(
        [](dl_phdr_info *info, std::size_t, void *data) {
            Region image{~0ull, 0};
            for (int i = 0; i < info->dlpi_phnum; i++) {
                const auto &part = info->dlpi_phdr[i];
                if (part.p_type != PT_LOAD) continue;
                image.begin = std::min(image.begin, (u64)(info->dlpi_addr + part.p_vaddr));
                image.end = std::max(image.end, (u64)(info->dlpi_addr + part.p_vaddr + part.p_memsz));
            }
            if (!image.holds((u64)&error, sizeof error)) return 0;
            *static_cast<Region *>(data) = image;
            return 1;
        },
        &own);
    return own;
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
        fibers[id].warp_operations = all_copies[id].count = 0;
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

std::map<std::string, Kernel> &kernels() {
    static std::map<std::string, Kernel> all;
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
    fibers[current].warp_operations++;
    return fibers[current].result;
}

u32 warp_operations() { return fibers[current].warp_operations; }
Copies &copies() { return all_copies[current]; }

void add_kernel(const char *name, Kernel kernel) { kernels()[name] = kernel; }

}  // namespace hal_sim

// The instrumentation's calls. Names, parameters and structs are those of GCC's and Clang's sanitizer interface.
#define HOOK extern "C"
#define READ(name, size) \
    HOOK void __tsan_##name(void *p) { hal_sim::access(p, size, false, __builtin_return_address(0)); }
#define WRITE(name, size) \
    HOOK void __tsan_##name(void *p) { hal_sim::access(p, size, true, __builtin_return_address(0)); }
#define ACCESS(size)                                          \
    READ(read##size, size) READ(unaligned_read##size, size)   \
    WRITE(write##size, size) WRITE(unaligned_write##size, size)
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
HOOK void __tsan_read_range(void *p, u64 size) { hal_sim::access(p, size, false, __builtin_return_address(0)); }
HOOK void __tsan_write_range(void *p, u64 size) { hal_sim::access(p, size, true, __builtin_return_address(0)); }
// Clang's, for copies of structs.
HOOK void *__tsan_memcpy(void *to, const void *from, std::size_t size) {
    hal_sim::access(const_cast<void *>(from), size, false, __builtin_return_address(0));
    hal_sim::access(to, size, true, __builtin_return_address(0));
    return std::memcpy(to, from, size);
}
HOOK void *__tsan_memset(void *to, int byte, std::size_t size) {
    hal_sim::access(to, size, true, __builtin_return_address(0));
    return std::memset(to, byte, size);
}
HOOK void __tsan_init() {}
HOOK void __tsan_func_entry(void *) {}
HOOK void __tsan_func_exit() {}

// Each check passes its place in the source, which the caller of hal_sim_launch finds from the code's address, then its
// own fields.
struct Place {
    const char *file;
    u32 line, column;
};
struct TypeName {
    u16 kind, info;
    char name[1];
};
struct Misaligned {
    Place place;
    const TypeName *type;
    u8 log_alignment, kind;
};
struct OutOfBounds {
    Place place;
    const TypeName *array, *index;
};
struct Overflow {
    Place place;
    const TypeName *type;
};
HOOK void __ubsan_handle_type_mismatch_v1(const Misaligned *check, u64 p) {
    hal_sim::refuse("accesses " + hal_sim::hexadecimal(p) + ", which is not aligned to " +
                        std::to_string(1 << check->log_alignment) + " bytes",
                    __builtin_return_address(0));
}
HOOK void __ubsan_handle_out_of_bounds(const OutOfBounds *check, u64 index) {
    hal_sim::refuse("uses index " + std::to_string((i64)index) + " of an array " + check->array->name,
                    __builtin_return_address(0));
}
#define OVERFLOW(operation, ...)                                                          \
    HOOK void __ubsan_handle_##operation##_overflow(const Overflow *check, __VA_ARGS__) { \
        const std::string what = "overflows a number of type ";                           \
        hal_sim::refuse(what + check->type->name, __builtin_return_address(0));           \
    }
OVERFLOW(add, u64, u64)
OVERFLOW(sub, u64, u64)
OVERFLOW(mul, u64, u64)
OVERFLOW(divrem, u64, u64)
OVERFLOW(negate, u64)

#define PUBLIC extern "C" __attribute__((visibility("default")))

// Runs a kernel to completion, or the last blocks of its grid only if `last` is not 0. memory: [count][2], the first
// address and the one past the end of each tensor that the kernel may access. Returns "" or a description of the error
// (valid until the next call); *at: the instruction, and the access if that is the error, else zeros.
PUBLIC const char *hal_sim_launch(const char *name, u32 grid_x, u32 grid_y, u32 threads, u32 shared,
                                  const unsigned char *parameters, u64 size, const u64 *memory, u64 count, u64 last,
                                  hal_sim::Fault *at) {
    using namespace hal_sim;
    static std::mutex one_at_a_time;
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    static const Region own = find_own_memory();
    error.clear();
    *at = fault = {};
    const auto entry = kernels().find(name);
    if (entry == kernels().end()) {
        error = "there is no such kernel";
    } else if (!grid_x || !grid_y || grid_x > 0x7fffffff || grid_y > kMaxGridY || !threads || threads > kMaxThreads ||
               threads % 32 || shared > kMaxShared) {
        error = "a GPU refuses this launch: grid " + std::to_string(grid_x) + " x " + std::to_string(grid_y) + ", " +
                std::to_string(threads) + " threads, " + std::to_string(shared) + " bytes of shared memory";
    } else if (!make_fibers(threads)) {
        error = "no memory for " + std::to_string(threads) + " thread stacks";
    } else if (!entry->second.bind(parameters, size)) {
        error = "the parameters are not " + std::to_string(size) + " bytes";
    }
    if (!error.empty()) return error.c_str();
    static std::vector<unsigned char> shared_memory(kMaxShared + 16);
    dynamic_shared = shared_memory.data() + (16 - (u64)shared_memory.data() % 16) % 16;
    shared_size = shared;
    recent = {};
    regions = {own, {(u64)dynamic_shared, (u64)dynamic_shared + shared}};
    for (u64 i = 0; i < count; i++) regions.push_back({memory[2 * i], memory[2 * i + 1]});
    body = entry->second.run;
    grid_size = {grid_x, grid_y, 1};
    block_size = {threads, 1, 1};
    // Blocks start at a random index, because no block may rely on another having run.
    const u64 all = (u64)grid_x * grid_y, blocks = last && last < all ? last : all;
    const u64 first = random_below((u32)(blocks < 0xffffffff ? blocks : 0xffffffff));
    running = true;
    for (u64 i = 0; i < blocks && error.empty(); i++) {
        const u64 id = all - blocks + (first + i) % blocks;
        block = {(u32)(id % grid_x), (u32)(id / grid_x), 0};
        run_block(shared);
    }
    running = false;
    if (fault.code) fault.code -= own.begin;
    *at = fault;
    return error.c_str();
}

PUBLIC void hal_sim_seed(u64 seed) { hal_sim::random_state = seed * 2 + 1; }
