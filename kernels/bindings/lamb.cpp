#include <nanobind/stl/vector.h>

#include "shards.h"
#include "steps.h"

namespace dslaunch {
namespace {

// A segment's sums of squares, of the parameter and of the direction, as Python has them.
using Sums = std::vector<std::pair<double, double>>;

Sums as_pairs(const std::vector<LambSums>& sums) {
    Sums pairs;
    for (const LambSums& of_segment : sums) pairs.emplace_back(of_segment.param_square, of_segment.update_square);
    return pairs;
}

std::vector<LambSums> read_sums(nb::handle pairs, const Shards<LambHyper>& shards) {
    std::vector<LambSums> sums;
    for (nb::handle object : pairs) {
        std::pair<double, double> pair;
        if (!nb::try_cast(object, pair)) {
            refuse_type("sums[", sums.size(), "]: ", nb::repr(object).c_str(), "; must be a pair of floats");
        }
        sums.push_back({pair.first, pair.second});
    }
    std::size_t num_segments = 0;
    for (const Shard<LambHyper>& shard : shards) num_segments += shard.segments.size();
    if (sums.size() != num_segments) {
        refuse_value("sums: ", sums.size(), " pairs, but the shards have ", num_segments,
                     " segments; must be as many, in the same order");
    }
    return sums;
}

Sums directions(nb::handle shards, double grad_scale, bool eps_inside_sqrt, int num_threads) {
    const int threads = read_num_threads(num_threads);
    const StepOptions options{read_grad_scale(grad_scale), eps_inside_sqrt};
    const ReadShards<LambHyper> arguments = read_shards<Lamb>(shards);
    nb::gil_scoped_release release;
    return as_pairs(lamb_directions(arguments.shards, options, threads));
}

Sums directions_reference(nb::handle shards, double grad_scale, bool eps_inside_sqrt) {
    const StepOptions options{read_grad_scale(grad_scale), eps_inside_sqrt};
    const ReadShards<LambHyper> arguments = read_shards<Lamb>(shards);
    nb::gil_scoped_release release;
    return as_pairs(lamb_directions_reference(arguments.shards, options));
}

void apply(nb::handle shards, nb::handle sums, bool bias_correction, int num_threads) {
    const int threads = read_num_threads(num_threads);
    const ReadShards<LambHyper> arguments = read_shards<Lamb>(shards);
    const std::vector<LambSums> of_segments = read_sums(sums, arguments.shards);
    nb::gil_scoped_release release;
    lamb_apply(arguments.shards, of_segments, bias_correction, threads);
}

void apply_reference(nb::handle shards, nb::handle sums, bool bias_correction) {
    const ReadShards<LambHyper> arguments = read_shards<Lamb>(shards);
    const std::vector<LambSums> of_segments = read_sums(sums, arguments.shards);
    nb::gil_scoped_release release;
    lamb_apply_reference(arguments.shards, of_segments, bias_correction);
}

}  // namespace

void bind_lamb(nb::module_& m) {
    using namespace nb::literals;
    m.def("lamb_directions", directions, "shards"_a, nb::kw_only(), "grad_scale"_a, "eps_inside_sqrt"_a,
          "num_threads"_a);
    m.def("lamb_directions_reference", directions_reference, "shards"_a, nb::kw_only(), "grad_scale"_a,
          "eps_inside_sqrt"_a);
    m.def("lamb_apply", apply, "shards"_a, "sums"_a, nb::kw_only(), "bias_correction"_a, "num_threads"_a);
    m.def("lamb_apply_reference", apply_reference, "shards"_a, "sums"_a, nb::kw_only(), "bias_correction"_a);
}

}  // namespace dslaunch
