"""The weights of a model that is divided over ranks, into files that rank 0 writes while the others
send: a unit at a time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.export.output import OutputFiles
from ..checkpoint.export.output_plan import Spec, plan_output, shard_bytes
from ..checkpoint.export.progress_bar import ProgressMeter
from ..checkpoint.storage.url_store import open_store
from ..comm.rank_group import Job
from ..errors import CheckpointError
from ..mesh.domain import Domains
from ..strided import is_strided
from ..zero.model.sharded_model import ShardedModel
from ..zero.units.sub_buffer import SubBuffer

_log = logging.getLogger("dslaunch")
_SIZES = (16, 8, 4, 2, 1)  # bytes of an element


class _Piece(NamedTuple):
    """Weights that arrive together: the parameters of one sub-buffer, or one tensor that lies in no sub-
    buffer, by its name.
    """

    dtype: torch.dtype
    sub_buffer: SubBuffer | None
    others: dict[str, Tensor]


class WeightsStream:
    """One pass over all weights. Tensors of 8 bytes an element come first, then those of 4, 2 and 1, the
    order of `plan_output`.
    """

    def __init__(
        self, module: nn.Module, model: ShardedModel, domains: Domains, *, left_out: Collection[str]
    ) -> None:
        """Order: a collective if ranks hold different layers"""
        self._left_out, self._domains, self._job = left_out, domains, domains.job
        sub_buffers = [
            sub_buffer
            for unit in model.units
            for sub_buffer in unit.sub_buffers
            if not set(left_out).issuperset(member.name for member in sub_buffer.members)
        ]
        first_name = {
            id(member.param): sub_buffer.true_name(index)
            for sub_buffer in sub_buffers
            for index, member in enumerate(sub_buffer.members)
        }
        pieces = [
            _Piece(sub_buffer.param_shard.values.flat.dtype, sub_buffer, {}) for sub_buffer in sub_buffers
        ]
        self.aliases: dict[str, str] = {}
        self.no_tensors: list[str] = []  # extra states of modules
        # keep_vars, because detaching a parameter asks for its values, which may be sharded
        for name, value in module.state_dict(keep_vars=True).items():
            if name in left_out:
                continue
            if not is_strided(value):
                self.no_tensors.append(name)
            elif id(value) not in first_name:
                first_name[id(value)] = name
                if domains.of(value).comm.sharers.is_first:
                    pieces.append(_Piece(value.dtype, None, {name: value.detach()}))
            elif first_name[id(value)] != name:
                self.aliases[name] = first_name[id(value)]
        self._pieces = sorted(pieces, key=lambda piece: -piece.dtype.itemsize)
        self._specs = self._own_specs()
        self._device = model.device
        self._stages: list[tuple[int, dict[str, Spec]]] = [
            (0, self._specs)
        ]  # each stage's leader, and its tensors
        if len(domains.stage_leaders) > 1:
            self._hear_of_stages()

    def _hear_of_stages(self) -> None:
        own = (self._specs, self.aliases, self.no_tensors) if self._domains.leads else None
        answers = self._job.gather_objects(own, what="what the stages hold")
        if answers is not None:
            stages = [(rank, one) for rank, one in enumerate(answers) if one is not None]
            self._stages = [(rank, specs) for rank, (specs, _, _) in stages]
            self.aliases = {name: first for _, (_, own, _) in stages for name, first in own.items()}
            self.no_tensors = [name for _, (*_, names) in stages for name in names]

    def _own_specs(self) -> dict[str, Spec]:
        """Return the specs of the tensors from this rank's stage, in their order, for the stage's
        first rank.
        """
        specs: dict[str, Spec] = {}
        for dtype, sub_buffer, others in self._pieces:
            if sub_buffer is None:
                specs |= {name: Spec(tuple(value.shape), dtype) for name, value in others.items()}
            elif sub_buffer.comm.sharers.is_first:  # else another stage sends it
                specs |= {name: Spec(shape, dtype) for name, shape in self._members(sub_buffer)}
        return specs

    def specs(self) -> dict[str, Spec]:
        """Return the shapes and dtypes of the coming tensors, in order, on rank 0."""
        specs = [item for _, stage in self._stages for item in stage.items()]
        return dict(sorted(specs, key=lambda item: -item[1].dtype.itemsize))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor, in host memory, on rank 0, and nothing on other ranks.

        Order: a collective for each sub-buffer; rank 0 waits for its end only in the next one
        """
        for size in _SIZES:
            for name, value in self._of_own_stage(size):
                if self._job.is_first:
                    yield name, value.cpu()
                else:
                    self._send(value)
            for rank, specs in self._stages[1:]:
                for name, spec in specs.items():
                    if spec.dtype.itemsize == size:
                        yield name, self._receive(rank, spec).cpu()

    # Of the ranks with the same layers only some send these messages, so they are not part of the comparison
    # of collectives.

    def _send(self, value: Tensor) -> None:
        if value.numel():
            dist.send(_bytes(value), 0)

    def _receive(self, rank: int, spec: Spec) -> Tensor:
        value = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
        if value.numel():
            dist.recv(_bytes(value), rank)
        return value

    def _of_own_stage(self, size: int) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor, for tensors with `size` bytes an element, on the first rank of this stage,
        and nothing on its other ranks.
        """
        for dtype, sub_buffer, others in self._pieces:
            if dtype.itemsize != size:
                continue
            if sub_buffer is None:
                if self._domains.leads:
                    yield from others.items()
                continue
            with sub_buffer.here() if sub_buffer.is_sharded else nullcontext():
                flat: Tensor | None = (
                    sub_buffer.param_shard.values.flat
                    if sub_buffer.comm.sharers.is_first and not sub_buffer.is_sharded
                    else None
                )
                if sub_buffer.is_sharded:
                    flat = sub_buffer.comm.gather_to_first(
                        sub_buffer.on_device(sub_buffer.param_shard.own), what=sub_buffer.label
                    )
                for name, value in wholes(sub_buffer, flat, self._domains):
                    if name not in self._left_out:
                        yield name, value

    def _members(self, sub_buffer: SubBuffer) -> Iterator[tuple[str, tuple[int, ...]]]:
        for index, member in enumerate(sub_buffer.members):
            if member.name not in self._left_out:
                shape = sub_buffer.whole_shape(index)
                yield from ((name, shape) for name in sub_buffer.true_names(index))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def wholes(sub_buffer: SubBuffer, flat: Tensor | None, domains: Domains) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of each parameter of a sub-buffer on the first of the ranks that hold its layers,
    and nothing on other ranks.

    `flat` has the values of all parameters, on the first of the ranks that share them.

    Order: a collective where parameters are divided
    """
    for index, (member, slot) in enumerate(zip(sub_buffer.members, sub_buffer.layout.slots, strict=True)):
        part = None if flat is None else flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
        names = sub_buffer.domain.names
        if names is not None:
            values = names.gather_to_first(part, what=f"parameter '{member.name}'")
            if values is not None and domains.leads:
                yield from zip(names.all(member.name), values, strict=True)
            continue
        whole = sub_buffer.gather_parts_to_first(index, part)
        if whole is not None and domains.leads:
            yield member.name, whole


