// LAMB's second pass: an optimizer of its own, whose gradient is the direction and whose state is none.

#include "../lamb.h"
#include "step.cuh"

namespace dslaunch {

// `Run.states[0]` is where it lies: the first pass has just computed it.
struct StepSize {
    float of_segment;
};

struct LambApply {
    using Coefficients = StepSize;
    static constexpr int num_states = 0;

    __device__ __forceinline__ static void update(float& p, float u, float&, float&, const Coefficients& c) {
        lamb_element(p, u, c.of_segment);
    }
};

}  // namespace dslaunch

extern "C" __global__ void __launch_bounds__(dslaunch::num_threads, 2)
    lamb_apply(const __grid_constant__ dslaunch::Table<dslaunch::StepSize> table) {
    using namespace dslaunch;
    using OneStep = Step<LambApply, float, float, DSLAUNCH_PARAM_OUT>;
    if (!is_finite(factor_of(table))) return;  // the first pass wrote nothing
    const auto step_size = [](const Run& run) { return StepSize{*static_cast<const float*>(run.states[0])}; };
    for_each_element(
        table, [&](const Run& run, long long i) { OneStep::one(run, i, step_size(run)); },
        [&](const Run& run, long long i) { OneStep::pack(run, i, step_size(run)); });
}
