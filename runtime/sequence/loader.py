"""Batches whose sequences are divided over ranks.

Source: DeepSpeed 0.19.8 runtime/sequence_parallel/ulysses_sp.py, `UlyssesSPDataLoaderAdapter`
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError
from .exchange import SequenceRanks
from .loss import IGNORED


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """Description of a rank's next batch, sent before any batch."""

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()  # whole shapes
    others: tuple[tuple[str, Any], ...] = ()
    is_end: bool = False
    problem: str = ""


class UlyssesSPDataLoaderAdapter:
    """A loader around another loader. Each of the ranks that share sequences reads a batch of its own. Then
    each gets its part of the first rank's batch, then of the second's, and so on: `len()` is the wrapped
    loader's times the number of these ranks.

    `labels` become `shift_labels`: the label of a position is the next token, even if another rank has it;
    the last position has -100.

    Shapes: tensors of a wrapped batch are [batch, sequence, ...]; those that are handed out are
    [batch, sequence / ranks, ...], on the CPU
    Order:  the ranks iterate together: their batches are exchanged
    """

    def __init__(
        self, dl: Iterable[Any], sp_rank: int, sp_group: Any, sp_world_size: int, device: torch.device | str
    ) -> None:
        self.dl, self.sp_group, self.device = dl, sp_group, torch.device(device)
        self.sp_rank, self.sp_world_size = sp_rank, sp_world_size
        self._ranks = SequenceRanks.of(sp_group)
        if (self._ranks.index, self._ranks.size) != (sp_rank, sp_world_size):
            raise ConfigError(
                f"UlyssesSPDataLoaderAdapter(sp_rank={sp_rank}, sp_world_size={sp_world_size}): in "
                f"sp_group this is rank {self._ranks.index} of {self._ranks.size}; give those"
            )
        self.iter = iter(dl)
        self.micro_batches: deque[dict[str, Any]] = deque()

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        """Return this rank's part of the next batch.

        Errors: StopIteration at the end of the shortest rank's loader, after which the next epoch begins;
        ConfigError on all ranks if a batch of one rank cannot be divided
        """
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.popleft()

    def refill(self) -> None:
        """Get the next batch of every rank."""
        own, batch = self._look(next(self.iter, None))
        batches: list[_Told] = self._ranks.gather_objects(own, "what batches there are")
        problems = [f"rank {index}: {one.problem}" for index, one in enumerate(batches) if one.problem]
        if problems:
            raise ConfigError(
                "batches cannot be divided over the ranks that share sequences: " + "; ".join(problems)
            )
        if any(one.is_end for one in batches):
            self.iter = iter(self.dl)
            raise StopIteration
        parts = [self._part_of(batch, index) for index in range(self.sp_world_size)]
        shapes = [[sum(nbytes for *_, nbytes in self._pieces(one))] for one in batches]
        arrived = self._ranks.send_parts([[part] for part in parts], [[shape] for shape in shapes], "batches")
        self.micro_batches.extend(
            self._unpacked(one, data.cpu()) for one, (data,) in zip(batches, arrived, strict=True)
        )

    def _look(self, batch: Any) -> tuple[_Told, dict[str, Tensor]]:
        """Return the description to send, and the tensors that will be cut."""
        if batch is None:
            return _Told(is_end=True), {}
        if not isinstance(batch, Mapping) or "input_ids" not in batch:
            return _Told(problem="a batch is a dict with input_ids, position_ids and labels"), {}
        tensors = {name: one for name, one in batch.items() if isinstance(one, Tensor)}
        others = tuple((name, one) for name, one in batch.items() if not isinstance(one, Tensor))
        problem = self._problem_of(tensors)
        if problem:
            return _Told(problem=problem), {}
        if (labels := tensors.pop("labels", None)) is not None:
            tensors["shift_labels"] = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        described = tuple((name, tuple(one.shape), one.dtype) for name, one in tensors.items())
        return _Told(tensors=described, others=others), tensors

    def _problem_of(self, tensors: Mapping[str, Tensor]) -> str:
        if "position_ids" not in tensors:
            return (
                "position_ids is missing: each token has to keep its place in the whole sequence; let the "
                "collate function add torch.arange(length) for each sample, or what begins at 0 with each "
                "document of a packed one"
            )
        length = tensors["input_ids"].shape[1]
        for name, one in tensors.items():
            if one.dim() < 2 or one.shape[1] != length:
                return (
                    f"{name} of shape {tuple(one.shape)} is not [batch, {length}, ...] as input_ids is; "
                    "leave it out of the batch"
                )
        if length % self.sp_world_size:
            above = -(-length // self.sp_world_size) * self.sp_world_size
            return (
                f"sequences of {length} tokens cannot be divided over {self.sp_world_size} ranks; pad "
                f"them to {above}"
            )
        return ""

    def _part_of(self, tensors: Mapping[str, Tensor], index: int) -> Tensor:
        """Return the bytes of part number `index` of a batch."""
        cut = [one.to(self.device).chunk(self.sp_world_size, dim=1)[index] for one in tensors.values()]
        return torch.cat([one.contiguous().view(-1).view(torch.uint8) for one in cut])

    def _pieces(self, told: _Told) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, int]]:
        """Yield name, shape, dtype and bytes of each part that this rank gets of a batch."""
        for name, (batch, length, *rest), dtype in told.tensors:
            shape = (batch, length // self.sp_world_size, *rest)
            yield name, shape, dtype, torch.Size(shape).numel() * dtype.itemsize

    def _unpacked(self, told: _Told, data: Tensor) -> dict[str, Any]:
        batch: dict[str, Any] = dict(told.others)
        start = 0
        for name, shape, dtype, nbytes in self._pieces(told):
            batch[name] = data[start : start + nbytes].clone().view(dtype).view(shape)  # a copy is aligned
            start += nbytes
        return batch
