"""Packed parameters: weights that a library has quantized, with scales beside them in objects of its own.

Packed bits are moved and sent as they are, never converted. A tensor of the library's that grows with the
weights is a *part* of the parameter: a parameter without a gradient takes its place, lies in the same unit,
and comes and goes with it. Its name is that of the library's own files. What does not grow stays whole.
No library is imported: classes are found by their names. Weights of torchao consist of parts alone: see
wrapped.py.

Source: bitsandbytes 0.50.2, nn/modules.py (Params4bit, Int8Params, Linear4bit, Linear8bitLt) and
        functional.py (QuantState)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import ConfigError
from .wrapped import check_wrapped, inner_tensors, is_wrapped, leaves_of, move_wrapped

_BITSANDBYTES = "bitsandbytes"


@dataclass(slots=True)
class Packed:
    """Tensors that belong to one parameter of a dtype that stays."""

    parts: dict[str, nn.Parameter] = field(default_factory=dict)  # name in the model -> its values
    aliases: list[nn.Parameter] = field(default_factory=list)  # other names of the parameter's own values
    whole: dict[str, Tensor] = field(default_factory=dict)  # small, equal on all ranks, by name


PackedOf = Mapping[int, Packed]  # id of a parameter whose dtype stays -> what belongs to it


def lies_in_unit(param: nn.Parameter) -> bool:
    """Return whether a unit holds the parameter, or its parts: a number with a fraction, or packed bits."""
    with torch._C.DisableTorchFunctionSubclass():
        return param.is_floating_point() or is_bits(param.dtype) or _kind_of(param) is not None


def is_bits(dtype: torch.dtype) -> bool:
    """Return whether elements are bytes that no precision converts: integers and floats of 8 bits."""
    return dtype.itemsize == 1 and dtype is not torch.bool


def find_packed(module: nn.Module, *, device: torch.device) -> dict[int, Packed]:
    """Return what belongs to each packed parameter, by its id. What the library packs when a module is moved
    to a device is packed first; scales are parameters in the library's objects from then on.

    Errors: ConfigError for a parameter that is packed for one kind of processor
    """
    found: dict[int, Packed] = {}
    for path, owner in module.named_modules():
        for key, param in owner._parameters.items():
            kind = None if param is None else _kind_of(param)
            if param is None or kind is None:
                continue
            if id(param) not in found:
                found[id(param)] = Packed()
            kind(found[id(param)], owner, f"{path}.{key}" if path else key, param, device)
            bias = _converted_bias(owner)
            if bias is not None:
                found.setdefault(id(bias), Packed())
    return found


def _converted_bias(owner: Any) -> nn.Parameter | None:
    """Return the frozen bias of a layer that computes in a dtype of its own, in that dtype, to which the
    layer's first forward would convert it; None if there is none.
    """
    bias: nn.Parameter | None = getattr(owner, "bias", None)
    dtype = getattr(owner, "compute_dtype", None)
    if bias is None or bias.requires_grad or dtype is None:
        return None
    if bias.dtype != dtype:  # an engine has converted it before
        bias.data = bias.data.to(dtype)
    return bias


def is_packed(param: nn.Parameter) -> bool:
    """Return whether a library has quantized the parameter, or is about to."""
    return _kind_of(param) is not None


def is_same_packed(param: Any, other: Any) -> bool:
    """Return whether `other` is a new object for the packed values of a parameter."""
    if param is None or other is None or param is other or not is_packed(param):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        is_alike = type(param) is type(other) and param.shape == other.shape and param.dtype == other.dtype
        if not is_alike:
            return False
        pairs = zip(leaves_of(param), leaves_of(other), strict=False)
        return all(one.data_ptr() == its.data_ptr() for one, its in pairs)


def keeps_values(param: nn.Parameter) -> bool:
    """Return whether the library's graphs keep the parameter's values by themselves."""
    return _kind_of(param) is _find_4bit


def _kind_of(param: nn.Parameter) -> Kind | None:
    """Return what finds the parts of such a parameter; None if it is none."""
    if is_wrapped(param):
        return _find_wrapped
    for one in type(param).__mro__:
        if one.__module__.partition(".")[0] == _BITSANDBYTES and one.__name__ in _KINDS:
            return _KINDS[one.__name__]
    return None


def _find_4bit(found: Packed, owner: Any, name: str, param: Any, device: torch.device) -> None:
    """bitsandbytes' Params4bit: scales of blocks, which are packed themselves where they are "nested"."""
    if not param.bnb_quantized:
        param.to(device)  # in place
    if getattr(owner, "support_avx512bf16_for_cpu", False):
        owner.support_avx512bf16_for_cpu = False  # evaluation on a CPU would pack the weights anew
    state = param.quant_state
    if getattr(state, "packing_format_for_cpu", False):
        raise ConfigError(
            f"parameter '{name}' was packed anew by bitsandbytes, for evaluation on this processor, and "
            "cannot be trained so; quantize the model again, and run no evaluation before initialize()"
        )
    if found.parts:  # tied: another module has it too
        return
    found.parts[f"{name}.absmax"] = _part(state, "absmax")
    found.whole[f"{name}.quant_map"] = _moved(state, "code", device)
    if state.nested:
        found.parts[f"{name}.nested_absmax"] = _part(state.state2, "absmax")
        found.whole[f"{name}.nested_quant_map"] = _moved(state.state2, "code", device)
        found.whole[f"{name}.nested_offset"] = _moved(state, "offset", device)


def _find_int8(found: Packed, owner: Any, name: str, param: Any, device: torch.device) -> None:
    """bitsandbytes' Int8Params: a scale for each row. The first forward moves the library's names of both
    from the parameter to its module.
    """
    if param.has_fp16_weights:
        return
    if param.data.dtype != torch.int8:
        param.to(device)  # in place
    state = getattr(owner, "state", None)
    for holder in (param, state):
        if getattr(holder, "CB", None) is not None:
            found.aliases.append(_part(holder, "CB"))
        if getattr(holder, "SCB", None) is not None and not found.parts:
            found.parts[f"{name.rpartition('.')[0]}.SCB".lstrip(".")] = _part(holder, "SCB")


def _find_wrapped(found: Packed, owner: Any, name: str, param: Any, device: torch.device) -> None:
    """torchao's: all parts are inner tensors of the parameter."""
    if found.parts or param.is_meta:  # tied; or refused, as others are
        return
    check_wrapped(name, param)
    move_wrapped(param, device)
    found.parts |= {inner.name: _part(inner.holder, inner.attribute) for inner in inner_tensors(name, param)}


Kind = Callable[[Packed, Any, str, Any, torch.device], None]
_KINDS: dict[str, Kind] = {"Params4bit": _find_4bit, "Int8Params": _find_int8}


def _part(holder: Any, attribute: str) -> nn.Parameter:
    """Return the parameter that is this attribute from now on."""
    value = getattr(holder, attribute)
    if not isinstance(value, nn.Parameter):
        value = nn.Parameter(value, requires_grad=False)
        setattr(holder, attribute, value)
    return value


def _moved(holder: Any, attribute: str, device: torch.device) -> Tensor:
    value: Tensor = getattr(holder, attribute).to(device)
    setattr(holder, attribute, value)
    return value


def parts_of(packed: PackedOf, param: nn.Parameter) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parts of a parameter, with their names."""
    if id(param) in packed:
        yield from packed[id(param)].parts.items()


def aliases_of(packed: PackedOf, param: nn.Parameter) -> tuple[nn.Parameter, ...]:
    """Return the other names of a parameter's values."""
    return tuple(packed[id(param)].aliases) if id(param) in packed else ()
