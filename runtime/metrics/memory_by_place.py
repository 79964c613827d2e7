"""Memory that ranks hold of a model from step to step, by their place along the axes of the job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from ..comm.rank_names import folded
from ..zero.gradients.gradients import OwnGradients
from ..zero.gradients.sharded_gradients import ShardedGradients
from ..zero.model.sharded_model import ShardedModel
from ..zero.units.sub_buffer import SubBuffer
from ..zero.units.unit import Unit


class Held(NamedTuple):
    """Bytes of one rank, on its device and in host memory: with padding, and without what comes for a use."""

    parameters: int
    gradients: int
    masters: int
    states: int | None  # the optimizer's; None: torch's makes them in the first step
    whole_in_a_batch: int = 0  # besides, values that a pipeline has in shards between its batches alone


def memory_by_place(
    model: ShardedModel,
    *,
    has_states: bool = True,
    whole_units: Sequence[Unit] = (),
    has_whole_gradients: bool = False,
) -> list[dict[str, Any]]:
    """Return a row for ranks that hold equally much and have something of their place in common, in the order
    of the first of each: "ranks", "place" and bytes by kind. Without places rank 0 stands for all.
    `has_states`: the optimizer's are there already. While a batch runs, `whole_units` have whole parameters,
    and `has_whole_gradients`: all have whole gradients, where these are sharded.

    Order: a collective where ranks have places
    """
    job, own = model.job, held_by(model)
    own = own._replace(
        states=own.states if has_states else None,
        whole_in_a_batch=_whole_parameters(whole_units)
        + (_whole_gradients(model) if has_whole_gradients else 0),
    )
    every = [own] * job.size
    if job.names.has_places:
        every = [Held(*one) for one in job.all_gather_objects(tuple(own), what="what each rank holds")]
    rows: dict[tuple[str, Held], list[int]] = {}
    for rank, held in enumerate(every):
        first = job.names.place((rank,)).partition(", ")[0]  # a stage, where there are several
        rows.setdefault((first if first.startswith("stage ") else "", held), []).append(rank)
    return [
        {
            "ranks": folded(ranks),
            "place": job.names.place(ranks),
            **{f"{name}_bytes": value for name, value in held._asdict().items()},
        }
        for (_, held), ranks in rows.items()
    ]


def held_by(model: ShardedModel) -> Held:
    """Return what this rank holds. Gradients that autograd makes are counted as if they were there."""
    sub_buffers = [one for unit in model.units for one in unit.sub_buffers]
    seen: set[int] = set()

    def total(tensors: Iterable[Tensor]) -> int:
        num_bytes = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                num_bytes += storage.nbytes()
        return num_bytes

    parameters = total(one.param_shard.kept for one in sub_buffers)
    trained = [one for one in sub_buffers if one.is_trained]
    to_come = [one for one in trained if isinstance(one.gradients, OwnGradients)]
    gradients = sum(_numel(one) * one.plan.dtype.itemsize for one in to_come)
    gradients += total(tensor for one in trained if one not in to_come for tensor in one.gradients.held())
    shards = [one.optimizer_shard for one in trained]
    masters = total(one.master for one in shards if one.has_separate_master)
    states = total(tensor for one in shards for tensor in one.states.values())
    return Held(parameters, gradients, masters, states)


def _whole_parameters(units: Iterable[Unit]) -> int:
    sharded = [one for unit in units for one in unit.sub_buffers if one.is_sharded]
    return sum(one.layout.numel * one.plan.dtype.itemsize for one in sharded)


def _whole_gradients(model: ShardedModel) -> int:
    """Elements of the gradients that autograd makes and the ranks then have in shards."""
    trained = [one for unit in model.units for one in unit.sub_buffers if one.is_trained]
    sharded = [one for one in trained if isinstance(one.gradients, ShardedGradients)]
    return sum(_numel(one) * one.plan.dtype.itemsize for one in sharded)


def _numel(one: SubBuffer) -> int:
    return sum(slot.numel for slot in one.layout.slots)
