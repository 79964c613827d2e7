"""Gradients of whole parameters that each rank uses for its own part of a layer.

Between a layer that is divided by columns and one that is divided by rows, each rank computes with its part
alone. A whole parameter there, e.g. of an activation, gets on each rank only this part's gradient; its true
gradient is their sum. A plan may mark it with the style replicated_with_grad_allreduce. Otherwise the graph
of a forward shows it: the parameter is reached from the parts of an output without passing a value that has
entered (see exchange.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..log import logger
from .exchange import TensorAxis, begins_parts, is_put_together
from .lower import Division


def add_over_ranks(output: Tensor, axis: TensorAxis, name: str, division: Division) -> None:
    """From now on add the gradients of whole parameters that this rank's part of an output comes from, in
    forwards 1, 2, 4, 8 and so on of the layer of this name.
    """
    if output.grad_fn is None:
        return
    division.num_forwards[name] += 1
    if division.num_forwards[name].bit_count() != 1:
        return
    divided = {id(param) for param, _ in division.cuts}
    for param in _parameters_of(output):
        if id(param) not in divided and id(param) not in division.added:
            division.added[id(param)] = param
            what = f"parameter '{division.names.get(id(param), name)}'"
            logger.info("%s is whole, and its gradients are added over tp: '%s' divides its uses", what, name)
            param.register_hook(_Sum(axis, f"the gradient of {what}"))  # type: ignore[no-untyped-call]


class _Sum:
    """The hook of a parameter."""

    def __init__(self, axis: TensorAxis, what: str) -> None:
        self._axis, self._what = axis, what

    def __call__(self, gradient: Tensor) -> Tensor:
        return self._axis.sum(gradient, self._what)


def _parameters_of(output: Tensor) -> list[nn.Parameter]:
    """Return the parameters from which the output comes as a part. Return none if it also uses, without
    entering it, a value that is the same on all ranks: then more gradients than those of parameters are
    incomplete.
    """
    params = []
    for node in _nodes_of(output):
        if is_put_together(node):
            return []
        if isinstance(leaf := getattr(node, "variable", None), nn.Parameter):
            params.append(leaf)
    return params


def _nodes_of(output: Tensor) -> Iterator[Any]:
    seen, left = set(), [output.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen or begins_parts(node):
            continue
        seen.add(node)
        yield node
        left += [one for one, _ in node.next_functions]
