"""Kinds of what an engine holds from step to step, put on the storages themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from ..zero.model.sharded_model import ShardedModel
from .memory import GATHERED, GRADIENTS, PARAMETERS, STATES, RunMemory
from .storages import Storages


def tell_kinds(model: ShardedModel, storages: Storages, memory: RunMemory) -> None:
    """Give each storage that the model holds now its kind."""
    for kind, tensors in _held(model):
        for tensor in tensors:
            record = storages.of(tensor)
            if record is not None:
                memory.tell(record, kind)


def _held(model: ShardedModel) -> Iterator[tuple[str, Iterable[Tensor]]]:
    sub_buffers = [one for unit in model.units for one in unit.sub_buffers]
    yield GATHERED, (one.param_shard.values.flat for one in sub_buffers if one.is_sharded)
    yield PARAMETERS, (one.param_shard.kept for one in sub_buffers)
    yield STATES, (tensor for one in sub_buffers for tensor in one.optimizer_shard.held())
    yield GRADIENTS, (tensor for one in sub_buffers if one.is_trained for tensor in one.gradients.held())
