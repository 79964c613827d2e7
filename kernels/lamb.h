// LAMB: the arithmetic of one element, the same on the host and on a device. Two passes, because the length
// of a step depends on the norms of a whole parameter:
//   1  Lamb::update for each element; the caller sums p * p and u * u
//   2  lamb_element with lamb_step_size, which knows both norms
//
// Letters follow You et al., "Large Batch Optimization for Deep Learning" (2020), algorithm 2:
//   p  parameter     g  gradient     m  exp_avg     v  exp_avg_sq     u  update (the direction to go)
#pragma once

#include "optimizer.h"

#if !defined(__CUDACC_RTC__)
#include <cmath>
#endif

namespace dslaunch {

// Constants of one segment in the first pass, rounded once to float.
struct LambCoefficients {
    float grad_scale;  // multiplied into g first: 1 / loss scale times the clip factor
    float beta1;
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float eps;
    float weight_decay;
};

// Hyper-parameters of one optimizer group, as the caller gives them. `step` counts from 1.
struct LambHyper {
    double lr;
    double beta1;
    double beta2;
    double eps;
    double weight_decay;
    double min_coeff;  // the quotient of the norms is kept between these two
    double max_coeff;
    double step;
};

#if !defined(__CUDACC_RTC__)
// Factor of the quotient of the norms: lr and Adam's bias correction.
inline double lamb_base_step_size(const LambHyper& h, bool bias_correction) {
    if (!bias_correction) return h.lr;
    return h.lr * (std::sqrt(1.0 - std::pow(h.beta2, h.step)) / (1.0 - std::pow(h.beta1, h.step)));
}
#endif

// Factor of u; the quotient of the norms is 1 if one of them is 0.
DSLAUNCH_INLINE float lamb_step_size(double base, double min_coeff, double max_coeff, double param_square,
                                     double update_square) {
    double quotient = 1.0;
    if (param_square > 0.0 && update_square > 0.0) {
        quotient = square_root(param_square) / square_root(update_square);
        quotient = quotient > min_coeff ? quotient : min_coeff;  // also for two infinite norms
        quotient = quotient < max_coeff ? quotient : max_coeff;
    }
    return static_cast<float>(base * quotient);
}

// How sums of squares are added up in double, on the host and on a device: a parameter is cut into blocks of
// lamb_block_numel elements; element i of a block goes to partial sum i % lamb_num_lanes, and these are added
// in order; block k goes to partial sum k % lamb_num_lanes of the parameter, and these are added in order.
constexpr int lamb_num_lanes = 32;
constexpr long long lamb_block_numel = 8192;

// The first pass: new moments, and the direction, which takes the place of p.
// In mode 1 eps is inside the root.
struct Lamb : Optimizer<LambHyper, LambCoefficients, 2, 2> {
    template <int eps_inside_sqrt>
    static DSLAUNCH_INLINE void update(float& p, float g, float& m, float& v, const LambCoefficients& c) {
        g *= c.grad_scale;
        m = c.beta1 * m + c.one_minus_beta1 * g;
        v = c.beta2 * v + c.one_minus_beta2 * g * g;
        const float root = eps_inside_sqrt ? square_root(v + c.eps) : square_root(v) + c.eps;
        p = m / root + c.weight_decay * p;
    }

#if !defined(__CUDACC_RTC__)
    static constexpr const char* name = "Lamb";
    static constexpr const char* states[] = {"exp_avg", "exp_avg_sq"};
    static constexpr bool has_update = true;

    template <typename Fields>
    static LambHyper read(const Fields& fields) {
        const double step = fields.step();
        const LambHyper hyper{fields.non_negative("lr"),        fields.beta("beta1"),
                              fields.beta("beta2"),             fields.non_negative("eps"),
                              fields.non_negative("weight_decay"), fields.non_negative("min_coeff"),
                              fields.non_negative("max_coeff"), step};
        if (hyper.min_coeff > hyper.max_coeff) {
            fields.refuse(".min_coeff: ", hyper.min_coeff, "; must not be above max_coeff, ", hyper.max_coeff);
        }
        return hyper;
    }

    static LambCoefficients coefficients(const LambHyper& h, int, double grad_scale) {
        LambCoefficients c;
        c.grad_scale = static_cast<float>(grad_scale);
        c.beta1 = static_cast<float>(h.beta1);
        c.one_minus_beta1 = static_cast<float>(1.0 - h.beta1);
        c.beta2 = static_cast<float>(h.beta2);
        c.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
        c.eps = static_cast<float>(h.eps);
        c.weight_decay = static_cast<float>(h.weight_decay);
        return c;
    }
#endif
};

// The second pass.
DSLAUNCH_INLINE void lamb_element(float& p, float u, float step_size) { p -= step_size * u; }

}  // namespace dslaunch
