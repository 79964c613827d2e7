// SGD: without momentum (DSLAUNCH_MODE 0), with it (1), with Nesterov's (2).

#include "../sgd.h"
#include "step.cuh"

namespace dslaunch {

struct Sgd {
    using Coefficients = SgdCoefficients;
    static constexpr int num_states = DSLAUNCH_MODE == 0 ? 0 : 1;

    __device__ __forceinline__ static void update(float& p, float g, float (&s)[2], const Coefficients& c) {
        sgd_element<static_cast<SgdMode>(DSLAUNCH_MODE)>(p, g, s[0], c);
    }
};

}  // namespace dslaunch

DSLAUNCH_STEP_KERNEL(Sgd)
