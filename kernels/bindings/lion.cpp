#include "shards.h"
#include "steps.h"

namespace dslaunch {
namespace {

LionHyper read_hyper(const Fields& fields) {
    return LionHyper{fields.non_negative("lr"), fields.beta("beta1"), fields.beta("beta2"),
                     fields.non_negative("weight_decay")};
}

ReadShards<LionHyper> read(nb::handle shards) {
    return read_shards<LionHyper>(shards, {"LionShard", "LionSegment", {"exp_avg"}, read_hyper});
}

void step(nb::handle shards, double grad_scale, int num_threads) {
    const int threads = read_num_threads(num_threads);
    const double scale = read_grad_scale(grad_scale);
    const ReadShards<LionHyper> arguments = read(shards);
    nb::gil_scoped_release release;
    lion_step(arguments.shards, scale, threads);
}

void step_reference(nb::handle shards, double grad_scale) {
    const double scale = read_grad_scale(grad_scale);
    const ReadShards<LionHyper> arguments = read(shards);
    nb::gil_scoped_release release;
    lion_step_reference(arguments.shards, scale);
}

}  // namespace

void bind_lion(nb::module_& m) {
    using namespace nb::literals;
    m.def("lion_step", step, "shards"_a, nb::kw_only(), "grad_scale"_a, "num_threads"_a);
    m.def("lion_step_reference", step_reference, "shards"_a, nb::kw_only(), "grad_scale"_a);
}

}  // namespace dslaunch
