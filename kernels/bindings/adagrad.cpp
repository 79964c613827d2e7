#include "shards.h"
#include "steps.h"

namespace dslaunch {
namespace {

AdagradHyper read_hyper(const Fields& fields) {
    const double step = fields.step();
    return AdagradHyper{fields.non_negative("lr"), fields.non_negative("lr_decay"), fields.non_negative("eps"),
                        fields.non_negative("weight_decay"), step};
}

ReadShards<AdagradHyper> read(nb::handle shards) {
    return read_shards<AdagradHyper>(shards, {"AdagradShard", "AdagradSegment", {"sum"}, read_hyper});
}

void step(nb::handle shards, double grad_scale, int num_threads) {
    const int threads = read_num_threads(num_threads);
    const double scale = read_grad_scale(grad_scale);
    const ReadShards<AdagradHyper> arguments = read(shards);
    nb::gil_scoped_release release;
    adagrad_step(arguments.shards, scale, threads);
}

void step_reference(nb::handle shards, double grad_scale) {
    const double scale = read_grad_scale(grad_scale);
    const ReadShards<AdagradHyper> arguments = read(shards);
    nb::gil_scoped_release release;
    adagrad_step_reference(arguments.shards, scale);
}

}  // namespace

void bind_adagrad(nb::module_& m) {
    using namespace nb::literals;
    m.def("adagrad_step", step, "shards"_a, nb::kw_only(), "grad_scale"_a, "num_threads"_a);
    m.def("adagrad_step_reference", step_reference, "shards"_a, nb::kw_only(), "grad_scale"_a);
}

}  // namespace dslaunch
