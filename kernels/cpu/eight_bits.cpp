#include "eight_bits.h"

#include "blocks.h"

namespace dslaunch {

DSLAUNCH_CLONES void decode_signed(const ScaledRun& run, float* values) { decode_run<true>(run, values); }

DSLAUNCH_CLONES void decode_unsigned(const ScaledRun& run, float* values) { decode_run<false>(run, values); }

DSLAUNCH_CLONES void encode_signed(const ScaledRun& run, const float* values, const ScaledBits& bits) {
    encode_run<true>(run, values, bits);
}

DSLAUNCH_CLONES void encode_unsigned(const ScaledRun& run, const float* values, const ScaledBits& bits) {
    encode_run<false>(run, values, bits);
}

}  // namespace dslaunch
