"""Forecast of what other configurations need and take, from rehearsals of some. Arithmetic only.

A forecast chooses what is rehearsed next, and in which order; what is said to fit was rehearsed, or is called
a bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ...shared.zero_bytes import sent_bytes
from ..job.mesh import HostSlots
from .answer import DEVICE, HOST, Answer, DeviceWork, SentBytes, StepWork
from .candidates import Candidate, Setup
from .model_bytes import ModelBytes, Need, RankRoom, activation_bytes

_KEPT = 0.15  # share of its activations that a checkpointed model keeps, where it was not rehearsed
_AGAIN = 4 / 3  # computing with a second forward
_TP_SENDS = 0.5  # bytes that a layer divided over many ranks sends for each byte of its activations
_TOUCHED = 2  # an optimizer reads and writes each array
_MOST_HOSTS = 4096


class _Seen(NamedTuple):
    """A rehearsal: what it needed beside activations, those of a sample, and the bound of the former."""

    setup: Setup
    world_size: int
    fixed: Need
    sample_bytes: float
    held: Need


class Forecast:
    """Expected needs and times of configurations, better with each rehearsal that it is told of."""

    def __init__(self, sizes: ModelBytes, room: RankRoom, *, hosts: tuple[HostSlots, ...]) -> None:
        self.sizes, self.room, self._hosts = sizes, room, hosts
        self._seen: list[_Seen] = []

    @property
    def world_size(self) -> int:
        """Return the ranks of the job as it is."""
        return sum(one.num_ranks for one in self._hosts)

    def saw(self, candidate: Candidate, answer: Answer, *, world_size: int) -> None:
        """Take in what a rehearsal found of the rank that needs most."""
        sizes = self.sizes
        place = DEVICE if sizes.has_gpus else HOST
        worst = answer.worst(place)
        activations = activation_bytes(answer, has_gpus=sizes.has_gpus)
        fixed = (0 if worst is None else worst.peak(place).num_bytes) - activations
        held = sizes.held(candidate.setup, world_size=world_size)
        on_host = answer.host_bytes if sizes.has_gpus else fixed
        self._seen.append(
            _Seen(
                setup=candidate.setup,
                world_size=world_size,
                fixed=Need(fixed if sizes.has_gpus else 0.0, on_host),
                sample_bytes=activations / candidate.micro_batch_size,
                held=sizes.need(held, 0.0),
            )
        )

    def expected(self, candidate: Candidate, *, world_size: int | None = None) -> Need:
        """Return what it should need: its parts, and beside them what a rehearsed one needed."""
        world_size = world_size or self.world_size
        setup, sizes = candidate.setup, self.sizes
        held = sizes.need(sizes.held(setup, world_size=world_size), 0.0)
        near = max(self._seen, key=lambda one: _likeness(one, setup, world_size))
        activations = candidate.micro_batch_size * self._sample_bytes(setup)
        on_device, on_host = (
            parts + (fixed - seen_parts)
            for parts, fixed, seen_parts in zip(held, near.fixed, near.held, strict=True)
        )
        if sizes.has_gpus:
            return Need(on_device + activations, on_host)
        return Need(0.0, on_host + activations)

    def _sample_bytes(self, setup: Setup) -> float:
        """Return the activations of one sample: as seen of a setup that is checkpointed alike, or guessed."""
        alike = [one for one in self._seen if one.setup.is_checkpointed == setup.is_checkpointed]
        exact = [one for one in alike if one.setup == setup]
        if exact:
            return exact[-1].sample_bytes
        one = (alike or self._seen)[-1]
        factor = one.setup.num_together / setup.num_together
        if not alike:
            factor *= _KEPT if setup.is_checkpointed else 1 / _KEPT
        return one.sample_bytes * factor

    def hosts_needed(self, candidate: Candidate) -> int | None:
        """Return the smallest larger number of hosts, with as many ranks each, on which the configuration
        should fit; None if it never does.
        """
        number = len(self._hosts)
        for num_hosts in range(number + 1, _MOST_HOSTS + 1):
            need = self.expected(candidate, world_size=num_hosts * self.world_size // number)
            if self.room.holds(need):
                return num_hosts
        return None

    def work(self, candidate: Candidate, work: StepWork) -> StepWork:
        """Return the work of a step, by the formulas of ZeRO for what is sent and copied; `work` is
        that of the job as it is.
        """
        sizes, setup = self.sizes, candidate.setup
        given, placing = sizes.given, setup.placing
        params = sizes.num_trained * given.setup.num_holders / setup.num_holders
        num_ranks = max(1, self.world_size // setup.num_holders)
        again = 1.0
        if setup.is_checkpointed != given.setup.is_checkpointed:
            again = _AGAIN if setup.is_checkpointed else 1 / _AGAIN
        launches = candidate.num_micro_batches / given.num_micro_batches * again
        shard = params / (num_ranks if placing.stage else 1)
        updated = int(_TOUCHED * shard * (sizes.each.states + sizes.each.gradient_sum))
        is_on_host = placing.has_optimizer_on_host or not sizes.has_gpus
        on_device = [_scaled(one, again, launches) for one in work.on_device if not one.is_update]
        if not is_on_host:
            on_device.append(
                DeviceWork(dtype="float32", flops=0, moved_bytes=updated, num_kernels=1, is_update=True)
            )
        copied = 0.0
        if placing.has_optimizer_on_host:
            gradients = sizes.each.gradient_sum * (candidate.num_micro_batches if placing.stage > 1 else 1)
            copied += shard * (gradients + sizes.each.parameter)
        if placing.has_parameters_on_host:
            copied += 2 * candidate.num_micro_batches * shard * sizes.each.parameter
        return replace(
            work,
            on_device=tuple(on_device),
            host_bytes=updated if is_on_host else 0,
            copied_bytes=(("to and from the host", int(copied)),),
            update_copied_bytes=(),
            sent=(self._sent_by_zero(candidate, params, num_ranks), *self._sent_inside(candidate, work.sent)),
        )

    def _sent_by_zero(self, candidate: Candidate, params: float, num_ranks: int) -> SentBytes:
        stage, number = candidate.placing.stage, candidate.num_micro_batches
        is_pipeline = candidate.setup.num_stages > 1
        sent = sent_bytes(
            params,
            number_bytes=self.sizes.each.parameter,
            stage=stage,
            num_ranks=num_ranks,
            num_micro_batches=number,
            is_pipeline=is_pipeline,
        )
        gathered = 1 / 2
        if stage > 1 and not is_pipeline:
            gathered = 1 / (number + 1) if stage == 2 else 2 / 3
        kinds = (("reduce_scatter", int(sent * (1 - gathered))), ("all_gather", int(sent * gathered)))
        in_update = kinds[1:] if stage < 3 else ()  # the new parameters
        return SentBytes(axis="dp", ranks=(), kinds=kinds, update_kinds=in_update)

    def _sent_inside(self, candidate: Candidate, sent: Iterable[SentBytes]) -> Iterable[SentBytes]:
        """Yield what ranks with parts of the same samples send: as it was along axes that stay."""
        setup, given = candidate.setup, self.sizes.given.setup
        sizes, before = setup.mesh_sizes, given.mesh_sizes
        for one in sent:
            if one.axis != "dp" and sizes.get(one.axis) == before.get(one.axis):
                yield one
        size = sizes.get("tp", 1)
        if size != before.get("tp", 1) and size > 1:
            samples = candidate.micro_batch_size * candidate.num_micro_batches
            crossing = _TP_SENDS * samples * self._sample_bytes(setup) * (size - 1)
            yield SentBytes(axis="tp", ranks=tuple(range(size)), kinds=(("all_reduce", int(crossing)),))


def _scaled(one: DeviceWork, again: float, launches: float) -> DeviceWork:
    return replace(
        one,
        flops=int(one.flops * again),
        moved_bytes=int(one.moved_bytes * again),
        num_kernels=max(1, int(one.num_kernels * launches)),
    )


def _likeness(one: _Seen, setup: Setup, world_size: int) -> tuple[bool, ...]:
    return (
        one.setup == setup,
        (one.setup.placing.stage >= 3) == (setup.placing.stage >= 3),
        one.setup.placing.on_host == setup.placing.on_host,
        one.setup.mesh_sizes == setup.mesh_sizes,
        one.world_size == world_size,
    )
