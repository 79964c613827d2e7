"""Check that ranks along tp make the same gradients of the parameters that each of them has whole.

The ranks compute these gradients from the same values, so only rounding may differ; larger differences would
let the copies drift apart silently. A comparison costs as much as sending these gradients once, so it is done
in steps 1, 2, 4, 8 and so on.

[Note: how much they may differ]
On a GPU the order of some sums is not fixed, and where terms cancel out only rounding is left. If the ranks
have different parts of a gradient instead, these differ by about as much as they are large. So a parameter is
named if its gradients differ by more than a quarter of the larger one, and by more than a hundredth of the
usual size in the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

from torch import Tensor

from ..errors import ConfigError
from ..mesh.domain import Domains
from ..zero.units.sub_buffer import SubBuffer

_MOST, _LEAST = 0.25, 0.01  # see [Note: how much they may differ]
_WHAT = "gradients of whole parameters"


class CopiedGradients:
    """Comparison of copied gradients, for one engine."""

    def __init__(self, trained: Sequence[SubBuffer], domains: Domains) -> None:
        self._domains = domains
        self._copied = [one for one in trained if not one.mesh.copies.is_alone]
        self._numel = sum(member.param.numel() for one in trained for member in one.members)
        self._num_steps = 0

    def check(self, norm: float) -> None:
        """Compare averaged gradients; `norm` is that of all gradients of the model.

        Order:  a collective in some steps
        Errors: ConfigError, on all ranks, that names a parameter
        """
        if self._domains.copies is None:
            return
        self._num_steps += 1
        if self._num_steps.bit_count() != 1:
            return
        usual = norm / sqrt(max(1, self._numel))
        problems = [one for sub_buffer in self._copied if (one := self._look(sub_buffer, usual))]
        everywhere = self._domains.job.all_gather_objects(next(iter(problems), ""), what=_WHAT)
        if any(everywhere):
            raise ConfigError(next(filter(None, everywhere)))

    def _look(self, sub_buffer: SubBuffer, usual: float) -> str:
        """Return a text about a parameter of the sub-buffer whose gradients differ, "" if there is none."""
        group, mesh, plan = self._domains.copies_group, sub_buffer.mesh, sub_buffer.plan
        shard_start, _ = sub_buffer.layout.shard_range(plan.shard_index, num_shards=plan.num_shards)
        sums = [_Sums() for _ in sub_buffer.layout.slots]
        for offset, piece in sub_buffer.gradients.pieces(
            *plan.own_run(mesh.chunk_index, num_chunks=mesh.sharers.size)
        ):
            own = sub_buffer.on_device(piece).contiguous()
            first = own.clone()
            group.broadcast(first, what=_WHAT)
            begin = shard_start + offset
            for slot, one in zip(sub_buffer.layout.slots, sums, strict=True):
                start = max(slot.offset - begin, 0)
                stop = min(slot.offset + slot.numel - begin, own.numel())
                if start < stop:
                    one.add(own[start:stop], first[start:stop])
        sub_buffer.gradients.let_go()
        wrong = [
            index for index, one in enumerate(sums) if one.share > _MOST and one.difference > _LEAST * usual
        ]
        if not wrong:
            return ""
        worst = max(wrong, key=lambda index: sums[index].share)
        name = sub_buffer.members[worst].name
        rank = self._domains.job.index
        leader = self._domains.axes.line_of(rank, ("tp",))[0]
        return (
            f"ranks {leader} and {rank} compute the same layers together, and have made different gradients "
            f"of parameter '{name}', which each of them has whole: they differ by {sums[worst].share:.0%} of "
            "the larger one. Each has used it for its own part of a layer, or with values of its own: name "
            'its module in tensor_parallel.partition_config with "partition_type": "skip" and '
            '"grad_allreduce": true, which adds the gradients, or leave the layers around it whole'
        )


class _Sums:
    """Sums of squares of a parameter's gradients here and on the first rank."""

    def __init__(self) -> None:
        self._own = self._first = self._difference = 0.0
        self._numel = 0

    def add(self, own: Tensor, first: Tensor) -> None:
        own, first = own.double(), first.double()
        self._own += float(own.square().sum())
        self._first += float(first.square().sum())
        self._difference += float((own - first).square().sum())
        self._numel += own.numel()

    @property
    def share(self) -> float:
        """Return the norm of the difference, as a part of the larger gradient's norm."""
        return sqrt(self._difference / largest) if (largest := max(self._own, self._first)) > 0.0 else 0.0

    @property
    def difference(self) -> float:
        """Return the mean difference of one element."""
        return sqrt(self._difference / max(1, self._numel))
