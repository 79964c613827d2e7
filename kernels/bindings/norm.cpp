#include "arrays.h"
#include "shards.h"
#include "steps.h"

namespace dslaunch {
namespace {

double norm(nb::handle grads, int num_threads) {
    const int threads = read_num_threads(num_threads);
    Arrays arrays;
    std::vector<GradArray> read;
    for (nb::handle grad : grads) {
        const FlatArray& array = arrays.add(text("grads[", read.size(), ']'), grad, grad_rule);
        read.push_back(GradArray{0, array.numel, array.data, array.dtype});
    }
    nb::gil_scoped_release release;
    return squared_norm(read, threads);
}

}  // namespace

void bind_norm(nb::module_& m) {
    using namespace nb::literals;
    m.def("squared_norm", norm, "grads"_a, nb::kw_only(), "num_threads"_a);
}

}  // namespace dslaunch
