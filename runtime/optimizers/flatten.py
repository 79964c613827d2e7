"""Parameters of any shape and stride as the flat float32 arrays that a formula updates.

What is float32 and dense is updated where it lies. Anything else is copied to float32 before the step
and rounded back after it: a 16-bit parameter, which has no master here, loses in each step what its
dtype cannot hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .flat_arrays import ElementRun, FlatArrays
from .formula import Formula

# Number of elements that one call copies: 2^20, 4 MiB each of parameters and of states that the kernel does
# not take as they are; of LAMB's directions, too. An element-wise formula takes large parameters in parts of
# this size; LAMB takes one at least.
SCRATCH_NUMEL = 2**20

_OUT = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class ParameterUpdate:
    """A parameter with a gradient, and the values for its step."""

    param: Tensor  # any shape and stride, float32, bfloat16 or float16
    grad: Tensor  # the same shape, strided
    states: Mapping[str, Tensor]  # the same shape
    group: Mapping[str, Any]
    step: int  # counted from 1


@dataclass(slots=True)
class _Flat:
    """One update's arrays in one order of elements, [n] each; those of `copied` lie outside the update's
    memory.
    """

    param: Tensor
    grad: Tensor
    states: dict[str, Tensor]
    copied: list[tuple[Tensor, Tensor]]  # permuted target of any stride, its copy


def step_flat(
    formula: Formula, updates: Sequence[ParameterUpdate], *, scratch_numel: int = SCRATCH_NUMEL
) -> None:
    """Apply one step to all, which are on one device: one call of the formula,
    or one for so many elements of copies.

    Errors: as `Formula.update`; of several calls, those before are done
    """
    calls: list[FlatArrays] = []
    rounded: list[tuple[Tensor, Tensor]] = []
    copied: list[tuple[Tensor, Tensor]] = []
    grads: set[int] = set()
    taken = 0

    def call() -> None:
        formula.update(calls)
        for target, source in rounded:
            target.copy_(source)

    for update in updates:
        usual = _usual(update, scratch_numel) if formula.is_elementwise else None
        if usual is not None and usual.grads[0][1].data_ptr() not in grads:
            grads.add(usual.grads[0][1].data_ptr())
            numel = 0 if usual.param_out is None else usual.param.numel()
            if taken + numel > scratch_numel:
                call()
                calls, rounded, taken = [], [], 0
            calls.append(usual)
            taken += numel
            continue
        flat = _flatten(update)
        if (
            flat.grad.data_ptr() in grads
        ):  # the memory is another parameter's, too; a kernel wants memory of its own for each
            flat.grad = flat.grad.clone()
        grads.add(flat.grad.data_ptr())
        copied += flat.copied
        is_scratch = not formula.is_elementwise or any(
            tensor.dtype is not torch.float32 for tensor in (flat.param, *flat.states.values())
        )
        for part in _parts(flat, scratch_numel if is_scratch and formula.is_elementwise else None):
            numel = part.param.numel()
            if is_scratch and taken and taken + numel > scratch_numel:
                call()
                calls, rounded, taken = [], [], 0
            calls.append(_arrays(part, update, rounded))
            taken += numel if is_scratch else 0
    call()
    for target, source in copied:
        target.copy_(source.view(target.shape))


def _usual(update: ParameterUpdate, scratch_numel: int) -> FlatArrays | None:
    """The usual case, at a fraction of the time: all is contiguous, the states are float32,
    and one call has room for it.
    """
    param, grad = update.param, update.grad
    if not (param.is_contiguous() and grad.is_contiguous()):
        return None
    for state in update.states.values():
        if state.dtype is not torch.float32 or not state.is_contiguous():
            return None
    is_out = param.dtype is not torch.float32
    if is_out and param.numel() > scratch_numel:
        return None
    flat = param.detach().view(-1)
    return FlatArrays(
        param=flat.float(),
        grads=((0, grad.view(-1)),),
        states={name: state.view(-1) for name, state in update.states.items()},
        runs=(ElementRun(offset=0, numel=flat.numel(), group=update.group, step=update.step),),
        param_out=flat if is_out else None,
    )


def _flatten(update: ParameterUpdate) -> _Flat:
    param = update.param.detach()
    strides = param.stride()
    # The order in which its elements lie in memory: what is dense needs no copy.
    order = None if param.is_contiguous() else sorted(range(param.ndim), key=lambda dim: -strides[dim])
    copied: list[tuple[Tensor, Tensor]] = []

    def flat(tensor: Tensor, *, is_written: bool) -> Tensor:
        ordered = tensor if order is None else tensor.permute(order)
        if ordered.is_contiguous():
            return ordered.view(-1)
        copy = ordered.contiguous().view(-1)
        if is_written:
            copied.append((ordered, copy))
        return copy

    return _Flat(
        param=flat(param, is_written=True),
        grad=flat(update.grad.detach(), is_written=False),
        states={name: flat(state, is_written=True) for name, state in update.states.items()},
        copied=copied,
    )


def _parts(flat: _Flat, limit: int | None) -> Iterator[_Flat]:
    numel = flat.param.numel()
    if limit is None or numel <= limit:
        yield flat
        return
    for start in range(0, numel, limit):
        span = slice(start, start + limit)
        states = {name: state[span] for name, state in flat.states.items()}
        yield _Flat(flat.param[span], flat.grad[span], states, [])


def _arrays(flat: _Flat, update: ParameterUpdate, rounded: list[tuple[Tensor, Tensor]]) -> FlatArrays:
    """Return the formula's arguments; `rounded` gets the 16-bit states that it does not write itself."""
    states = {
        name: state if state.dtype is torch.bfloat16 and state.is_cpu else state.float()
        for name, state in flat.states.items()
    }
    rounded += [
        (flat.states[name], state) for name, state in states.items() if state is not flat.states[name]
    ]
    return FlatArrays(
        param=flat.param.float(),
        grads=((0, flat.grad),),
        states=states,
        runs=(ElementRun(offset=0, numel=flat.param.numel(), group=update.group, step=update.step),),
        param_out=flat.param if flat.param.dtype in _OUT else None,
    )
