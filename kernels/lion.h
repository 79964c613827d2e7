// Lion: the arithmetic of one element, the same on the host and on a device.
//
// Letters follow Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), program 1:
//   p  parameter     g  gradient     m  exp_avg (the only state)
#pragma once

#include "optimizer.h"

namespace dslaunch {

// Constants of one segment, worked out once in double and rounded once to float.
struct LionCoefficients {
    float grad_scale;  // multiplied into g first: 1 / loss scale times the clip factor
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float lr;
    float decay;  // 1 - lr * weight_decay
};

// Hyper-parameters of one optimizer group, as the caller gives them.
struct LionHyper {
    double lr;
    double beta1;
    double beta2;
    double weight_decay;
};

struct Lion : Optimizer<LionHyper, LionCoefficients, 1> {
    // One step of one element. The sign of 0 is 0; of NaN, NaN: a broken gradient shows in p at once.
    template <int>
    static DSLAUNCH_INLINE void update(float& p, float g, float& m, float&, const LionCoefficients& c) {
        g *= c.grad_scale;
        const float direction = c.beta1 * m + c.one_minus_beta1 * g;
        const float sign = direction > 0.0f ? 1.0f : (direction < 0.0f ? -1.0f : direction);
        p = p * c.decay - c.lr * sign;
        m = c.beta2 * m + c.one_minus_beta2 * g;
    }

#if !defined(__CUDACC_RTC__)
    static constexpr const char* name = "Lion";
    static constexpr const char* states[] = {"exp_avg"};

    template <typename Fields>
    static LionHyper read(const Fields& fields) {
        return {fields.non_negative("lr"), fields.beta("beta1"), fields.beta("beta2"),
                fields.non_negative("weight_decay")};
    }

    static LionCoefficients coefficients(const LionHyper& h, int, double grad_scale) {
        LionCoefficients c;
        c.grad_scale = static_cast<float>(grad_scale);
        c.beta1 = static_cast<float>(h.beta1);
        c.one_minus_beta1 = static_cast<float>(1.0 - h.beta1);
        c.beta2 = static_cast<float>(h.beta2);
        c.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
        c.lr = static_cast<float>(h.lr);
        c.decay = static_cast<float>(1.0 - h.lr * h.weight_decay);
        return c;
    }
#endif
};

}  // namespace dslaunch
