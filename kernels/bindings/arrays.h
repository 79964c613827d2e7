// Arrays that Python lends to a call, through DLPack.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>
#include <vector>

#include "../cpu/flat.h"

namespace nb = nanobind;

namespace dslaunch {

// Rule for an argument of this name. Dtypes are those of `Dtype`, in that order, as bits.
struct ArrayRule {
    bool is_written;
    unsigned dtypes;
};

constexpr unsigned float32_bit = 1, bfloat16_bit = 2, float16_bit = 4, eight_bits_bit = 8;
constexpr ArrayRule param_rule{true, float32_bit};
constexpr ArrayRule narrow_param_rule{true, float32_bit | bfloat16_bit};
constexpr ArrayRule state_rule{true, float32_bit | bfloat16_bit};
constexpr ArrayRule scaled_state_rule{true, float32_bit | bfloat16_bit | eight_bits_bit};
constexpr ArrayRule grad_rule{false, float32_bit | bfloat16_bit | float16_bit};
constexpr ArrayRule out_rule{true, float32_bit | bfloat16_bit | float16_bit};

// An argument that passed every check that does not need the other arguments.
struct FlatArray {
    std::string name;
    std::size_t place;          // among the arrays of one call
    nb::ndarray<nb::ro> owner;  // keeps the memory alive
    void* data;
    std::int64_t numel;
    Dtype dtype;

    std::uintptr_t begin() const { return reinterpret_cast<std::uintptr_t>(data); }
    std::uintptr_t end() const { return begin() + static_cast<std::uintptr_t>(numel) * element_bytes(); }
    std::uintptr_t element_bytes() const { return dtype == Dtype::float32 ? 4 : dtype == Dtype::eight_bits ? 1 : 2; }
};

const char* dtype_name(Dtype dtype);

// All arrays of one call.
class Arrays {
  public:
    Arrays();

    // The reference holds until the next call.
    const FlatArray& add(std::string name, nb::handle object, ArrayRule rule);

    void check_no_shared_memory() const;

  private:
    nb::object lent(nb::handle object) const;

    // torch.Tensor and the function that lends its memory; null where torch is not loaded
    nb::object tensor_type_;
    nb::object to_dlpack_;
    std::vector<FlatArray> arrays_;
};

}  // namespace dslaunch
