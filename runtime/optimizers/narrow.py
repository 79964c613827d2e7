"""Steps with torch's operations of arrays that are kept in 16 or 8 bits: a part at a time becomes float32, is
updated, and is rounded back, by the random bits that our kernels have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .eight_bits import BLOCK_NUMEL, SCALES, decode, encode, has_eight_bits, num_scales
from .flat_arrays import ElementRun, FlatArrays
from .random_bits import bits_of_param, bits_of_states, round_by

# Elements of one part: the copies and the random bits of 2^22 take 80 MiB, and each operation on them keeps a
# GPU busy.
PART_NUMEL = 2**22


def is_narrow(arrays: FlatArrays) -> bool:
    """Tell whether a value that is kept from step to step has fewer bits than float32."""
    return any(tensor.dtype != torch.float32 for tensor in (arrays.param, *arrays.states.values()))


def update_in_parts(arrays: FlatArrays, update: Callable[[Sequence[FlatArrays]], None]) -> None:
    """Call `update` with float32 copies of one part after another, and take over what it has written."""
    for run in arrays.runs:
        for start, grad in _parts(arrays.grads, run):
            span = slice(start, start + grad.numel())
            # copies, but of what is float32 anyway
            wide = FlatArrays(
                param=arrays.param[span].float(),
                grads=((0, grad),),
                states=_widened(arrays.states, span),
                runs=(ElementRun(offset=0, numel=grad.numel(), group=run.group, step=run.step),),
            )
            update([wide])
            _take(arrays, wide, run, span)


def _parts(grads: Sequence[tuple[int, Tensor]], run: ElementRun) -> Iterator[tuple[int, Tensor]]:
    for offset, piece in grads:
        start, stop = max(run.offset, offset), min(run.offset + run.numel, offset + piece.numel())
        for low in range(start, stop, PART_NUMEL):
            yield low, piece[low - offset : min(low + PART_NUMEL, stop) - offset]


def _widened(states: Mapping[str, Tensor], span: slice) -> dict[str, Tensor]:
    if not has_eight_bits(states):
        return {name: state[span].float() for name, state in states.items()}
    return {
        name: decode(state[span], states[name + SCALES][_blocks(span)], name)
        for name, state in states.items()
        if not name.endswith(SCALES)
    }


def _blocks(span: slice) -> slice:
    return slice(span.start // BLOCK_NUMEL, num_scales(span.stop))


def _take(arrays: FlatArrays, wide: FlatArrays, run: ElementRun, span: slice) -> None:
    first, numel, device = run.first + span.start - run.offset, wide.param.numel(), wide.param.device
    if any(state.dtype != torch.float32 for state in arrays.states.values()):
        bits = None if run.seed is None else bits_of_states(run.seed, first, numel, device)
        for place, (name, values) in enumerate(wide.states.items()):
            of_state = bits if bits is None or place == 0 else bits >> 16
            if has_eight_bits(arrays.states):
                codes, scales = encode(values, name, of_state)
                arrays.states[name][span].copy_(codes)
                arrays.states[name + SCALES][_blocks(span)].copy_(scales)
            else:
                _round(values, arrays.states[name][span], of_state)
    if arrays.param.dtype != torch.float32:
        bits = None if run.seed is None else bits_of_param(run.seed, first, numel, device)
        _round(wide.param, arrays.param[span], bits)


def _round(values: Tensor, to: Tensor, bits: Tensor | None) -> None:
    to.copy_(values if bits is None else round_by(bits, values))
