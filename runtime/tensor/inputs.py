"""Check that ranks that compute one layer together get the same inputs, and use its outputs alike.

Different shapes would end the process in gloo's first sum, or hang in NCCL's; different values would go
unnoticed. So there are three checks, and each finds faults that the cheaper or earlier ones cannot find:

- In each forward the ranks compare one number, made of the names, shapes and dtypes of their inputs.
- In forwards 1, 2, 4, 8 and so on they compare the values, tensor by tensor. In the end that costs nothing.
- The norm of each step brings a number made of all values since the step before.

A program may compute its loss from the outputs, with labels, weights and noise that the model was not given.
The gradients of joined outputs tell whether these are the same on all ranks: of forwards 1, 2,
4, 8 and so on the norm of the step brings a number made of them. They may differ by rounding.

[Note: who waits for the others' shapes]
On a CPU each rank waits, before the first layer. On a GPU this wait would let the GPU run out of work in each
forward. So there only a rank whose shapes have changed since its last forward waits: if ranks come to differ,
at least one of them has changed, and its error ends the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import keystr, tree_leaves_with_path

from ..errors import ConfigError
from ..strided import bytes_of, is_strided
from .exchange import TensorAxis

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # size in bytes -> dtype
# Odd numbers that spread bits, as hash functions of 64 bits use them (splitmix64).
_FACTORS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
_MOST = 0.05  # limit of the relative difference of norms of gradients, all together
_EXACT = 2**48 - 1  # a float64 holds such integers exactly

_ADVICE = (
    "give both the same samples: of {size} ranks that are neighbours all load the same, as "
    "engine.deepspeed_io() does, or a sampler with num_replicas=engine.dp_world_size and "
    "rank=engine.get_data_parallel_rank()"
)


_ADVICE_TO_GENERATE = (
    "give the {size} ranks of a group the same prompts and options, and other groups others; the number of a "
    "group is engine.get_data_parallel_rank()"
)


class InputCheck:
    """Check of the inputs of one divided model."""

    def __init__(self, axis: TensorAxis) -> None:
        self._axis = axis
        self.begin_again(torch.device("cpu"))

    def begin_again(self, device: torch.device) -> None:
        """Count forwards anew, for another engine on this device."""
        self._device = device
        self._num_forwards = self._num_settled = 0
        self._shapes = 0.0  # shapes of the previous forward, as a number
        # Numbers made of the inputs of all forwards since the last step, in host memory and on a GPU.
        self._values = 0
        self._values_on_gpu: Tensor | None = None
        self._axis.notes_gradients, self._axis.log_norms = False, None

    def look(self, args: Any, kwargs: Any) -> None:
        """Check the arguments of a forward that begins.

        Order:  a collective
        Errors: ConfigError that names the first tensor that differs
        """
        self._num_forwards += 1
        self._axis.notes_gradients = self._num_forwards.bit_count() == 1
        leaves = tree_leaves_with_path((args, kwargs))
        given = {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
        self._compare_shapes(given)
        if self._num_forwards.bit_count() == 1:
            self._compare(_digests(given), in_forward=self._num_forwards)
        for leaf in given.values():
            if leaf.is_cuda and is_strided(leaf):
                before = 0 if self._values_on_gpu is None else self._values_on_gpu * _FACTORS[0]
                self._values_on_gpu = before + digest_on_device(leaf)
            else:
                self._values = _digest(leaf, self._values)

    @property
    def notes(self) -> tuple[float | Tensor, float | Tensor]:
        """Return the inputs of this rank since the last step, as a number, and a number made of the gradients
        of joined outputs of its layers; on a GPU, tensors [] there.

        The second number is the sum of the logarithms of norms, in which small gradients count as much as
        large.
        """
        on_gpu, norms = self._values_on_gpu, self._axis.log_norms
        values = float(self._values) if on_gpu is None else ((on_gpu + self._values) & _EXACT).double()
        return values, 0.0 if norms is None else norms

    def settle(self, notes: Sequence[Sequence[float]], lines: Sequence[Sequence[int]]) -> None:
        """Compare the notes of the job's ranks at the end of a step; ranks of a line compute together.

        Errors: ConfigError, on all ranks
        """
        self._settle_values([values for values, _ in notes], lines)
        self._settle_gradients([norms for _, norms in notes], lines)

    def _settle_gradients(self, norms: Sequence[float], lines: Sequence[Sequence[int]]) -> None:
        self._axis.log_norms = None
        for line in lines:
            for rank in line:
                # The difference is infinite or NaN where a gradient is: such a step is skipped.
                if _MOST < abs(norms[rank] - norms[line[0]]) < inf:
                    raise ConfigError(
                        f"{self._together(line[0], rank)}, and have different gradients of what these put "
                        "out, as if their losses were not the same: compute the same loss on both, with the "
                        "same labels, weights and random numbers"
                    )

    def _settle_values(self, notes: Sequence[float], lines: Sequence[Sequence[int]]) -> None:
        first, last = self._num_settled + 1, self._num_forwards
        self._values, self._values_on_gpu, self._num_settled = 0, None, last
        for line in lines:
            for rank in line:
                if notes[rank] != notes[line[0]]:
                    forwards = f"forward {last}" if first >= last else f"forwards {first} to {last}"
                    raise ConfigError(
                        f"{self._together(line[0], rank)}, and were given different values in {forwards}; "
                        + _ADVICE.format(size=self._axis.size)
                    )

    def _compare_shapes(self, given: dict[str, Tensor]) -> None:
        """Compare the shapes, see [Note: who waits for the others' shapes]."""
        text = repr([(name, *_form(leaf)) for name, leaf in given.items()])
        before, self._shapes = self._shapes, float(crc32(text.encode()))
        wait = self._axis.group.start_all_gather_numbers(
            [self._shapes], device=self._device, what="the shapes of the inputs"
        )
        is_on_gpu = self._device.type == "cuda"
        if is_on_gpu and self._shapes == before:
            return
        said = [shapes for (shapes,) in wait()]
        if len(set(said)) == 1:
            return
        if not is_on_gpu:
            self._compare({name: _form(leaf) for name, leaf in given.items()}, in_forward=self._num_forwards)
        other = next(place for place, one in enumerate(said) if one != self._shapes)
        first = dist.get_rank() - self._axis.index
        shown = ", ".join(f"{name} {tuple(leaf.shape)} {leaf.dtype}" for name, leaf in given.items())
        raise ConfigError(
            f"{self._together(dist.get_rank(), first + other)}, and were given inputs of different shapes "
            f"in forward {self._num_forwards}: rank {dist.get_rank()} was given {shown or 'no tensor'}; "
            + _ADVICE.format(size=self._axis.size)
        )

    def compare(self, args: Any, kwargs: Any) -> None:
        """Check the tensors, numbers and texts that are given to what runs many forwards.

        Order:  a collective
        Errors: ConfigError that names the first one that differs
        """
        leaves = [(keystr(path), leaf) for path, leaf in tree_leaves_with_path((args, _as_plain(kwargs)))]
        numbers = {name: ("number", leaf) for name, leaf in leaves if isinstance(leaf, int | float)}
        texts = {name: ("text", repr(leaf)) for name, leaf in leaves if isinstance(leaf, str)}
        tensors = _digests({name: leaf for name, leaf in leaves if isinstance(leaf, Tensor)})
        self._compare(tensors | numbers | texts)

    def compare_random_numbers(self) -> None:
        """Check that ranks will draw the same random numbers.

        Order:  a collective
        Errors: ConfigError
        """
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        own = 0
        for state in states:
            own = _digest(state, own)
        said = self._axis.group.all_gather_objects(own, what="the states of random numbers")
        first = dist.get_rank() - self._axis.index
        for place, other in enumerate(said):
            if other != said[0]:
                raise ConfigError(
                    f"{self._together(first, first + place)}, and would draw different random numbers, so "
                    "that their tokens would differ: give torch.manual_seed() the same number on both before "
                    "generate(), or do_sample=False"
                )

    def _compare(self, own: dict[str, Any], *, in_forward: int | None = None) -> None:
        everywhere = self._axis.group.all_gather_objects(own, what="what the model is given")
        first = dist.get_rank() - self._axis.index
        for place, other in enumerate(everywhere):
            differing = [
                name for name in {**everywhere[0], **other} if everywhere[0].get(name) != other.get(name)
            ]
            if differing:
                forms = {first: everywhere[0].get(differing[0]), first + place: other.get(differing[0])}
                where = "" if in_forward is None else f" in forward {in_forward}"
                advice = _ADVICE_TO_GENERATE if in_forward is None else _ADVICE
                raise ConfigError(
                    f"{self._together(*forms)}, and were given different inputs{where}: {differing[0]} "
                    f"{_difference(forms)}; " + advice.format(size=self._axis.size)
                )

    def _together(self, rank: int, other: int) -> str:
        return (
            f"ranks {rank} and {other} compute the same layers together "
            f"(tensor_parallel.autotp_size {self._axis.size})"
        )


def _as_plain(kwargs: Any) -> Any:
    """Return the arguments with objects that can say what they hold, as a GenerationConfig, as dicts."""
    if not isinstance(kwargs, Mapping):
        return kwargs
    return {
        name: value.to_dict() if callable(getattr(value, "to_dict", None)) else value
        for name, value in kwargs.items()
    }


def _form(value: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(value.shape), str(value.dtype)


def _digests(given: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: (*_form(leaf), _digest(leaf)) for name, leaf in given.items()}


def _difference(forms: dict[int, tuple[Any, ...] | None]) -> str:
    """Describe the difference of a tensor on two ranks."""
    if None not in forms.values() and len({form and form[:2] for form in forms.values()}) == 1:
        return "has other values"
    return " and ".join(
        f"is {'not given' if form is None else f'{form[0]} {form[1]}'} on rank {rank}"
        for rank, form in forms.items()
    )


def _digest(value: Tensor, before: int = 0) -> int:
    return crc32(bytes_of(value), before)


def digest_on_device(value: Tensor) -> Tensor:
    """Return a number that differs for tensors of one shape with different values, without waiting for the
    device.

    Shapes: the result [] int64, on the device of `value`
    """
    flat = value.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    mixed = torch.arange(flat.numel(), device=flat.device).mul_(_FACTORS[0])
    mixed.add_(flat.view(_INTEGERS[flat.element_size()])).mul_(_FACTORS[1])
    mixed.bitwise_xor_(mixed >> 31).mul_(_FACTORS[2])
    return mixed.sum()
