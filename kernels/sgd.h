// SGD with momentum: the arithmetic of one element, the same on the host and on a device.
//
// Letters follow torch.optim.SGD:
//   p  parameter     g  gradient     b  momentum_buffer (the only state, and none without momentum)
#pragma once

#include "scalar.h"

namespace dslaunch {

// What is constant over one segment, worked out once in double and rounded once to float.
struct SgdCoefficients {
    float grad_scale;           // multiplied into g first: 1 / loss scale times the clip factor
    float momentum;
    float one_minus_dampening;  // 1 in the first step, whose buffer is the gradient
    float lr;
    float l2;  // weight_decay
};

// Hyper-parameters of one optimizer group, as the caller gives them. `step` counts from 1; the buffer holds zeros then.
struct SgdHyper {
    double lr;
    double momentum;
    double dampening;
    double weight_decay;
    double step;
    bool nesterov;
};

#if !defined(__CUDACC_RTC__)
inline SgdCoefficients sgd_coefficients(const SgdHyper& h, double grad_scale) {
    SgdCoefficients c;
    c.grad_scale = static_cast<float>(grad_scale);
    c.momentum = static_cast<float>(h.momentum);
    c.one_minus_dampening = h.step > 1.0 ? static_cast<float>(1.0 - h.dampening) : 1.0f;
    c.lr = static_cast<float>(h.lr);
    c.l2 = static_cast<float>(h.weight_decay);
    return c;
}
#endif

enum class SgdMode { without_momentum, with_momentum, nesterov };

// One step of one element; `b` is left alone without momentum. Agrees with torch.optim.SGD (maximize off).
template <SgdMode mode>
DSLAUNCH_INLINE void sgd_element(float& p, float g, float& b, const SgdCoefficients& c) {
    g = g * c.grad_scale + c.l2 * p;
    if (mode != SgdMode::without_momentum) {
        b = c.momentum * b + c.one_minus_dampening * g;
        g = mode == SgdMode::nesterov ? g + c.momentum * b : b;
    }
    p -= c.lr * g;
}

}  // namespace dslaunch
