// The Python edge: read the arguments, refuse what the loops cannot take, release the GIL, call.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "build_bindings.h"
#include "cpu/flat.h"
#include "disk_bindings.h"

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
    std::string name;
    std::size_t place;            // among the arrays of one call
    nb::ndarray<nb::ro> owner;    // keeps the memory alive
    void* data;
    std::int64_t numel;
    bool is_bfloat16;

    std::uintptr_t begin() const { return reinterpret_cast<std::uintptr_t>(data); }
    std::uintptr_t end() const { return begin() + static_cast<std::uintptr_t>(numel) * (is_bfloat16 ? 2 : 4); }
};

nb::ndarray<nb::ro> import_array(const std::string& name, nb::handle object, bool is_written) {
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

// What an argument of this name may be.
struct ArrayRule {
    bool is_written;
    bool may_be_float;
    bool may_be_bfloat;
};

FlatArray flat_array(std::string name, std::size_t place, nb::handle object, ArrayRule rule) {
    const auto [is_written, may_be_float, may_be_bfloat] = rule;
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
    return FlatArray{std::move(name), place, array, data, numel, is_bfloat};
}

void check_no_shared_memory(const std::vector<FlatArray>& arrays) {
    std::vector<const FlatArray*> by_address;
    for (const FlatArray& array : arrays) {
        if (array.numel > 0) by_address.push_back(&array);
    }
    std::sort(by_address.begin(), by_address.end(),
              [](const FlatArray* a, const FlatArray* b) { return a->begin() < b->begin(); });
    const FlatArray* last = nullptr;
    for (const FlatArray* array : by_address) {
        if (last != nullptr && array->begin() < last->end()) {
            const bool is_in_order = last->place < array->place;
            const FlatArray& first = is_in_order ? *last : *array;
            const FlatArray& second = is_in_order ? *array : *last;
            refuse_value(second.name, ": shares memory with ", first.name, "; every array needs memory of its own");
        }
        last = array;
    }
}

// ---- numbers and segments --------------------------------------------------------------------------------

nb::object attribute(nb::handle owner, const char* field, const std::string& name, const char* kind) {
    if (!nb::hasattr(owner, field)) {
        refuse_type(name, ": a ", type_of(owner), " without '", field, "'; must be an ", kind);
    }
    return owner.attr(field);
}

template <typename T>
T number(nb::handle segment, const char* field, const std::string& name) {
    const nb::object object = attribute(segment, field, name, "AdamSegment");
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

void check_overlap(const std::vector<Segment>& segments, const std::string& name) {
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
            refuse_value(name, '[', order[k], "]: elements [", b.offset, ", ", b.offset + b.numel, ") overlap ", name,
                         '[', order[k - 1], "], elements [", a.offset, ", ", a.offset + a.numel, ")");
        }
    }
}

std::vector<Segment> read_segments(nb::handle objects, const std::string& name, std::int64_t shard_numel) {
    std::vector<Segment> segments;
    for (nb::handle object : objects) {
        segments.push_back(read_segment(object, text(name, '[', segments.size(), ']'), shard_numel));
    }
    check_overlap(segments, name);
    return segments;
}

int thread_count(int num_threads) {
    if (num_threads < 0) refuse_value("num_threads: ", num_threads, "; must be >= 0 (0: OpenMP's default)");
    return num_threads;
}

// ---- calls -----------------------------------------------------------------------------------------------

// The shards of one call, and what keeps their memory alive.
struct Shards {
    std::vector<AdamShard> shards;
    std::vector<FlatArray> arrays;
};

// Reads one object after another.
class ShardReader {
  public:
    void read(nb::handle object) {
        const std::string name = text("shards[", into_.shards.size(), ']');
        AdamShard shard{};
        std::int64_t numel = -1;
        const auto array = [&](const char* field, ArrayRule rule) {
            const FlatArray& added = add(text(name, '.', field), attribute(object, field, name, "AdamShard"), rule);
            if (numel >= 0 && added.numel != numel) {
                refuse_value(added.name, ": ", added.numel, " elements, but ", name, ".param has ", numel,
                             "; all arrays of one shard must have the same length");
            }
            numel = added.numel;
            return added.data;
        };
        shard.param = static_cast<float*>(array("param", {true, true, false}));
        shard.exp_avg = static_cast<float*>(array("exp_avg", {true, true, false}));
        shard.exp_avg_sq = static_cast<float*>(array("exp_avg_sq", {true, true, false}));
        if (!attribute(object, "param_out", name, "AdamShard").is_none()) {
            shard.param_out = static_cast<bfloat16*>(array("param_out", {true, false, true}));
        }
        shard.grads = grads(attribute(object, "grads", name, "AdamShard"), text(name, ".grads"), numel);
        shard.segments = read_segments(attribute(object, "segments", name, "AdamShard"), text(name, ".segments"), numel);
        into_.shards.push_back(std::move(shard));
    }

