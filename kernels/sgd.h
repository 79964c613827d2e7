// SGD with momentum: the arithmetic of one element, the same on the host and on a device.
//
// Letters follow torch.optim.SGD:
//   p  parameter     g  gradient     b  momentum_buffer (the only state, and none without momentum)
#pragma once

#include "optimizer.h"

namespace dslaunch {

// Constants of one segment, worked out once in double and rounded once to float.
struct SgdCoefficients {
    float grad_scale;           // multiplied into g first: 1 / loss scale times the clip factor
    float momentum;
    float one_minus_dampening;  // 1 in the first step, whose buffer is the gradient
    float lr;
    float l2;  // weight_decay
};

// Hyper-parameters of one optimizer group, as the caller gives them. `step` counts from 1;
// the buffer holds zeros then.
struct SgdHyper {
    double lr;
    double momentum;
    double dampening;
    double weight_decay;
    double step;
    bool nesterov;
};

// Mode 0 is without momentum, 1 with it, 2 with Nesterov's; the hyper-parameters say which.
struct Sgd : Optimizer<SgdHyper, SgdCoefficients, 1, 3> {
    template <int mode>
    static constexpr int num_states = mode == 0 ? 0 : 1;

    // One step of one element; `b` is left alone without momentum. Agrees with
    // torch.optim.SGD (maximize off).
    template <int mode>
    static DSLAUNCH_INLINE void update(float& p, float g, float& b, float&, const SgdCoefficients& c) {
        g = g * c.grad_scale + c.l2 * p;
        if (mode != 0) {
            b = c.momentum * b + c.one_minus_dampening * g;
            g = mode == 2 ? g + c.momentum * b : b;
        }
        p -= c.lr * g;
    }

#if !defined(__CUDACC_RTC__)
    static constexpr const char* name = "Sgd";
    static constexpr const char* states[] = {"momentum_buffer"};
    static constexpr bool may_lack_states = true;

    template <typename Fields>
    static SgdHyper read(const Fields& fields) {
        const double step = fields.step();
        const SgdHyper hyper{fields.non_negative("lr"), fields.non_negative("momentum"), fields.finite("dampening"),
                             fields.non_negative("weight_decay"), step, fields.boolean("nesterov")};
        if (hyper.nesterov && !(hyper.momentum > 0.0 && hyper.dampening == 0.0)) {
            fields.refuse(".nesterov: True, with momentum ", hyper.momentum, " and dampening ", hyper.dampening,
                          "; needs momentum above 0 and dampening 0");
        }
        if (hyper.momentum > 0.0) fields.check_has_states("momentum", hyper.momentum);
        return hyper;
    }

    static int mode_of(const SgdHyper& h, int) { return h.momentum == 0.0 ? 0 : h.nesterov ? 2 : 1; }

    static SgdCoefficients coefficients(const SgdHyper& h, int, double grad_scale) {
        SgdCoefficients c;
        c.grad_scale = static_cast<float>(grad_scale);
        c.momentum = static_cast<float>(h.momentum);
        c.one_minus_dampening = h.step > 1.0 ? static_cast<float>(1.0 - h.dampening) : 1.0f;
        c.lr = static_cast<float>(h.lr);
        c.l2 = static_cast<float>(h.weight_decay);
        return c;
    }
#endif
};

}  // namespace dslaunch
