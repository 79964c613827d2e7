// How every CUDA kernel walks: many arrays in one launch, cut into runs,
// and runs into chunks that blocks share.
//
// kernels/cuda/table.py builds what is declared here, byte for byte.
#pragma once

#include "../scalar.h"

namespace dslaunch {

// Threads of one block. Part of squared_norm's result, as chunk_numel is.
constexpr unsigned int num_threads = 256;

// Elements of one chunk: finding it in the table costs nothing beside it,
// and a layer keeps every processor busy.
constexpr long long chunk_numel = 8192;

// Elements that a thread takes at a time: one access of 16 bytes for 16-bit types, two for float.
constexpr int pack_numel = 8;

// `Run.head` where no element is aligned in all arrays at once.
constexpr unsigned int unaligned = 0xffff;

// Elements that lie one behind the other in every array and share their coefficients.
// Addresses are of the first one.
struct Run {
    float* param;
    const void* grad;
    void* states[2];
    void* param_out;
    long long numel;
    unsigned int first_chunk;     // chunks of all runs before
    unsigned short coefficients;  // index in Table
    unsigned short head;          // elements before the first that is 16-byte aligned in every array
};

// All that one launch needs, passed by value: no memory to fill, to keep alive or to wait for. The
// sizes come from the command line; 4 KiB of kernel parameters are everywhere, 32 KiB need a driver of
// CUDA 12.1 or newer.
template <typename Coefficients>
struct Table {
    const float* factor;  // one more factor of the gradient, or null; see `step_all`
    unsigned int num_runs;
    unsigned int num_chunks;
    Run runs[DSLAUNCH_MAX_RUNS];
    Coefficients coefficients[DSLAUNCH_MAX_COEFFICIENTS];
};

// The last run that begins at or before this chunk.
template <typename AnyTable>
__device__ __forceinline__ const Run& run_of_chunk(const AnyTable& table, unsigned int chunk) {
    unsigned int first = 0;
    unsigned int behind = table.num_runs;
    while (behind - first > 1) {
        const unsigned int middle = (first + behind) / 2;
        if (table.runs[middle].first_chunk <= chunk) {
            first = middle;
        } else {
            behind = middle;
        }
    }
    return table.runs[first];
}

// Calls body(run, begin, end) for every chunk of this block: elements [begin, end) of one run. Chunks are
// counted from the first element behind the head.
template <typename AnyTable, typename Body>
__device__ __forceinline__ void for_each_chunk(const AnyTable& table, const Body& body) {
#pragma unroll 1
    for (unsigned int chunk = blockIdx.x; chunk < table.num_chunks; chunk += gridDim.x) {
        const Run& run = run_of_chunk(table, chunk);
        const long long head = run.head != unaligned ? run.head : 0;
        const long long begin = head + (chunk - run.first_chunk) * chunk_numel;
        body(run, begin, begin + chunk_numel < run.numel ? begin + chunk_numel : run.numel);
    }
}

// Calls pack(run, i) for pack_numel aligned elements from i on and one(run, i) for single ones, together once
// for every element of a chunk. The first chunk takes the head with it.
template <typename One, typename Pack>
__device__ __forceinline__ void for_each_of_chunk(const Run& run, long long begin, long long end, const One& one,
                                                  const Pack& pack) {
    const bool is_aligned = run.head != unaligned;
    const long long packed = is_aligned ? (end - begin) / pack_numel * pack_numel : 0;
#pragma unroll 1
    for (long long i = begin + threadIdx.x * pack_numel; i < begin + packed; i += num_threads * pack_numel) {
        pack(run, i);
    }
    // The others: the head, in the first chunk, and what is behind the last pack.
    const long long before = is_aligned && begin == run.head ? run.head : 0;
    const long long others = before + (end - begin - packed);
#pragma unroll 1
    for (long long i = threadIdx.x; i < others; i += num_threads) {
        one(run, i < before ? i : begin + packed + (i - before));
    }
}

// The same for every element of every run.
template <typename AnyTable, typename One, typename Pack>
__device__ __forceinline__ void for_each_element(const AnyTable& table, const One& one, const Pack& pack) {
    for_each_chunk(table, [&](const Run& run, long long begin, long long end) {
        for_each_of_chunk(run, begin, end, one, pack);
    });
}

// ---- accesses of 16 bytes --------------------------------------------------------------------------------

// pack_numel elements in registers.
template <typename T>
struct Elements {
    static constexpr int num_words = sizeof(T) * pack_numel / sizeof(unsigned int);
    T of[pack_numel];
};

__device__ __forceinline__ void unpack(unsigned int word, float* to) { *to = float_of(word); }

template <typename Half>
__device__ __forceinline__ void unpack(unsigned int word, Half* to) {
    to[0] = Half{static_cast<unsigned short>(word)};
    to[1] = Half{static_cast<unsigned short>(word >> 16)};
}

__device__ __forceinline__ unsigned int packed(const float* from) { return bits_of(*from); }

template <typename Half>
__device__ __forceinline__ unsigned int packed(const Half* from) {
    return from[0].bits | static_cast<unsigned int>(from[1].bits) << 16;
}

// Accesses are said in assembly, volatile ones. NVRTC 12.9 splits half of the stores that are written as a uint4
// into single words. ptxas moves half of a pack's loads behind the roots and divisions of the other half, whose
// slow paths are branches; it keeps the order of volatile accesses.
__device__ __forceinline__ void store(uint4* to, const uint4& words) {
#if defined(__CUDA_ARCH__)
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words.x),
                 "r"(words.y), "r"(words.z), "r"(words.w)
                 : "memory");
#else
    *to = words;
#endif
}

__device__ __forceinline__ uint4 load(const uint4* from) {
#if defined(__CUDA_ARCH__)
    uint4 words;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
    return words;
#else
    return *from;
#endif
}

template <typename T>
__device__ __forceinline__ Elements<T> load(const T* from) {
    constexpr int of_word = sizeof(unsigned int) / sizeof(T);
    Elements<T> elements;
#pragma unroll
    for (int k = 0; k < Elements<T>::num_words; k += 4) {
        const uint4 words = load(reinterpret_cast<const uint4*>(from) + k / 4);
        T* to = elements.of + k * of_word;
        unpack(words.x, to);
        unpack(words.y, to + of_word);
        unpack(words.z, to + 2 * of_word);
        unpack(words.w, to + 3 * of_word);
    }
    return elements;
}

template <typename T>
__device__ __forceinline__ void store(T* to, const Elements<T>& elements) {
    constexpr int of_word = sizeof(unsigned int) / sizeof(T);
#pragma unroll
    for (int k = 0; k < Elements<T>::num_words; k += 4) {
        const T* from = elements.of + k * of_word;
        store(reinterpret_cast<uint4*>(to) + k / 4, uint4{packed(from), packed(from + of_word),
                                                          packed(from + 2 * of_word), packed(from + 3 * of_word)});
    }
}

}  // namespace dslaunch