    Shards take() && {
        check_no_shared_memory(into_.arrays);
        return std::move(into_);
    }

  private:
    const FlatArray& add(const std::string& name, nb::handle object, ArrayRule rule) {
        return into_.arrays.emplace_back(flat_array(name, into_.arrays.size(), object, rule));
    }

    std::vector<GradArray> grads(nb::handle pieces, const std::string& name, std::int64_t shard_numel) {
        std::vector<GradArray> read;
        std::int64_t end = 0;
        for (nb::handle piece : pieces) {
            const std::string piece_name = text(name, '[', read.size(), ']');
            std::pair<std::int64_t, nb::object> offset_and_array;
            if (!nb::try_cast(piece, offset_and_array)) {
                refuse_type(piece_name, ": a ", type_of(piece), "; must be a pair of an offset and an array");
            }
            const auto& [offset, object] = offset_and_array;
            const FlatArray& array = add(piece_name, object, {false, true, true});
            if (offset < end || array.numel > shard_numel - offset) {
                refuse_value(piece_name, ": ", array.numel, " elements from ", offset, " on; must lie in [", end, ", ",
                             shard_numel, "), behind the piece before and inside the shard");
            }
            end = offset + array.numel;
            read.push_back(GradArray{offset, array.numel, array.data, array.is_bfloat16});
        }
        return read;
    }

    Shards into_;
};

Shards read_shards(nb::handle objects) {
    ShardReader reader;
    for (nb::handle object : objects) reader.read(object);
    return std::move(reader).take();
}

AdamOptions read_options(double grad_scale, bool adam_w_mode) {
    if (!std::isfinite(grad_scale)) refuse_value("grad_scale: ", grad_scale, "; must be finite");
    return AdamOptions{grad_scale, adam_w_mode};
}

void bound_step(nb::handle shards, double grad_scale, bool adam_w_mode, int num_threads) {
    const int threads = thread_count(num_threads);
    const AdamOptions options = read_options(grad_scale, adam_w_mode);
    const Shards read = read_shards(shards);
    nb::gil_scoped_release release;
    adamw_step(read.shards, options, threads);
}

void bound_step_reference(nb::handle shards, double grad_scale, bool adam_w_mode) {
    const AdamOptions options = read_options(grad_scale, adam_w_mode);
    const Shards read = read_shards(shards);
    nb::gil_scoped_release release;
    adamw_step_reference(read.shards, options);
}

double bound_squared_norm(nb::handle grads, int num_threads) {
    const int threads = thread_count(num_threads);
    std::vector<FlatArray> arrays;
    std::vector<GradArray> read;
    for (nb::handle grad : grads) {
        const FlatArray& array = arrays.emplace_back(
            flat_array(text("grads[", arrays.size(), ']'), arrays.size(), grad, {false, true, true}));
        read.push_back(GradArray{0, array.numel, array.data, array.is_bfloat16});
    }
    nb::gil_scoped_release release;
    return squared_norm(read, threads);
}

}  // namespace
}  // namespace dslaunch

NB_MODULE(_C, m) {
    using namespace nb::literals;
    m.def("adamw_step", dslaunch::bound_step, "shards"_a, nb::kw_only(), "grad_scale"_a, "adam_w_mode"_a,
          "num_threads"_a);
    m.def("adamw_step_reference", dslaunch::bound_step_reference, "shards"_a, nb::kw_only(), "grad_scale"_a,
          "adam_w_mode"_a);
    m.def("squared_norm", dslaunch::bound_squared_norm, "grads"_a, nb::kw_only(), "num_threads"_a);
    dslaunch::bind_build(m);
    dslaunch::bind_disk(m);
}
