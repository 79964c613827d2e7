"""Wrapped parameters: weights of torchao, each of which is a tensor without storage around inner tensors that
hold its bytes.

The inner tensors, quantized values and their scales and zero points, are the parameter's parts (see
packed.py): frozen parameters in the library's attributes. Units hold the parts alone; the wrapper stays in
the module, and computes with them by operations of its own. A part has the name that transformers gives it
in files. No library is imported: classes are found by their names.

Source: torchao 0.18.0, utils.py (TorchAOBaseTensor), quantization/quantize_/workflows, and
        prototype/safetensors/safetensors_support.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...errors import ConfigError
from .freed_parameter import is_freed

_TORCHAO = "torchao"
# Classes whose product makes weights of another dtype by operations that autograd knows -> the attribute that
# is set where inputs are quantized, too, which ends every gradient.
_QUANTIZES_INPUTS = {
    "Int8Tensor": "act_quant_kwargs",
    "Float8Tensor": "act_quant_kwargs",
    "IntxUnpackedToInt8Tensor": "activation_quantization",
}


class Inner(NamedTuple):
    """A tensor that holds bytes of a wrapped parameter: an attribute of the library's object."""

    name: str  # in the model
    holder: Any
    attribute: str

    @property
    def value(self) -> Tensor:
        value: Tensor = getattr(self.holder, self.attribute)
        return value


def is_wrapped(value: object) -> bool:
    """Return whether it is a tensor of torchao's."""
    if not isinstance(value, Tensor) or not is_traceable_wrapper_subclass(value):
        return False
    return any(one.__module__.partition(".")[0] == _TORCHAO for one in type(value).__mro__)


def check_wrapped(name: str, param: Any) -> None:
    """Errors: ConfigError for a parameter beside which nothing can be trained"""
    kind = type(param).__name__
    instead = "quantize by Int8WeightOnlyConfig of torchao, for example, or by bitsandbytes"
    if kind not in _QUANTIZES_INPUTS:
        raise ConfigError(
            f"parameter '{name}' is torchao's {kind}; those of {', '.join(_QUANTIZES_INPUTS)} can be divided "
            f"over ranks: {instead}"
        )
    if param.requires_grad:
        raise ConfigError(
            f"parameter '{name}' is torchao's {kind} and requires a gradient, which quantized weights do not "
            "get: freeze it by requires_grad_(False), and train adapters beside it"
        )
    if getattr(param, _QUANTIZES_INPUTS[kind], None) is not None:
        raise ConfigError(
            f"parameter '{name}' is torchao's {kind} that quantizes its inputs, too: no gradient "
            f"comes through that, and what lies before it would not be trained; {instead}"
        )


def inner_tensors(name: str, wrapper: Any) -> Iterator[Inner]:
    """Yield what a wrapped parameter of this name consists of."""
    module, _, own = name.rpartition(".")
    for attribute in wrapper.__tensor_flatten__()[0]:
        yield Inner(f"{module}._{own}_{attribute}".lstrip("."), wrapper, attribute)


def unwrapped(named: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return named values, each wrapped parameter as its inner tensors."""
    found: dict[str, Any] = {}
    for name, value in named:
        if is_wrapped(value):
            found |= {inner.name: inner.value for inner in inner_tensors(name, value)}
        else:
            found[name] = value
    return found


def leaves_of(value: Tensor) -> tuple[Tensor, ...]:
    """Return the inner tensors of a wrapped parameter, and of another one itself."""
    return tuple(one.value for one in inner_tensors("", value)) if is_wrapped(value) else (value,)


def wrapped_again(name: str, wrapper: Any, values: Mapping[str, Tensor]) -> Tensor:
    """Return a tensor like this one with other inner tensors, by their names."""
    inner = {one.attribute: values[one.name] for one in inner_tensors(name, wrapper)}
    context = wrapper.__tensor_flatten__()[1]
    made: Tensor = type(wrapper).__tensor_unflatten__(inner, context, wrapper.size(), wrapper.stride())
    return made


def name_in_state_dicts(module: nn.Module) -> Iterator[Any]:
    """Let state_dicts of a module with wrapped parameters of its own have names of values that are elsewhere,
    which refuse their use, as those of other parameters are; yield what ends that.
    """
    if any(is_wrapped(param) for param in module._parameters.values()):
        yield module.register_state_dict_post_hook(_name_values)  # type: ignore[no-untyped-call]


def _name_values(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
    for key, param in module._parameters.items():
        name = prefix + key
        if is_wrapped(param) and state.get(name, param) is not param:
            inner = {one.name: one.value for one in inner_tensors(name, param)}
            if any(map(is_freed, inner.values())):
                state[name] = wrapped_again(name, param, {own: one.detach() for own, one in inner.items()})


def move_wrapped(param: nn.Parameter, device: torch.device) -> None:
    """Move a wrapped parameter, which stays the same object."""
    if param.device != device:
        moved = nn.Parameter(param.detach().to(device), requires_grad=False)
        torch.utils.swap_tensors(param, moved)  # type: ignore[no-untyped-call]
