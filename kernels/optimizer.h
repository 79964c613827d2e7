// Declarations of an optimizer's header, for every loop on the host and on a device and for the
// Python edge alike:
//
//   static constexpr bool has_eight_bits;   whether states may be of 8 bits, and
//   static constexpr bool is_signed[];      which of them have a sign
//   template <int mode> static void update(float& p, float g, float& first_state, float& second_state,
//                                          const Coefficients& c);   the step of one element
//
// and for the host alone
//
//   static constexpr const char* name;       names the Python classes <name>Shard and <name>Segment
//   static constexpr const char* states[];   the fields of a shard that hold the states
//   template <typename Fields> static Hyper read(const Fields& fields);   a segment's numbers,
//                                                                         each with its check
//   static Coefficients coefficients(const Hyper& h, int mode, double grad_scale);
#pragma once

#include "scalar.h"

namespace dslaunch {

// Common part of most optimizers; one that differs declares its own. `states` is at most 2.
template <typename HyperType, typename CoefficientsType, int states, int modes = 1>
struct Optimizer {
    using Hyper = HyperType;                // numbers of one optimizer group, as the caller gives them
    using Coefficients = CoefficientsType;  // constants of one segment
    static constexpr int num_modes = modes;
    template <int mode>
    static constexpr int num_states = states;
    static constexpr bool has_eight_bits = false;  // states may be of 8 bits, see eight_bits.h
    static constexpr bool is_signed[2] = {true, true};

#if !defined(__CUDACC_RTC__)
    static constexpr bool may_lack_states = false;  // None in a shard says that there are none
    static constexpr bool has_update = false;       // a shard has `update`, [n] float32 to work in

    // The mode of a segment; `wanted` is that of the call.
    static int mode_of(const Hyper&, int wanted) { return wanted; }
#endif
};

// An optimizer in one mode.
template <typename Kind, int mode>
struct InMode {
    using Coefficients = typename Kind::Coefficients;
    static constexpr int num_states = Kind::template num_states<mode>;
    static constexpr bool may_narrow = true;

    static DSLAUNCH_INLINE void update(float& p, float g, float& first, float& second, const Coefficients& c) {
        Kind::template update<mode>(p, g, first, second, c);
    }
};

}  // namespace dslaunch
