// Just enough of CUDA to run a kernel's source on the host, one block after the other. A thread is a fiber:
// it runs until __syncthreads, where the next one has its turn, so barriers mean what they mean on a device.
#pragma once

#include <ucontext.h>

#include <cstring>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __shared__ static
#define __launch_bounds__(...)

struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};

struct Index {
    unsigned int x;
};
static Index threadIdx, blockIdx, gridDim;

namespace host {

constexpr unsigned int num_threads = 256;
constexpr std::size_t stack_bytes = 64 * 1024;

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool is_done;
};

static Fiber fibers[num_threads];
static ucontext_t scheduler;
static void (*body)(const void*);
static const void* body_argument;

inline void run_fiber() {
    body(body_argument);
    fibers[threadIdx.x].is_done = true;
    swapcontext(&fibers[threadIdx.x].context, &scheduler);
}

inline void run_block() {
    for (Fiber& fiber : fibers) {
        fiber.stack.resize(stack_bytes);
        fiber.is_done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = stack_bytes;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (bool is_done = false; !is_done;) {
        is_done = true;
        for (unsigned int thread = 0; thread < num_threads; ++thread) {
            if (fibers[thread].is_done) continue;
            threadIdx.x = thread;
            swapcontext(&scheduler, &fibers[thread].context);
            is_done = is_done && fibers[thread].is_done;
        }
    }
}

template <typename... Parameters, std::size_t... places>
void launch(void (*kernel)(Parameters...), void** arguments, unsigned int num_blocks, std::index_sequence<places...>) {
    const auto call = [&] { kernel(*static_cast<const Parameters*>(arguments[places])...); };
    body = [](const void* argument) { (*static_cast<const decltype(call)*>(argument))(); };
    body_argument = &call;
    gridDim.x = num_blocks;
    for (blockIdx.x = 0; blockIdx.x < num_blocks; ++blockIdx.x) run_block();
}

template <typename... Parameters>
void launch(void (*kernel)(Parameters...), void** arguments, unsigned int num_blocks) {
    launch(kernel, arguments, num_blocks, std::index_sequence_for<Parameters...>{});
}

}  // namespace host

inline void __syncthreads() { swapcontext(&host::fibers[threadIdx.x].context, &host::scheduler); }

#define HOST_KERNEL(name) \
    extern "C" void launch_##name(void** arguments, unsigned int num_blocks) { host::launch(name, arguments, num_blocks); }
