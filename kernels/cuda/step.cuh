// One optimizer step over a table of runs: read every element once, write every result once.
//
// A rule is a type with
//   Coefficients        what is constant over one segment; its `grad_scale` is multiplied into
//                       the gradient first
//   num_states          0, 1 or 2
//   update(p, g, first_state, second_state, c)  the step of one element
//
// Types come from the command line, because one program is compiled for each combination that is in use:
//   DSLAUNCH_MODE       what the optimizer's header says
//   DSLAUNCH_GRAD       float, bfloat16 or float16
//   DSLAUNCH_STATE      float or bfloat16
//   DSLAUNCH_PARAM_OUT  float, bfloat16, float16, or Nothing
#pragma once

#include "../bfloat16.h"
#include "../float16.h"
#include "../optimizer.h"
#include "runs.cuh"

namespace dslaunch {

// The type of a copy that is not wanted.
struct Nothing {
    unsigned short bits;
};

template <typename T>
constexpr bool is_wanted = true;
template <>
constexpr bool is_wanted<Nothing> = false;

__device__ __forceinline__ bool is_finite(float value) { return value - value == 0.0f; }

// `keeps_param`: what the rule leaves in p goes to param_out only.
template <typename Rule, typename Grad, typename State, typename Out, bool keeps_param = false>
struct Step {
    using Coefficients = typename Rule::Coefficients;
    static constexpr int num_states = Rule::num_states;

    // Everything of one element between its load and its store; states are float while they are worked on.
    __device__ __forceinline__ static void update(float& p, float g, float (&s)[2], const Coefficients& c) {
        Rule::update(p, g, s[0], s[1], c);
    }

    __device__ __forceinline__ static void one(const Run& run, long long i, const Coefficients& c) {
        float p = run.param[i];
        float s[2] = {};
#pragma unroll
        for (int k = 0; k < num_states; ++k) s[k] = to_float(static_cast<const State*>(run.states[k])[i]);
        update(p, to_float(static_cast<const Grad*>(run.grad)[i]), s, c);
        if constexpr (!keeps_param) run.param[i] = p;
#pragma unroll
        for (int k = 0; k < num_states; ++k) assign(static_cast<State*>(run.states[k])[i], s[k]);
        if constexpr (is_wanted<Out>) assign(static_cast<Out*>(run.param_out)[i], p);
    }

    __device__ __forceinline__ static void pack(const Run& run, long long i, const Coefficients& c) {
        const Elements<Grad> grad = load(static_cast<const Grad*>(run.grad) + i);
        Elements<float> param = load(run.param + i);
        Elements<State> states[2];
#pragma unroll
        for (int k = 0; k < num_states; ++k) states[k] = load(static_cast<const State*>(run.states[k]) + i);
        Elements<Out> out;
#pragma unroll
        for (int e = 0; e < pack_numel; ++e) {
            float s[2] = {};
#pragma unroll
            for (int k = 0; k < num_states; ++k) s[k] = to_float(states[k].of[e]);
            update(param.of[e], to_float(grad.of[e]), s, c);
#pragma unroll
            for (int k = 0; k < num_states; ++k) assign(states[k].of[e], s[k]);
            if constexpr (is_wanted<Out>) assign(out.of[e], param.of[e]);
        }
        if constexpr (!keeps_param) store(run.param + i, param);
#pragma unroll
        for (int k = 0; k < num_states; ++k) store(static_cast<State*>(run.states[k]) + i, states[k]);
        if constexpr (is_wanted<Out>) store(static_cast<Out*>(run.param_out) + i, out);
    }
};

// A factor on the device spares the host from waiting for a norm. One that is not finite leaves everything as
// it is: that is how a step with an overflow is skipped.
template <typename AnyTable>
__device__ __forceinline__ float factor_of(const AnyTable& table) {
    return table.factor == nullptr ? 1.0f : *table.factor;
}

template <typename Coefficients>
__device__ __forceinline__ Coefficients coefficients_of(const Table<Coefficients>& table, const Run& run, float factor) {
    Coefficients c = table.coefficients[run.coefficients];
    c.grad_scale *= factor;
    return c;
}

template <typename Rule, typename Grad, typename State, typename Out, typename AnyTable>
__device__ __forceinline__ void step_all(const AnyTable& table) {
    using OneStep = Step<Rule, Grad, State, Out>;
    const float factor = factor_of(table);
    if (!is_finite(factor)) return;
    const auto coefficients = [&](const Run& run) { return coefficients_of(table, run, factor); };
    for_each_element(
        table, [&](const Run& run, long long i) { OneStep::one(run, i, coefficients(run)); },
        [&](const Run& run, long long i) { OneStep::pack(run, i, coefficients(run)); });
}

}  // namespace dslaunch

// The kernel of an optimizer. Two blocks of a processor at a time, each thread with all loads of a pack in
// flight, are 56 KiB for Adam (112 bytes: a 16-bit gradient, three of float32); told nothing, ptxas makes room
// for more blocks and spills around the slow path of the division. An H200's 132 processors need 29 KiB each
// for 4.8 TB/s if a load takes 0.8 us (bytes in flight = rate times latency).
#define DSLAUNCH_STEP_KERNEL(Kind)                                                                       \
    extern "C" __global__ void __launch_bounds__(dslaunch::num_threads, 2)                               \
        optimizer_step(const __grid_constant__ dslaunch::Table<dslaunch::Kind::Coefficients> table) {    \
        using namespace dslaunch;                                                                        \
        step_all<InMode<Kind, DSLAUNCH_MODE>, DSLAUNCH_GRAD, DSLAUNCH_STATE, DSLAUNCH_PARAM_OUT>(table); \
    }
