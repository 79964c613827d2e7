"""Parameters whose elements are the same numbers in memory: their own ones, or those of other parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

import torch
from torch import Tensor, nn

from ...log import logger
from ...strided import is_strided


def is_expanded(tensor: Tensor) -> bool:
    """Return whether several of its elements are one number in memory."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def first_sharing(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Return the places of two that have elements in common; columns of a matrix have none."""
    runs: dict[int, list[tuple[int, int, int]]] = {}  # storage -> first and last element, and the place
    for place, tensor in enumerate(tensors):
        if tensor.numel():
            first = int(tensor.storage_offset())
            reach = zip(tensor.shape, tensor.stride(), strict=True)
            last = first + sum(int((size - 1) * stride) for size, stride in reach)
            runs.setdefault(tensor.untyped_storage().data_ptr(), []).append((first, last, place))
    for own in runs.values():
        for (_, last, index), (first, _, other) in combinations(sorted(own), 2):
            if first <= last and _have_common_elements(tensors[index], tensors[other]):
                return min(index, other), max(index, other)
    return None


def warn_of_kept_views(modules: Iterable[tuple[str, nn.Module]], params: Mapping[str, Tensor]) -> None:
    """Name what these modules keep, as a buffer or an attribute, of the memory of trained parameters.

    A module with a hook before its forward may make it anew there, as torch's older spectral_norm does.
    """
    of_storage = {
        param.untyped_storage().data_ptr(): name for name, param in params.items() if param.requires_grad
    }
    for module_name, module in modules if of_storage else ():
        for name, tensor in _kept_tensors(module):
            other = of_storage.get(tensor.untyped_storage().data_ptr())
            if other is not None and first_sharing([params[other], tensor]) is not None:
                logger.warning(
                    "'%s' lies in the memory of parameter '%s', which has other memory from now on: it keeps "
                    "today's numbers, and does not follow the parameter; make such a view in the forward",
                    f"{module_name}.{name}" if module_name else name,
                    other,
                )


def _kept_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    attributes = {} if module._forward_pre_hooks else vars(module)
    for name, value in (*module._buffers.items(), *attributes.items()):
        if isinstance(value, (nn.Parameter, nn.parameter.UninitializedBuffer)):
            continue
        if is_strided(value):
            yield name, value


def _have_common_elements(one: Tensor, other: Tensor) -> bool:
    """True if two tensors in one storage overlap."""
    elements = torch.arange(one.untyped_storage().nbytes() // one.itemsize, device="cpu")
    places = [elements.as_strided(each.shape, each.stride(), each.storage_offset()) for each in (one, other)]
    return bool(torch.isin(*[each.reshape(-1) for each in places]).any())
