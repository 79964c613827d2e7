"""Sizes of a model, as a rehearsal told them, and bounds of what a configuration needs. Arithmetic only.

A bound has the parts that a rank surely has; what a rehearsal finds is more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...shared.zero_bytes import HeldBytes, TrainedBytes, adam_bytes, held_bytes
from ..job.mesh import JobMesh
from .answer import ALL_HOST, DEVICE, HOST, Answer
from .candidates import AUTO, PLACINGS, Candidate, Setup, divisors
from .verdict import OUTSIDE_BYTES, JobMemory

ACTIVATIONS, PARAMETERS, STATES = "activations", "parameters", "masters and optimizer states"


class Need(NamedTuple):
    """Bytes of the tensors of one rank."""

    on_device: float
    on_host: float


class RankRoom(NamedTuple):
    """Bytes that the tensors of one rank may take. None: not known, or no such memory."""

    on_device: float | None
    on_host: float | None

    def holds(self, need: Need) -> bool:
        """Tell whether there is as much room as is needed."""
        return all(there is None or needed <= there for needed, there in zip(need, self, strict=True))


def room_of(memory: JobMemory, *, margin: float = 0.0) -> RankRoom:
    """Return the room of a rank; `margin`: a share of each GPU that is left free, or of the hosts where there
    are none.
    """
    on_device, kept = None, 1 - margin
    if memory.device_bytes is not None:
        on_device, kept = memory.device_bytes * (1 - margin) - OUTSIDE_BYTES, 1.0
    shares = [
        total * kept / host.num_ranks - memory.process_bytes
        for host, total in zip(memory.hosts, memory.host_bytes, strict=True)
        if total is not None
    ]
    return RankRoom(on_device, min(shares, default=None))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelBytes:
    """Sizes of the model as it was rehearsed: of the rank whose stage and part are largest."""

    num_trained: int
    num_frozen: int
    each: TrainedBytes
    activation_bytes: float  # what one sample in a micro batch adds
    has_gpus: bool
    given: Candidate

    @property
    def num_samples(self) -> int:
        """Return the samples in one step of the ranks that compute together."""
        return self.given.micro_batch_size * self.given.num_micro_batches

    def held(self, setup: Setup, *, world_size: int) -> HeldBytes:
        """Return what a rank holds between its steps."""
        share = self.given.setup.num_holders / setup.num_holders
        return held_bytes(
            self.num_trained * share,
            self.num_frozen * share,
            each=self.each,
            stage=setup.placing.stage,
            num_ranks=max(1, world_size // setup.num_holders),
            has_optimizer_on_host=setup.placing.has_optimizer_on_host,
            has_parameters_on_host=setup.placing.has_parameters_on_host,
        )

    def need(self, held: HeldBytes, activations: float) -> Need:
        """Return where these bytes are: without GPUs all are on the host."""
        on_device = held.on_device + activations
        return Need(on_device, held.on_host) if self.has_gpus else Need(0.0, held.on_host + on_device)

    def share_of_sample(self, setup: Setup) -> float:
        """Return the part of a sample that a rank computes, measured by what was rehearsed."""
        return self.given.setup.num_together / setup.num_together

    def bound(self, setup: Setup, micro_batch_size: int, *, world_size: int) -> Need:
        """Return what is needed at least."""
        activations = micro_batch_size * self.activation_bytes * self.share_of_sample(setup)
        if setup.is_checkpointed and not self.given.setup.is_checkpointed:
            activations = 0.0  # what is left of them is not known
        return self.need(self.held(setup, world_size=world_size), activations)

    def configurations(
        self, setups: Sequence[Setup], *, may_change_batch: bool = True
    ) -> Iterator[Candidate]:
        """Yield each setup with each micro batch that leaves the samples of a step as they are, the largest
        first.
        """
        for setup in setups:
            samples, rest = divmod(self.num_samples * setup.num_together, self.given.setup.num_together)
            if rest:
                continue
            for size in divisors(samples):
                if may_change_batch or size == self.given.micro_batch_size:
                    yield Candidate(setup=setup, micro_batch_size=size, num_micro_batches=samples // size)


def setups_of(
    *, meshes: Sequence[JobMesh | None], checkpointing: Sequence[bool], has_gpus: bool
) -> tuple[Setup, ...]:
    """Return each placing on each mesh, the job's first, with and without checkpointing; a pipeline's ZeRO
    stage is 1.
    """
    return tuple(
        found
        for mesh in meshes
        for is_checkpointed in checkpointing
        for placing in PLACINGS
        for found in [
            Setup(placing=placing, is_checkpointed=is_checkpointed, mesh=mesh, says_mesh=mesh != meshes[0])
        ]
        if (placing.stage <= 1 or found.num_stages == 1) and (has_gpus or not placing.on_host)
    )


def model_bytes(
    answer: Answer, config: Mapping[str, Any] | None, setup: Setup, *, world_size: int, has_gpus: bool
) -> ModelBytes:
    """Return the sizes of the model that was rehearsed with this ds_config, None where it is not known;
    `answer` is that of the rank that holds most.
    """
    sizes = dict(answer.model)
    micro_batch_size = max(1, sizes.get("micro_batch_size", 1))
    num_trained = sizes.get("num_trained", 0)
    num_ranks = max(1, world_size // setup.num_holders)
    num_sharers = num_ranks if setup.placing.stage else 1
    sections = [{} if config is None else config.get(name) or {} for name in ("bf16", "bfloat16", "fp16")]
    switches = [one.get("enabled") for one in sections if isinstance(one, dict)]
    is_half = any(one is True for one in switches)
    if config is None or (AUTO in switches and not is_half):
        held = _most(answer, PARAMETERS) * (num_ranks if setup.placing.stage == 3 else 1)
        is_half = 0 < held < 3 * (num_trained + sizes.get("num_frozen", 0))
    each = adam_bytes(2 if is_half else 4, config)
    if num_trained and not dict(answer.file_bytes).get("offloaded"):  # else files have them
        each = each._replace(states=_most(answer, STATES) / (num_trained / num_sharers))
    return ModelBytes(
        num_trained=num_trained,
        num_frozen=sizes.get("num_frozen", 0),
        each=each,
        activation_bytes=activation_bytes(answer, has_gpus=has_gpus) / micro_batch_size,
        has_gpus=has_gpus,
        given=Candidate(
            setup=setup,
            micro_batch_size=micro_batch_size,
            num_micro_batches=max(1, sizes.get("num_micro_batches", 1)),
        ),
    )


def activation_bytes(answer: Answer, *, has_gpus: bool) -> int:
    """Return the activations at the highest moment."""
    place = DEVICE if has_gpus else HOST
    worst = answer.worst(place)
    return 0 if worst is None else dict(worst.peak(place).kinds).get(ACTIVATIONS, 0)


def holds(answer: Answer, kind: str, *places: str) -> bool:
    """Tell whether there is something of a kind at a peak of these places."""
    return any(dict(phase.peak(place).kinds).get(kind) for phase in answer.stretches for place in places)


def _most(answer: Answer, kind: str) -> int:
    """Return the bytes of a kind in all places, in the phase of a step that has most."""
    steps = [phase for phase in answer.stretches if phase.name.startswith("step ")]
    return max(
        (sum(dict(phase.peak(place).kinds).get(kind, 0) for place in (DEVICE, ALL_HOST)) for phase in steps),
        default=0,
    )
