// The shards of one call: what every optimizer's step reads from Python, whatever its states are called.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "../eight_bits.h"
#include "arrays.h"
#include "segments.h"

namespace dslaunch {

// Numbers of one call, with their checks.
double read_grad_scale(double grad_scale);
int read_num_threads(int num_threads);

// The shards of one call, and what keeps their memory alive.
template <typename Hyper>
struct ReadShards {
    Shards<Hyper> shards;
    Arrays arrays;
};

// One shard's arrays and gradients; they all have the same length.
class ShardArrays {
  public:
    ShardArrays(nb::handle object, std::string name, const std::string& kind, Arrays& arrays)
        : object_(object), name_(std::move(name)), kind_(kind), arrays_(arrays) {}

    nb::object field(const char* field) const { return attribute(object_, field, name_, kind_); }
    std::string name_of(const char* field) const { return text(name_, '.', field); }
    std::int64_t numel() const { return numel_; }

    const FlatArray& array(const char* field, ArrayRule rule);
    const FlatArray* array_or_none(const char* field, ArrayRule rule);
    // One for each state of 8 bits, with a float32 for each of its blocks.
    void read_scales(std::size_t num_states, float** scales);
    std::vector<GradArray> grads();

  private:
    nb::handle object_;
    std::string name_;
    const std::string& kind_;
    Arrays& arrays_;
    std::int64_t numel_ = -1;
};

// What a shard's states may be.
struct StateRule {
    bool may_lack;  // None says that there are none
    ArrayRule rule;
};

// Reads the states into a shard; all of one dtype. Returns the name of one that is None, if any is.
std::string read_states(ShardArrays& arrays, const char* const* names, std::size_t num_states, StateRule rule,
                        void** states, Dtype& dtype);

// Errors if a step would write a part of a block of states of 8 bits: the others share its scale.
template <typename Hyper>
void check_blocks_are_whole(const Shard<Hyper>& shard, const ShardArrays& arrays) {
    for (std::size_t i = 0; i < shard.segments.size(); ++i) {
        const Segment<Hyper>& segment = shard.segments[i];
        const std::string name = text(arrays.name_of("segments"), '[', i, ']');
        if (segment.numel == 0) continue;
        if (segment.offset % scaled_numel != 0 || segment.rounding.first % scaled_numel != 0) {
            refuse_value(name, ": offset ", segment.offset, " and first ", segment.rounding.first,
                         "; must be multiples of ", scaled_numel, ", for states of 8 bits share their scales");
        }
        const std::int64_t end = segment.offset + segment.numel;
        for (const GradArray& grad : shard.grads) {
            const std::int64_t stop = grad.offset + grad.numel;
            const bool begins_inside = grad.offset > segment.offset && grad.offset < end;
            const bool ends_inside = stop > segment.offset && stop < end;
            if ((begins_inside && grad.offset % scaled_numel != 0) || (ends_inside && stop % scaled_numel != 0)) {
                refuse_value(name, ": a piece of the gradient has elements [", grad.offset, ", ", stop,
                             "); must begin and end at multiples of ", scaled_numel,
                             ", for states of 8 bits share their scales");
            }
        }
    }
}

// Errors if a bfloat16 parameter would be rounded to nearest, or has a copy of another dtype; or if LAMB, which is
// the only one that has no random bits, is given some.
template <typename Kind, typename Hyper>
void check_roundings(const Shard<Hyper>& shard, const ShardArrays& arrays) {
    const bool is_narrow = shard.param_dtype == Dtype::bfloat16;
    if (is_narrow && shard.param_out != nullptr && shard.out_dtype != Dtype::bfloat16) {
        refuse_type(arrays.name_of("param_out"), ": dtype ", dtype_name(shard.out_dtype), ", but ",
                    arrays.name_of("param"), " has bfloat16; must be bfloat16");
    }
    for (std::size_t i = 0; i < shard.segments.size(); ++i) {
        const bool is_random = shard.segments[i].rounding.is_random;
        const std::string name = text(arrays.name_of("segments"), '[', i, "].seed: ");
        if ((is_narrow || shard.state_dtype == Dtype::eight_bits) && !is_random) {
            refuse_value(name, "None, but ", arrays.name_of(is_narrow ? "param" : Kind::states[0]),
                         is_narrow ? " is bfloat16" : " is uint8",
                         ", which rounding to nearest would leave as it is; pass a number for each step");
        }
        if (is_random && shard.update != nullptr) refuse_value(name, "not None; LAMB rounds to nearest");
    }
}

template <typename Kind>
ReadShards<typename Kind::Hyper> read_shards(nb::handle objects) {
    const std::string kind = text(Kind::name, "Shard");
    ReadShards<typename Kind::Hyper> read;
    for (nb::handle object : objects) {
        ShardArrays arrays(object, text("shards[", read.shards.size(), ']'), kind, read.arrays);
        Shard<typename Kind::Hyper> shard{};
        const FlatArray& param = arrays.array("param", Kind::has_update ? param_rule : narrow_param_rule);
        shard.param = param.data;
        shard.param_dtype = param.dtype;
        const std::string lacking = read_states(
            arrays, Kind::states, std::size(Kind::states),
            {Kind::may_lack_states, Kind::has_eight_bits ? scaled_state_rule : state_rule}, shard.states,
            shard.state_dtype);
        if (shard.state_dtype == Dtype::eight_bits) arrays.read_scales(std::size(Kind::states), shard.scales);
        if (const FlatArray* out = arrays.array_or_none("param_out", out_rule)) {
            shard.param_out = out->data;
            shard.out_dtype = out->dtype;
        }
        if (Kind::has_update) shard.update = static_cast<float*>(arrays.array("update", param_rule).data);
        shard.grads = arrays.grads();
        shard.segments =
            read_segments<Kind>(arrays.field("segments"), arrays.name_of("segments"), arrays.numel(), lacking);
        check_roundings<Kind>(shard, arrays);
        if (shard.state_dtype == Dtype::eight_bits) check_blocks_are_whole(shard, arrays);
        read.shards.push_back(std::move(shard));
    }
    read.arrays.check_no_shared_memory();
    return read;
}

}  // namespace dslaunch
