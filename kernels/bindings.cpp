// The Python edge: read the arguments, refuse what the loops cannot take, release the GIL, call.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "cpu/flat.h"

namespace nb = nanobind;

namespace dslaunch {
namespace {

template <typename... Parts>
std::string text(const Parts&... parts) {
    std::ostringstream out;
    out.precision(15);
    (out << ... << parts);
    return out.str();
}

template <typename... Parts>
[[noreturn]] void refuse_value(const Parts&... parts) {
    throw nb::value_error(text(parts...).c_str());
}

template <typename... Parts>
[[noreturn]] void refuse_type(const Parts&... parts) {
    throw nb::type_error(text(parts...).c_str());
}

std::string type_of(nb::handle object) { return nb::type_name(object.type()).c_str(); }

// ---- arrays ----------------------------------------------------------------------------------------------

constexpr nb::dlpack::dtype float32_dtype{static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float), 32, 1};
constexpr nb::dlpack::dtype bfloat16_dtype{static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};

std::string dtype_name(nb::dlpack::dtype dtype) {
    using Code = nb::dlpack::dtype_code;
    const char* kind = "type";
    switch (static_cast<Code>(dtype.code)) {
        case Code::Int: kind = "int"; break;
        case Code::UInt: kind = "uint"; break;
        case Code::Float: kind = "float"; break;
        case Code::Bfloat: kind = "bfloat"; break;
        case Code::Complex: kind = "complex"; break;
        case Code::Bool: return "bool";
        default: break;
    }
    return text(kind, static_cast<int>(dtype.bits));
}

// An argument that passed every check that does not need the other arguments.
struct FlatArray {
    const char* name;
    nb::ndarray<nb::ro> owner;  // keeps the memory alive
    void* data;
    std::int64_t numel;
    bool is_bfloat16;