def write_weights(
    weights: WeightsStream,
    job: Job,
    folder: str | os.PathLike[str],
    file_name: str,
    *,
    max_shard_size: int | str | None,
) -> None:
    """Write the weights into a folder or URL: one file of this name, or several with an index, whose names
    have the same ending.

    Order:  every rank must call this
    Errors: CheckpointError, on every rank, if it cannot be written
    """
    shard_bytes(max_shard_size)  # checked before any message, so that all ranks raise the same error
    problem: str | None = None
    sent = iter(weights)
    if job.is_first:
        try:
            plan = plan_output(
                weights.specs(),
                aliases=weights.aliases,
                file_name=file_name,
                max_shard_size=max_shard_size,
            )
            with (
                ProgressMeter(f"save to {os.fspath(folder)}", plan.num_bytes) as meter,
                OutputFiles(open_store(folder), plan) as output,
            ):
                for name, tensor in sent:
                    output.put(name, tensor)
                    meter.advance(tensor.nbytes)
        except CheckpointError as error:
            problem = str(error)
    for _ in sent:  # even if rank 0 has failed: the other ranks send
        pass
    problem = job.all_gather_objects(problem, what="the success of saving")[0]
    if problem is not None:
        raise CheckpointError(problem)
    if weights.no_tensors and job.is_first:
        _log.warning("%s holds tensors only: without %s", folder, ", ".join(weights.no_tensors))
