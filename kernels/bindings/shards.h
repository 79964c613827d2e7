// The shards of one call: what every optimizer's step reads from Python, whatever its states are called.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include <string>
#include <utility>
#include <vector>

#include "arrays.h"
#include "segments.h"

namespace dslaunch {

// What an optimizer's shards consist of.
template <typename Hyper>
struct ShardKind {
    const char* name;          // of the Python class
    const char* segment_name;  // of its segments' class
    std::vector<const char*> states;
    Hyper (*read_hyper)(const Fields&);
    bool may_lack_states = false;  // None says that there are none
    bool has_update = false;
};

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
    ShardArrays(nb::handle object, std::string name, const char* kind, Arrays& arrays)
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
    const char* kind_;
    Arrays& arrays_;
    std::int64_t numel_ = -1;
};

// Reads the states into a shard; all of one dtype.
void read_states(ShardArrays& arrays, const std::vector<const char*>& names, bool may_lack_states, void** states,
                 Dtype& dtype);

template <typename Hyper>
ReadShards<Hyper> read_shards(nb::handle objects, const ShardKind<Hyper>& kind) {
    ReadShards<Hyper> read;
    for (nb::handle object : objects) {
        ShardArrays arrays(object, text("shards[", read.shards.size(), ']'), kind.name, read.arrays);
        Shard<Hyper> shard{};
        shard.param = static_cast<float*>(arrays.array("param", param_rule).data);
        read_states(arrays, kind.states, kind.may_lack_states, shard.states, shard.state_dtype);
        if (const FlatArray* out = arrays.array_or_none("param_out", out_rule)) {
            shard.param_out = out->data;
            shard.out_dtype = out->dtype;
        }
        if (kind.has_update) shard.update = static_cast<float*>(arrays.array("update", param_rule).data);
        shard.grads = arrays.grads();
        shard.segments = read_segments<Hyper>(arrays.field("segments"), arrays.name_of("segments"), kind.segment_name,
                                              arrays.numel(), kind.read_hyper);
        read.shards.push_back(std::move(shard));
    }
    read.arrays.check_no_shared_memory();
    return read;
}

}  // namespace dslaunch
