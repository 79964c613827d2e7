#include "arrays.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "refusal.h"

namespace dslaunch {
namespace {

using Code = nb::dlpack::dtype_code;

constexpr Dtype all_dtypes[] = {Dtype::float32, Dtype::bfloat16, Dtype::float16, Dtype::eight_bits};

std::optional<Dtype> known(nb::dlpack::dtype dtype) {
    const auto is = [&](Code code, int bits) {
        return static_cast<Code>(dtype.code) == code && dtype.bits == bits && dtype.lanes == 1;
    };
    if (is(Code::Float, 32)) return Dtype::float32;
    if (is(Code::Bfloat, 16)) return Dtype::bfloat16;
    if (is(Code::Float, 16)) return Dtype::float16;
    if (is(Code::UInt, 8)) return Dtype::eight_bits;
    return std::nullopt;
}

std::string name_of(nb::dlpack::dtype dtype) {
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

bool allows(ArrayRule rule, Dtype dtype) { return (rule.dtypes >> static_cast<unsigned>(dtype) & 1u) != 0; }

std::string names_of(ArrayRule rule) {
    std::vector<std::string> names;
    for (const Dtype dtype : all_dtypes) {
        if (allows(rule, dtype)) names.emplace_back(dtype_name(dtype));
    }
    std::string all;
    for (std::size_t i = 0; i < names.size(); ++i) {
        all += (i == 0 ? "" : i + 1 == names.size() ? " or " : ", ") + names[i];
    }
    return all;
}

// The attribute of a module that is loaded already; null if it is not.
nb::object loaded(const char* module_name, const char* name) {
    const nb::object module = nb::steal(PyImport_GetModule(nb::str(module_name).ptr()));
    if (!module.is_valid()) {
        PyErr_Clear();
        return nb::object();
    }
    return nb::getattr(module, name, nb::object());
}

void check_requires_no_grad(const std::string& name, nb::handle object) {
    // torch itself refuses __dlpack__ here, but nanobind then finds another way in, past autograd.
    if (nb::cast<bool>(nb::bool_(nb::getattr(object, "requires_grad", nb::bool_(false))))) {
        refuse_value(name, ": the tensor requires grad; pass ", name, ".detach(), which has the same memory");
    }
}

nb::ndarray<nb::ro> import_array(const std::string& name, nb::handle object, bool is_written) {
    nb::ndarray<nb::ro> array;
    nb::ndarray<> writable;
    if (is_written && nb::try_cast(object, writable, false)) return nb::ndarray<nb::ro>(writable);
    if (!nb::try_cast(object, array, false)) {
        refuse_type(name, ": a ", type_of(object), " gives no access to its memory through DLPack; pass a CPU ",
                    "torch.Tensor (detached, if it requires grad) or a numpy array");
    }
    if (is_written) refuse_value(name, ": the array is read-only, but it is written; pass a writable one");
    return array;
}

}  // namespace

const char* dtype_name(Dtype dtype) {
    switch (dtype) {
        case Dtype::bfloat16: return "bfloat16";
        case Dtype::float16: return "float16";
        case Dtype::eight_bits: return "uint8";
        default: return "float32";
    }
}

Arrays::Arrays() : tensor_type_(loaded("torch", "Tensor")), to_dlpack_(loaded("torch.utils.dlpack", "to_dlpack")) {}

// Returns the object to import in place of the given one. torch.Tensor.__dlpack__ is Python, and most of a call
// on small parameters; the function below it lends the same memory in a fraction of the time.
nb::object Arrays::lent(nb::handle object) const {
    if (to_dlpack_.is_valid() && object.type().is(tensor_type_)) {
        try {
            return to_dlpack_(object);
        } catch (nb::python_error&) {  // the code that imports the tensor itself says it in our words
        }
    }
    return nb::borrow(object);
}

const FlatArray& Arrays::add(std::string name, nb::handle object, ArrayRule rule) {
    check_requires_no_grad(name, object);
    nb::ndarray<nb::ro> array;
    const nb::object capsule = lent(object);
    if (capsule.is(object) || !nb::try_cast(capsule, array, false)) array = import_array(name, object, rule.is_written);
    const int device = array.device_type();
    if (device != nb::device::cpu::value && device != nb::device::cuda_host::value) {
        refuse_value(name, ": the array is on a device (DLPack device type ", device, "); it must be in host memory");
    }
    const std::optional<Dtype> dtype = known(array.dtype());
    if (!dtype || !allows(rule, *dtype)) {
        refuse_type(name, ": dtype ", name_of(array.dtype()), "; must be ", names_of(rule));
    }
    if (array.ndim() != 1) refuse_value(name, ": ", array.ndim(), " dimensions; must have 1: pass a flat view");
    const std::int64_t numel = static_cast<std::int64_t>(array.shape(0));
    if (numel > 1 && array.stride(0) != 1) {
        refuse_value(name, ": stride ", array.stride(0), "; must be 1: pass a contiguous array");
    }
    FlatArray added{std::move(name), arrays_.size(), array, const_cast<void*>(array.data()), numel, *dtype};
    if (added.begin() % added.element_bytes() != 0) {
        refuse_value(added.name, ": the address is not a multiple of the element size");
    }
    return arrays_.emplace_back(std::move(added));
}

void Arrays::check_no_shared_memory() const {
    std::vector<const FlatArray*> by_address;
    for (const FlatArray& array : arrays_) {
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

}  // namespace dslaunch
