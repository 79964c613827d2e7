// Adam and AdamW: the arithmetic of one element, the same on the host and on a device.
//
// Letters follow Kingma and Ba, "Adam" (2015), and Loshchilov and Hutter, "Decoupled weight decay" (2019):
//   p  parameter     g  gradient     m  exp_avg (first moment)     v  exp_avg_sq (second moment)
#pragma once

#include "optimizer.h"

#if !defined(__CUDACC_RTC__)
#include <cmath>
#endif

namespace dslaunch {

// Constants of one segment, worked out once in double and rounded once to float.
struct AdamCoefficients {
    float grad_scale;           // multiplied into g first: 1 / loss scale times the clip factor
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float step_size;            // lr / (1 - beta1^step)
    float inv_sqrt_correction;  // 1 / sqrt(1 - beta2^step)
    float eps;
    float decay;                // AdamW: 1 - lr * weight_decay; Adam: 1
    float l2;                   // AdamW: 0; Adam: weight_decay
};

// Hyper-parameters of one optimizer group, as the caller gives them. `step` counts from 1.
struct AdamHyper {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    double step;
};

// Mode 0 is Adam, mode 1 AdamW.
struct Adam : Optimizer<AdamHyper, AdamCoefficients, 2, 2> {
    static constexpr bool has_eight_bits = true;
    static constexpr bool is_signed[2] = {true, false};

    // One step of one element. Agrees with torch.optim.Adam and AdamW (amsgrad and maximize off).
    // The mode is a template argument, not a zero in `l2`: 0 * p is NaN for an infinite p and
    // would reach m and v.
    template <int adam_w>
    static DSLAUNCH_INLINE void update(float& p, float g, float& m, float& v, const AdamCoefficients& c) {
        g *= c.grad_scale;
        if (adam_w) {
            p *= c.decay;
        } else {
            g += c.l2 * p;
        }
        m = c.beta1 * m + c.one_minus_beta1 * g;
        v = c.beta2 * v + c.one_minus_beta2 * g * g;
        p -= c.step_size * m / (square_root(v) * c.inv_sqrt_correction + c.eps);
    }

#if !defined(__CUDACC_RTC__)
    static constexpr const char* name = "Adam";
    static constexpr const char* states[] = {"exp_avg", "exp_avg_sq"};

    template <typename Fields>
    static AdamHyper read(const Fields& fields) {
        const double step = fields.step();
        return {fields.non_negative("lr"),  fields.beta("beta1"),
                fields.beta("beta2"),       fields.non_negative("eps"),
                fields.non_negative("weight_decay"), step};
    }

    static AdamCoefficients coefficients(const AdamHyper& h, int adam_w, double grad_scale) {
        const double correction1 = 1.0 - std::pow(h.beta1, h.step);
        const double correction2 = 1.0 - std::pow(h.beta2, h.step);
        AdamCoefficients c;
        c.grad_scale = static_cast<float>(grad_scale);
        c.beta1 = static_cast<float>(h.beta1);
        c.one_minus_beta1 = static_cast<float>(1.0 - h.beta1);
        c.beta2 = static_cast<float>(h.beta2);
        c.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
        c.step_size = static_cast<float>(h.lr / correction1);
        c.inv_sqrt_correction = static_cast<float>(1.0 / std::sqrt(correction2));
        c.eps = static_cast<float>(h.eps);
        c.decay = adam_w ? static_cast<float>(1.0 - h.lr * h.weight_decay) : 1.0f;
        c.l2 = adam_w ? 0.0f : static_cast<float>(h.weight_decay);
        return c;
    }
#endif
};

}  // namespace dslaunch
