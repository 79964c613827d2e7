// Adagrad.

#include "../adagrad.h"
#include "step.cuh"

namespace dslaunch {

struct Adagrad {
    using Coefficients = AdagradCoefficients;
    static constexpr int num_states = 1;

    __device__ __forceinline__ static void update(float& p, float g, float (&s)[2], const Coefficients& c) {
        adagrad_element(p, g, s[0], c);
    }
};

}  // namespace dslaunch

DSLAUNCH_STEP_KERNEL(Adagrad)
