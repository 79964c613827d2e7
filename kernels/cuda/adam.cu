// Adam (DSLAUNCH_MODE 0) and AdamW (1).

#include "../adam.h"
#include "step.cuh"

namespace dslaunch {

struct Adam {
    using Coefficients = AdamCoefficients;
    static constexpr int num_states = 2;

    __device__ __forceinline__ static void update(float& p, float g, float (&s)[2], const Coefficients& c) {
        adam_element<DSLAUNCH_MODE == 1>(p, g, s[0], s[1], c);
    }
};

}  // namespace dslaunch

DSLAUNCH_STEP_KERNEL(Adam)
