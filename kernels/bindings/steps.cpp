// One step of any optimizer, and what the CUDA kernels need to know of its segments. An optimizer is known by
// its name: a line of the list below.

#include <nanobind/stl/string.h>

#include "../adagrad.h"
#include "../adam.h"
#include "../lion.h"
#include "../sgd.h"
#include "shards.h"
#include "steps.h"

#define DSLAUNCH_ELEMENTWISE(X) X(Adam) X(Lion) X(Adagrad) X(Sgd)

namespace dslaunch {

DSLAUNCH_ELEMENTWISE(DSLAUNCH_DECLARE_CPU_STEP)

namespace {

constexpr int plain = -1;  // in place of a number of threads: the reference

template <typename Kind>
void step(nb::handle shards, const StepOptions& options, int num_threads) {
    const auto arguments = read_shards<Kind>(shards);
    nb::gil_scoped_release release;
    num_threads == plain ? cpu_step_reference(Kind(), arguments.shards, options)
                         : cpu_step(Kind(), arguments.shards, options, num_threads);
}

template <typename Kind, int mode = 0>
int num_states_in(int wanted) {
    if constexpr (mode + 1 < Kind::num_modes) {
        if (wanted != mode) return num_states_in<Kind, mode + 1>(wanted);
    }
    return Kind::template num_states<mode>;
}

struct SegmentsOfShard {
    nb::handle objects;
    std::string name;
    std::int64_t shard_numel;
    std::string lacking;
};

using Packed = nb::typed<nb::tuple, int, int, nb::bytes, int, int>;

template <typename Kind>
nb::list pack(const SegmentsOfShard& of, const StepOptions& options) {
    nb::list packed;
    for (const auto& segment : read_segments<Kind>(of.objects, of.name, of.shard_numel, of.lacking)) {
        const int mode = Kind::mode_of(segment.hyper, options.mode);
        const auto c = Kind::coefficients(segment.hyper, mode, options.grad_scale);
        packed.append(nb::make_tuple(segment.offset, segment.numel, nb::bytes(&c, sizeof c), mode,
                                     num_states_in<Kind>(mode)));
    }
    return packed;
}

struct Named {
    const char* name;
    int num_modes;
    void (*step)(nb::handle, const StepOptions&, int);  // null: it has calls of its own
    nb::list (*pack)(const SegmentsOfShard&, const StepOptions&);
};

#define DSLAUNCH_NAMED(Kind) {Kind::name, Kind::num_modes, step<Kind>, pack<Kind>},

const Named all[] = {DSLAUNCH_ELEMENTWISE(DSLAUNCH_NAMED){Lamb::name, Lamb::num_modes, nullptr, pack<Lamb>}};

const Named& find(const std::string& name, int mode) {
    for (const Named& one : all) {
        if (name != one.name) continue;
        if (mode < 0 || mode >= one.num_modes) {
            refuse_value("mode: ", mode, "; ", name, " has the modes 0 to ", one.num_modes - 1);
        }
        return one;
    }
    refuse_value("optimizer: '", name, "'; not one of those in kernels/bindings/steps.cpp");
}

const Named& find_elementwise(const std::string& name, int mode) {
    const Named& found = find(name, mode);
    if (found.step == nullptr) refuse_value("optimizer: '", name, "' steps in two passes, by calls of its own");
    return found;
}

void any_step(const std::string& optimizer, nb::handle shards, double grad_scale, int mode, int num_threads) {
    const int threads = read_num_threads(num_threads);
    find_elementwise(optimizer, mode).step(shards, {read_grad_scale(grad_scale), mode}, threads);
}

void any_step_reference(const std::string& optimizer, nb::handle shards, double grad_scale, int mode) {
    find_elementwise(optimizer, mode).step(shards, {read_grad_scale(grad_scale), mode}, plain);
}

nb::typed<nb::list, Packed> pack_segments(const std::string& optimizer, nb::handle segments, const std::string& name,
                                          std::int64_t shard_numel, const std::string& lacking, double grad_scale,
                                          int mode) {
    return find(optimizer, mode).pack({segments, name, shard_numel, lacking}, {read_grad_scale(grad_scale), mode});
}

}  // namespace

void bind_steps(nb::module_& m) {
    using namespace nb::literals;
    m.def("step", any_step, "optimizer"_a, "shards"_a, nb::kw_only(), "grad_scale"_a, "mode"_a, "num_threads"_a);
    m.def("step_reference", any_step_reference, "optimizer"_a, "shards"_a, nb::kw_only(), "grad_scale"_a, "mode"_a);
    m.def("pack_segments", pack_segments, "optimizer"_a, "segments"_a, nb::kw_only(), "name"_a, "shard_numel"_a,
          "lacking"_a, "grad_scale"_a, "mode"_a);
}

}  // namespace dslaunch
