// The shards of one call: what every optimizer's step reads from Python, whatever its states are called.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <iterator>
#include <string>
#include <utility>
#include <vector>

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
    std::vector<GradArray> grads();

  private:
    nb::handle object_;
    std::string name_;
    const std::string& kind_;
    Arrays& arrays_;
    std::int64_t numel_ = -1;
};

// Reads the states into a shard; all of one dtype. Returns the name of one that is None, if any is.
std::string read_states(ShardArrays& arrays, const char* const* names, std::size_t num_states, bool may_lack_states,
                        void** states, Dtype& dtype);

template <typename Kind>
ReadShards<typename Kind::Hyper> read_shards(nb::handle objects) {
    const std::string kind = text(Kind::name, "Shard");
    ReadShards<typename Kind::Hyper> read;
    for (nb::handle object : objects) {
        ShardArrays arrays(object, text("shards[", read.shards.size(), ']'), kind, read.arrays);
        Shard<typename Kind::Hyper> shard{};
        shard.param = static_cast<float*>(arrays.array("param", param_rule).data);
        const std::string lacking = read_states(arrays, Kind::states, std::size(Kind::states), Kind::may_lack_states,
                                                shard.states, shard.state_dtype);
        if (const FlatArray* out = arrays.array_or_none("param_out", out_rule)) {
            shard.param_out = out->data;
            shard.out_dtype = out->dtype;
        }
        if (Kind::has_update) shard.update = static_cast<float*>(arrays.array("update", param_rule).data);
        shard.grads = arrays.grads();
        shard.segments =
            read_segments<Kind>(arrays.field("segments"), arrays.name_of("segments"), arrays.numel(), lacking);
        read.shards.push_back(std::move(shard));
    }
    read.arrays.check_no_shared_memory();
    return read;
}

}  // namespace dslaunch