    std::uintptr_t begin() const { return reinterpret_cast<std::uintptr_t>(data); }
    std::uintptr_t end() const { return begin() + static_cast<std::uintptr_t>(numel) * (is_bfloat16 ? 2 : 4); }
};

nb::ndarray<nb::ro> import_array(const char* name, nb::handle object, bool is_written) {
    nb::ndarray<nb::ro> array;
    nb::ndarray<> writable;
    // torch itself refuses __dlpack__ here, but nanobind then finds another way in, past autograd.
    if (nb::cast<bool>(nb::bool_(nb::getattr(object, "requires_grad", nb::bool_(false))))) {
        refuse_value(name, ": the tensor requires grad; pass ", name, ".detach(), which has the same memory");
    }
    if (is_written && nb::try_cast(object, writable, false)) return nb::ndarray<nb::ro>(writable);
    if (!nb::try_cast(object, array, false)) {
        refuse_type(name, ": a ", type_of(object), " gives no access to its memory through DLPack; pass a CPU ",
                    "torch.Tensor (detached, if it requires grad) or a numpy array");
    }
    if (is_written) refuse_value(name, ": the array is read-only, but it is written; pass a writable one");
    return array;
}

FlatArray flat_array(const char* name, nb::handle object, bool is_written, bool may_be_float, bool may_be_bfloat) {
    const nb::ndarray<nb::ro> array = import_array(name, object, is_written);
    const int device = array.device_type();
    if (device != nb::device::cpu::value && device != nb::device::cuda_host::value) {
        refuse_value(name, ": the array is on a device (DLPack device type ", device, "); it must be in host memory");
    }
    const bool is_float = may_be_float && array.dtype() == float32_dtype;
    const bool is_bfloat = may_be_bfloat && array.dtype() == bfloat16_dtype;
    if (!is_float && !is_bfloat) {
        refuse_type(name, ": dtype ", dtype_name(array.dtype()), "; must be ", may_be_float ? "float32" : "",
                    may_be_float && may_be_bfloat ? " or " : "", may_be_bfloat ? "bfloat16" : "");
    }
    if (array.ndim() != 1) refuse_value(name, ": ", array.ndim(), " dimensions; must have 1: pass a flat view");
    const std::int64_t numel = static_cast<std::int64_t>(array.shape(0));
    if (numel > 1 && array.stride(0) != 1) {
        refuse_value(name, ": stride ", array.stride(0), "; must be 1: pass a contiguous array");
    }
    void* data = const_cast<void*>(array.data());
    if (reinterpret_cast<std::uintptr_t>(data) % (is_bfloat ? 2 : 4) != 0) {
        refuse_value(name, ": the address is not a multiple of the element size");
    }
    return FlatArray{name, array, data, numel, is_bfloat};
}

void check_together(const std::vector<const FlatArray*>& arrays) {
    const FlatArray& first = *arrays.front();
    for (const FlatArray* array : arrays) {
        if (array->numel != first.numel) {
            refuse_value(array->name, ": ", array->numel, " elements, but ", first.name, " has ", first.numel,
                         "; all arrays of one call must have the same length");
        }
    }
    for (std::size_t i = 0; i < arrays.size(); ++i) {
        for (std::size_t j = i + 1; j < arrays.size(); ++j) {
            const FlatArray& a = *arrays[i];
            const FlatArray& b = *arrays[j];
            if (a.begin() < b.end() && b.begin() < a.end()) {
                refuse_value(b.name, ": shares memory with ", a.name, "; every array needs memory of its own");
            }
        }
    }
}

// ---- numbers and segments --------------------------------------------------------------------------------

template <typename T>
T number(nb::handle segment, const char* field, const std::string& name) {
    if (!nb::hasattr(segment, field)) {
        refuse_type(name, ": a ", type_of(segment), " without '", field, "'; must be an AdamSegment");
    }
    const nb::object object = segment.attr(field);
    T value;
    if (!nb::try_cast(object, value)) {
        refuse_type(name, '.', field, ": ", nb::repr(object).c_str(), "; must be ",
                    std::is_integral_v<T> ? "an int that fits in 64 bits" : "a float");
    }
    return value;
}

double non_negative(nb::handle segment, const char* field, const std::string& name) {
    const double value = number<double>(segment, field, name);
    if (!(value >= 0.0) || std::isinf(value)) refuse_value(name, '.', field, ": ", value, "; must be finite and >= 0");
    return value;
}

double beta(nb::handle segment, const char* field, const std::string& name) {
    const double value = number<double>(segment, field, name);
    if (!(value >= 0.0 && value < 1.0)) refuse_value(name, '.', field, ": ", value, "; must be in [0, 1)");
    return value;
}

Segment read_segment(nb::handle segment, const std::string& name, std::int64_t shard_numel) {
    const auto offset = number<std::int64_t>(segment, "offset", name);
    const auto numel = number<std::int64_t>(segment, "numel", name);
    if (offset < 0 || numel < 0 || offset > shard_numel || numel > shard_numel - offset) {
        refuse_value(name, ": offset ", offset, " and numel ", numel, " do not fit in the shard of ", shard_numel,
                     " elements");
    }
    const auto step = number<std::int64_t>(segment, "step", name);
    if (step < 1) refuse_value(name, ".step: ", step, "; must be >= 1: the first step is step 1");
    return Segment{offset, numel,
                   AdamHyper{non_negative(segment, "lr", name), beta(segment, "beta1", name),
                             beta(segment, "beta2", name), non_negative(segment, "eps", name),
                             non_negative(segment, "weight_decay", name), static_cast<double>(step)}};
}

void check_overlap(const std::vector<Segment>& segments) {
    std::vector<std::size_t> order(segments.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    order.erase(std::remove_if(order.begin(), order.end(), [&](std::size_t i) { return segments[i].numel == 0; }),
                order.end());
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return segments[a].offset < segments[b].offset; });
    for (std::size_t k = 1; k < order.size(); ++k) {
        const Segment& a = segments[order[k - 1]];
        const Segment& b = segments[order[k]];
        if (b.offset < a.offset + a.numel) {
            refuse_value("segments[", order[k], "]: elements [", b.offset, ", ", b.offset + b.numel,
                         ") overlap segments[", order[k - 1], "], elements [", a.offset, ", ", a.offset + a.numel, ")");
        }
    }
}

