// Adagrad: the arithmetic of one element, the same on the host and on a device.
//
// Letters follow Duchi et al., "Adaptive Subgradient Methods" (2011), and torch.optim.Adagrad:
//   p  parameter     g  gradient     s  sum (of the squares of all gradients, the only state)
#pragma once

#include "optimizer.h"

namespace dslaunch {

// Constants of one segment, worked out once in double and rounded once to float.
struct AdagradCoefficients {
    float grad_scale;  // multiplied into g first: 1 / loss scale times the clip factor
    float step_size;   // lr / (1 + (step - 1) * lr_decay)
    float eps;
    float l2;  // weight_decay
};

// Hyper-parameters of one optimizer group, as the caller gives them. `step` counts from 1.
struct AdagradHyper {
    double lr;
    double lr_decay;
    double eps;
    double weight_decay;
    double step;
};

struct Adagrad : Optimizer<AdagradHyper, AdagradCoefficients, 1> {
    // One step of one element. Agrees with torch.optim.Adagrad (maximize off).
    template <int>
    static DSLAUNCH_INLINE void update(float& p, float g, float& s, float&, const AdagradCoefficients& c) {
        g = g * c.grad_scale + c.l2 * p;
        s += g * g;
        p -= c.step_size * g / (square_root(s) + c.eps);
    }

#if !defined(__CUDACC_RTC__)
    static constexpr const char* name = "Adagrad";
    static constexpr const char* states[] = {"sum"};

    template <typename Fields>
    static AdagradHyper read(const Fields& fields) {
        const double step = fields.step();
        return {fields.non_negative("lr"), fields.non_negative("lr_decay"), fields.non_negative("eps"),
                fields.non_negative("weight_decay"), step};
    }

    static AdagradCoefficients coefficients(const AdagradHyper& h, int, double grad_scale) {
        AdagradCoefficients c;
        c.grad_scale = static_cast<float>(grad_scale);
        c.step_size = static_cast<float>(h.lr / (1.0 + (h.step - 1.0) * h.lr_decay));
        c.eps = static_cast<float>(h.eps);
        c.l2 = static_cast<float>(h.weight_decay);
        return c;
    }
#endif
};

}  // namespace dslaunch
