#include "shards.h"
#include "steps.h"

namespace dslaunch {
namespace {

AdamHyper read_hyper(const Fields& fields) {
    const double step = fields.step();
    return AdamHyper{fields.non_negative("lr"),  fields.beta("beta1"),
                     fields.beta("beta2"),       fields.non_negative("eps"),
                     fields.non_negative("weight_decay"), step};
}

ReadShards<AdamHyper> read(nb::handle shards) {
    return read_shards<AdamHyper>(shards, {"AdamShard", "AdamSegment", {"exp_avg", "exp_avg_sq"}, read_hyper});
}

void step(nb::handle shards, double grad_scale, bool adam_w_mode, int num_threads) {
    const int threads = read_num_threads(num_threads);
    const AdamOptions options{read_grad_scale(grad_scale), adam_w_mode};
    const ReadShards<AdamHyper> arguments = read(shards);
    nb::gil_scoped_release release;
    adamw_step(arguments.shards, options, threads);
}

void step_reference(nb::handle shards, double grad_scale, bool adam_w_mode) {
    const AdamOptions options{read_grad_scale(grad_scale), adam_w_mode};
    const ReadShards<AdamHyper> arguments = read(shards);
    nb::gil_scoped_release release;
    adamw_step_reference(arguments.shards, options);
}

}  // namespace

void bind_adam(nb::module_& m) {
    using namespace nb::literals;
    m.def("adamw_step", step, "shards"_a, nb::kw_only(), "grad_scale"_a, "adam_w_mode"_a, "num_threads"_a);
    m.def("adamw_step_reference", step_reference, "shards"_a, nb::kw_only(), "grad_scale"_a, "adam_w_mode"_a);
}

}  // namespace dslaunch
