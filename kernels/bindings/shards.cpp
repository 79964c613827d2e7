#include "shards.h"

#include <cmath>

namespace dslaunch {

double read_grad_scale(double grad_scale) {
    if (!std::isfinite(grad_scale)) refuse_value("grad_scale: ", grad_scale, "; must be finite");
    return grad_scale;
}

int read_num_threads(int num_threads) {
    if (num_threads < 0) refuse_value("num_threads: ", num_threads, "; must be >= 0 (0: OpenMP's default)");
    return num_threads;
}

const FlatArray& ShardArrays::array(const char* field_name, ArrayRule rule) {
    const FlatArray& added = arrays_.add(name_of(field_name), field(field_name), rule);
    if (numel_ >= 0 && added.numel != numel_) {
        refuse_value(added.name, ": ", added.numel, " elements, but ", name_, ".param has ", numel_,
                     "; all arrays of one shard must have the same length");
    }
    numel_ = added.numel;
    return added;
}

const FlatArray* ShardArrays::array_or_none(const char* field_name, ArrayRule rule) {
    return field(field_name).is_none() ? nullptr : &array(field_name, rule);
}

std::vector<GradArray> ShardArrays::grads() {
    std::vector<GradArray> read;
    std::int64_t end = 0;
    for (nb::handle piece : field("grads")) {
        const std::string piece_name = text(name_, ".grads[", read.size(), ']');
        std::pair<std::int64_t, nb::object> offset_and_array;
        if (!nb::try_cast(piece, offset_and_array)) {
            refuse_type(piece_name, ": a ", type_of(piece), "; must be a pair of an offset and an array");
        }
        const auto& [offset, object] = offset_and_array;
        const FlatArray& array = arrays_.add(piece_name, object, grad_rule);
        if (offset < end || array.numel > numel_ - offset) {
            refuse_value(piece_name, ": ", array.numel, " elements from ", offset, " on; must lie in [", end, ", ",
                         numel_, "), behind the piece before and inside the shard");
        }
        end = offset + array.numel;
        read.push_back(GradArray{offset, array.numel, array.data, array.dtype});
    }
    return read;
}

void ShardArrays::read_scales(std::size_t num_states, float** scales) {
    const std::int64_t wanted = (numel_ + scaled_numel - 1) / scaled_numel;
    std::size_t place = 0;
    for (nb::handle object : field("scales")) {
        const FlatArray& added = arrays_.add(text(name_, ".scales[", place, ']'), object, param_rule);
        if (place == num_states || added.numel != wanted) {
            refuse_value(added.name, ": ", added.numel, " elements; must be ", num_states, " arrays of ", wanted,
                         ", one number for each ", scaled_numel, " elements of a state");
        }
        scales[place++] = static_cast<float*>(added.data);
    }
    if (place != num_states) {
        refuse_value(name_, ".scales: ", place, " arrays; must be ", num_states, ", one for each state of 8 bits");
    }
}

std::string read_states(ShardArrays& arrays, const char* const* names, std::size_t num_states, StateRule rule,
                        void** states, Dtype& dtype) {
    std::string lacking;
    for (std::size_t i = 0; i < num_states; ++i) {
        const FlatArray* state =
            rule.may_lack ? arrays.array_or_none(names[i], rule.rule) : &arrays.array(names[i], rule.rule);
        if (state == nullptr) {
            lacking = arrays.name_of(names[i]);
            continue;
        }
        if (i > 0 && state->dtype != dtype) {
            refuse_type(state->name, ": dtype ", dtype_name(state->dtype), ", but ", arrays.name_of(names[0]), " has ",
                        dtype_name(dtype), "; all states of one shard must have the same dtype");
        }
        states[i] = state->data;
        dtype = state->dtype;
    }
    return lacking;
}

}  // namespace dslaunch
