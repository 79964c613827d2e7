"""A backward in two halves: the gradients of the inputs now, those of the parameters later.

The nodes of the graph that lead to an input are called "on the way". A backward for the inputs alone runs
only these. Where a node on the way also leads to parameters, the gradient that arrives there is kept. From
these nodes the second half goes on, node by node, because it must not run the way to the inputs again.

Source: Qi et al. 2024, arXiv:2401.10241; torch.distributed.pipelining does the same, in another way
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = tuple[Tensor | None, ...]


class _Turn:
    """Parameters that are reached from the same nodes, and the gradients that have arrived at these nodes."""

    def __init__(self, nodes: set[Node], params: list[nn.Parameter]) -> None:
        self.nodes, self.params = nodes, params
        self.arrived: dict[Node, Grads] = {}
        self.on_the_way: set[Node] = set()


class Rest:
    """Second half of a backward: the gradients of the parameters."""

    def __init__(self, turns: Sequence[_Turn]) -> None:
        self._turns = list(turns)

    def run(self) -> None:
        """Add the gradients of the parameters; their hooks see them, as in any backward."""
        params: list[nn.Parameter] = []
        grads: list[Tensor] = []
        while self._turns:
            turn = self._turns.pop()
            for param, grad in zip(turn.params, _weights(turn), strict=True):
                if grad is not None:
                    params.append(param)
                    grads.append(grad)
        if params:
            # Autograd adds them, and calls the hooks.
            torch.autograd.backward([param.view_as(param) for param in params], grads)


def backward_inputs(
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor | None] | None,
    inputs: Sequence[Tensor],
    params: Iterable[nn.Parameter],
) -> tuple[Grads, Rest]:
    """Return the gradients of the inputs, and the rest of the backward. Outputs without `grads`
    are losses.
    """
    edges = [get_gradient_edge(one) for one in outputs]
    children = _children([edge.node for edge in edges])
    leaves = {get_gradient_edge(one).node for one in inputs}
    on_the_way = _leading_to(leaves, children)
    beside = {edge.node for edge in edges} - on_the_way  # outputs that do not depend on the inputs
    turns = _turns(params, on_the_way, beside, children)
    given = [torch.ones_like(one) for one in outputs] if grads is None else grads
    for edge, grad in zip(edges, given, strict=True):
        for turn in turns if edge.node in beside else ():
            if edge.node in turn.nodes:
                known = list(turn.arrived.get(edge.node, ()))
                known += [None] * (edge.output_nr + 1 - len(known))
                known[edge.output_nr] = grad
                turn.arrived[edge.node] = tuple(known)
    hooks = [
        node.register_prehook(_keep(turn.arrived, node)) for turn in turns for node in turn.nodes - beside
    ]
    try:
        gradients = torch.autograd.grad(outputs, inputs, given, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return gradients, Rest(turns)


def _keep(arrived: dict[Node, Grads], node: Node) -> Callable[[Any], None]:
    def keep(grads: Grads) -> None:
        arrived[node] = grads

    return keep


def _weights(turn: _Turn) -> Grads:
    """Return the gradients of one turn's parameters."""
    roots = [
        (GradientEdge(node, index), grad)
        for node, grads in turn.arrived.items()
        for index, grad in enumerate(grads)
        if grad is not None
    ]
    if not roots:  # no gradient has arrived at these nodes
        return (None,) * len(turn.params)
    # Gradients from one node to another on the way were counted when they arrived there.
    hooks = [
        node.register_prehook(_replace(grads))
        for node, grads in turn.arrived.items()
        if len(turn.arrived) > 1 and node in turn.on_the_way
    ]
    try:
        return torch.autograd.grad(
            [edge for edge, _ in roots],
            turn.params,
            [grad for _, grad in roots],
            retain_graph=True,  # another turn may run through the same nodes
            allow_unused=True,
        )
    finally:
        for hook in hooks:
            hook.remove()


def _replace(kept: Grads) -> Callable[[Any], Any]:
    return lambda _: kept


def _children(roots: Iterable[Node]) -> dict[Node, tuple[Node, ...]]:
    """Return all nodes of a graph, each with the nodes that it leads to."""
    children: dict[Node, tuple[Node, ...]] = {}
    waiting = list(roots)
    while waiting:
        node = waiting.pop()
        if node not in children:
            children[node] = tuple(child for child, _ in node.next_functions if child is not None)
            waiting += children[node]
    return children


def _leading_to(targets: set[Node], children: dict[Node, tuple[Node, ...]]) -> set[Node]:
    """Return the nodes from which a target is reached, without the targets themselves."""
    parents: dict[Node, list[Node]] = {}
    for node, below in children.items():
        for child in below:
            parents.setdefault(child, []).append(node)
    nodes: set[Node] = set()
    waiting = [parent for target in targets for parent in parents.get(target, ())]
    while waiting:
        node = waiting.pop()
        if node not in nodes:
            nodes.add(node)
            waiting += parents.get(node, ())
    return nodes


def _turns(
    params: Iterable[nn.Parameter],
    on_the_way: set[Node],
    beside: set[Node],
    children: dict[Node, tuple[Node, ...]],
) -> list[_Turn]:
    param_of = {get_gradient_edge(param).node: param for param in params if param.requires_grad}
    nodes_of: dict[Node, set[Node]] = {}  # node of a parameter -> the first nodes of the way to it
    for node in on_the_way | beside:
        seen: set[Node] = set()
        waiting = [child for child in children[node] if child not in on_the_way]
        while waiting:
            one = waiting.pop()
            if one not in seen:
                seen.add(one)
                waiting += (child for child in children[one] if child not in on_the_way)
        for leaf in seen & param_of.keys():
            nodes_of.setdefault(leaf, set()).add(node)
    turns: list[_Turn] = []
    for leaf, nodes in nodes_of.items():
        joined = _Turn(nodes, [param_of[leaf]])
        for turn in [one for one in turns if one.nodes & nodes]:
            turns.remove(turn)
            joined = _Turn(joined.nodes | turn.nodes, [*turn.params, *joined.params])
        turns.append(joined)
    for turn in turns:
        turn.on_the_way = turn.nodes & on_the_way
    return turns
