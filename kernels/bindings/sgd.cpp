#include "shards.h"
#include "steps.h"

namespace dslaunch {
namespace {

SgdHyper read_hyper(const Fields& fields) {
    const double step = fields.step();
    const SgdHyper hyper{fields.non_negative("lr"), fields.non_negative("momentum"), fields.finite("dampening"),
                         fields.non_negative("weight_decay"), step, fields.number<bool>("nesterov")};
    if (hyper.nesterov && !(hyper.momentum > 0.0 && hyper.dampening == 0.0)) {
        refuse_value(fields.name(), ".nesterov: True, with momentum ", hyper.momentum, " and dampening ",
                     hyper.dampening, "; needs momentum above 0 and dampening 0");
    }
    return hyper;
}

ReadShards<SgdHyper> read(nb::handle shards) {
    auto arguments = read_shards<SgdHyper>(shards, {"SgdShard", "SgdSegment", {"momentum_buffer"}, read_hyper, true});
    for (std::size_t i = 0; i < arguments.shards.size(); ++i) {
        const Shard<SgdHyper>& shard = arguments.shards[i];
        for (std::size_t k = 0; k < shard.segments.size() && shard.states[0] == nullptr; ++k) {
            const double momentum = shard.segments[k].hyper.momentum;
            if (momentum == 0.0 || shard.segments[k].numel == 0) continue;
            refuse_value("shards[", i, "].momentum_buffer: None, but shards[", i, "].segments[", k, "] has momentum ",
                         momentum, "; pass an array, of zeros before step 1");
        }
    }
    return arguments;
}

void step(nb::handle shards, double grad_scale, int num_threads) {
    const int threads = read_num_threads(num_threads);
    const double scale = read_grad_scale(grad_scale);
    const ReadShards<SgdHyper> arguments = read(shards);
    nb::gil_scoped_release release;
    sgd_step(arguments.shards, scale, threads);
}

void step_reference(nb::handle shards, double grad_scale) {
    const double scale = read_grad_scale(grad_scale);
    const ReadShards<SgdHyper> arguments = read(shards);
    nb::gil_scoped_release release;
    sgd_step_reference(arguments.shards, scale);
}

}  // namespace

void bind_sgd(nb::module_& m) {
    using namespace nb::literals;
    m.def("sgd_step", step, "shards"_a, nb::kw_only(), "grad_scale"_a, "num_threads"_a);
    m.def("sgd_step_reference", step_reference, "shards"_a, nb::kw_only(), "grad_scale"_a);
}

}  // namespace dslaunch
