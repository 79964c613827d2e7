// Lion.

#include "../lion.h"
#include "step.cuh"

namespace dslaunch {

struct Lion {
    using Coefficients = LionCoefficients;
    static constexpr int num_states = 1;

    __device__ __forceinline__ static void update(float& p, float g, float (&s)[2], const Coefficients& c) {
        lion_element(p, g, s[0], c);
    }
};

}  // namespace dslaunch

DSLAUNCH_STEP_KERNEL(Lion)
