"""Graphs of a library's own autograd functions, which keep packed weights by themselves: no net sees that.

bitsandbytes' product with weights of 4 bits keeps the packed tensor as an attribute of its node. It would
hold the memory of the whole unit from the forward to the backward. So the node gets a name for the values
instead, which finds them when the backward uses them (see "Names of values" in freed_parameter.py).

Source: bitsandbytes 0.50.2 autograd/_functions.py, `MatMul4Bit`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..parameters.freed_parameter import name_values
from ..parameters.packed import keeps_values

_NODE = "MatMul4BitBackward"
_MAX_STEPS = 4  # from what a layer returns to its product: a cast, a view


def watch_libraries(module: nn.Module) -> Iterator[Any]:
    """Let no graph keep packed weights of this module's own; yield what removes that again."""
    if any(param is not None and keeps_values(param) for param in module._parameters.values()):
        yield module.register_forward_hook(_name_kept)


def _name_kept(module: nn.Module, args: Any, output: Any) -> None:
    node: Any = output.grad_fn if isinstance(output, Tensor) else None
    for _ in range(_MAX_STEPS):
        if node is None or type(node).__name__ == _NODE:
            break
        node = node.next_functions[0][0] if node.next_functions else None
    else:
        node = None
    if node is None:
        return
    params = [param for param in module._parameters.values() if param is not None]
    node.tensors = tuple(_named(one, params) for one in node.tensors)


def _named(kept: Any, params: list[nn.Parameter]) -> Any:
    """Return a name for the values of one of these parameters; what lies elsewhere as it is."""
    if not isinstance(kept, Tensor):
        return kept
    shape, place = kept.shape, kept.data_ptr()
    param = next((one for one in params if one.data_ptr() == place and one.numel() == kept.numel()), None)
    if param is None:
        return kept
    described = torch.empty((), dtype=kept.dtype, device=kept.device).expand(shape)
    return name_values(described, param, lambda values: values.view(shape))
