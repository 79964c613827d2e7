// How every CPU kernel loops: work is cut into blocks, threads share the blocks, and one cloned function
// walks over each block.
#pragma once

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <thread>

// Put before a plain function (not a template, not a lambda, not a body with `#pragma omp`: compilers clone
// none of these): it is compiled once per instruction set, and the loader picks the one for this processor.
#if defined(DSLAUNCH_CLONE_TARGETS)  // a list of strings, from CMakeLists.txt
#define DSLAUNCH_CLONES __attribute__((target_clones(DSLAUNCH_CLONE_TARGETS)))
#else
#define DSLAUNCH_CLONES
#endif

namespace dslaunch {

// Elements of one block: large enough that starting it costs nothing, small enough that a layer's worth of
// work keeps every thread busy. Part of squared_norm's result: another size changes its last bits.
constexpr std::int64_t block_numel = 16384;

// Blocks that make a thread worth waking: tens of microseconds of work. Fewer gain little on an idle machine,
// and on a busy one the step waits until the woken thread gets its turn.
constexpr std::int64_t min_blocks_per_thread = 4;

// [Note: OpenMP after fork]
// A forked child has the forking thread's OpenMP team on record, but not the threads in it; a parallel region
// would wait for them for ever. A thread started in the child has no such record and makes a team of its own.
inline const pid_t home_process = getpid();  // the process that loaded this library

// Calls body(block) for every block in [0, num_blocks), on at most `num_threads` threads (0:
// OpenMP's default).
template <typename Body>
void for_each_block(std::int64_t num_blocks, int num_threads, const Body& body) {
    const int wanted = num_threads > 0 ? num_threads : omp_get_max_threads();
    const int team = static_cast<int>(std::min<std::int64_t>(wanted, num_blocks / min_blocks_per_thread));
    if (team <= 1) {
        for (std::int64_t block = 0; block < num_blocks; ++block) body(block);
        return;
    }
    const auto run = [&] {
#pragma omp parallel for num_threads(team) schedule(static)
        for (std::int64_t block = 0; block < num_blocks; ++block) body(block);
    };
    if (getpid() != home_process) {  // See [Note: OpenMP after fork].
        std::thread(run).join();
    } else {
        run();
    }
}

}  // namespace dslaunch