std::vector<Segment> read_segments(nb::handle objects, std::int64_t shard_numel) {
    std::vector<Segment> segments;
    for (nb::handle object : objects) {
        segments.push_back(read_segment(object, text("segments[", segments.size(), ']'), shard_numel));
    }
    check_overlap(segments);
    return segments;
}

int thread_count(int num_threads) {
    if (num_threads < 0) refuse_value("num_threads: ", num_threads, "; must be >= 0 (0: OpenMP's default)");
    return num_threads;
}

// ---- calls -----------------------------------------------------------------------------------------------

template <typename Step>
void checked_step(nb::handle param, nb::handle grad, nb::handle exp_avg, nb::handle exp_avg_sq, nb::handle segments,
                  nb::handle param_out, double grad_scale, bool adam_w_mode, const Step& step) {
    if (!std::isfinite(grad_scale)) refuse_value("grad_scale: ", grad_scale, "; must be finite");
    const FlatArray p = flat_array("param", param, true, true, false);
    const FlatArray g = flat_array("grad", grad, false, true, true);
    const FlatArray m = flat_array("exp_avg", exp_avg, true, true, false);
    const FlatArray v = flat_array("exp_avg_sq", exp_avg_sq, true, true, false);
    FlatArray out{};
    std::vector<const FlatArray*> arrays{&p, &g, &m, &v};
    if (!param_out.is_none()) {
        out = flat_array("param_out", param_out, true, false, true);
        arrays.push_back(&out);
    }
    check_together(arrays);
    const std::vector<Segment> cut = read_segments(segments, p.numel);
    const FlatAdam flat{static_cast<float*>(p.data),
                        g.data,
                        g.is_bfloat16,
                        static_cast<float*>(m.data),
                        static_cast<float*>(v.data),
                        static_cast<bfloat16*>(out.data),
                        grad_scale,
                        adam_w_mode};
    nb::gil_scoped_release release;
    step(flat, cut);
}

void bound_step(nb::handle param, nb::handle grad, nb::handle exp_avg, nb::handle exp_avg_sq, nb::handle segments,
                double grad_scale, bool adam_w_mode, nb::handle param_out, int num_threads) {
    const int threads = thread_count(num_threads);
    checked_step(param, grad, exp_avg, exp_avg_sq, segments, param_out, grad_scale, adam_w_mode,
                 [&](const FlatAdam& flat, const std::vector<Segment>& cut) { adamw_step(flat, cut, threads); });
}

void bound_step_reference(nb::handle param, nb::handle grad, nb::handle exp_avg, nb::handle exp_avg_sq,
                          nb::handle segments, double grad_scale, bool adam_w_mode, nb::handle param_out) {
    checked_step(param, grad, exp_avg, exp_avg_sq, segments, param_out, grad_scale, adam_w_mode, adamw_step_reference);
}

double bound_squared_norm(nb::handle grad, int num_threads) {
    const int threads = thread_count(num_threads);
    const FlatArray g = flat_array("grad", grad, false, true, true);
    nb::gil_scoped_release release;
    return g.is_bfloat16 ? squared_norm(static_cast<const bfloat16*>(g.data), g.numel, threads)
                         : squared_norm(static_cast<const float*>(g.data), g.numel, threads);
}

}  // namespace
}  // namespace dslaunch

NB_MODULE(_C, m) {
    using namespace nb::literals;
    m.def("adamw_step", dslaunch::bound_step, "param"_a, "grad"_a, "exp_avg"_a, "exp_avg_sq"_a, "segments"_a,
          nb::kw_only(), "grad_scale"_a, "adam_w_mode"_a, "param_out"_a.none(), "num_threads"_a);
    m.def("adamw_step_reference", dslaunch::bound_step_reference, "param"_a, "grad"_a, "exp_avg"_a, "exp_avg_sq"_a,
          "segments"_a, nb::kw_only(), "grad_scale"_a, "adam_w_mode"_a, "param_out"_a.none());
    m.def("squared_norm", dslaunch::bound_squared_norm, "grad"_a, nb::kw_only(), "num_threads"_a);
}
