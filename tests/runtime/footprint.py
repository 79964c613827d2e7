"""How many bytes of each kind of memory one rank needs at most while it trains,
wherever values lie between their uses.

Letters, as in docs/train/offload.md:
n  trained elements of the model        N  ranks         s = u/N, a unit's shard
u  elements of the largest unit         p  elements of the largest parameter
b  bytes of a parameter                 k bytes of an element's optimizer states, with the float32
                                        master if there is one
"""

from __future__ import annotations

from dataclasses import dataclass

from dslaunch.runtime.placement.offload_plan import MemoryKind, OffloadPlan
from dslaunch.runtime.placement.stage_policy import Placement, Policy

_SUM_BYTES = 4  # of gradients over micro batches
_TURNS = 3  # units of a step: one is read, one updated, one written
_GRAD_TURNS = 2  # the one that is written needs its gradients no more
_FLATS = 2  # one is filled by autograd while another is averaged
_LIVE = 2  # units that are gathered: one computes, one is next


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What of a model counts. Units: elements, and bytes of one."""

    numel: int
    unit_numel: int  # of the largest unit
    param_numel: int  # of the largest parameter
    param_bytes: int
    num_states: int = 2  # of the optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of one rank, without padding, activations and buffers; on CPUs `device` and `host`
    are the same memory.
    """

    device: float = 0.0
    host: float = 0.0
    disk: float = 0.0

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            device=self.device + other.device, host=self.host + other.host, disk=self.disk + other.disk
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes that one rank holds between steps."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


def optimizer_bytes_per_element(*, num_states: int, param_bytes: int) -> int:
    """Return K: the fp32 states, plus an fp32 master where the parameter itself is not fp32.

    Adam has two states: K = 12 with 16-bit parameters, 8 with fp32 ones, which are their own master.
    """
    return 4 * num_states + (0 if param_bytes == 4 else 4)


def memory_bytes(
    policy: Policy,
    *,
    numel: int,
    param_bytes: int,
    grad_bytes: int,
    optimizer_bytes: float,
    num_shards: int,
    num_param_shards: int | None = None,
) -> Memory:
    """Return what one rank holds between steps, without padding and without the units that are in flight.

    Units:  `numel` counts trained elements; the other arguments are bytes per element, and numbers of shards
    Source: ZeRO (arXiv 1910.02054) section 3, with b = param_bytes, g = grad_bytes, K = optimizer_bytes
    """

    def held(placement: Placement, bytes_per_element: float, shards: int = num_shards) -> float:
        share = shards if placement is Placement.SHARDED else 1
        return numel * bytes_per_element / share

    return Memory(
        parameters=held(policy.parameters, param_bytes, num_param_shards or num_shards),
        gradients=held(policy.gradients, grad_bytes),
        optimizer=held(policy.optimizer, optimizer_bytes),
    )


def peak_bytes(
    policy: Policy,
    plan: OffloadPlan,
    model: ModelSize,
    *,
    num_ranks: int,
    is_accumulating: bool,
    is_gpu: bool,
) -> Footprint:
    """Return the most that a rank holds at one time in training, as tests find it with a census of storages.

    `is_accumulating`: a step has several micro batches. `is_gpu`: collectives need no memory beside, and
    copies to the host go on while the next unit computes; else they are gloo's, and done at once. No GPU
    has been measured yet.
    """
    states_leave = plan.states.is_away and (plan.has_host or plan.states.kind is MemoryKind.NVME)
    is_alone = num_ranks == 1
    one = _Rank(
        plan=plan,
        model=model,
        num_ranks=num_ranks,
        has_sharded_grads=policy.gradients is Placement.SHARDED and (not is_alone or states_leave),
        has_sharded_params=policy.parameters is Placement.SHARDED
        and (not is_alone or plan.parameters.is_away),
        is_accumulating=is_accumulating,
        is_gpu=is_gpu,
    )
    return one.parameters() + one.states() + (one.shards() if one.has_sharded_grads else one.whole_grads())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """What one rank holds of each kind of value. The letters are those above; `m` is n/N."""

    plan: OffloadPlan
    model: ModelSize
    num_ranks: int
    has_sharded_grads: bool
    has_sharded_params: bool
    is_accumulating: bool
    is_gpu: bool

    @property
    def steps_on_host(self) -> bool:
        return self.plan.has_host and self.plan.states.is_away

    def parameters(self) -> Footprint:
        b, m, s = self._shares()
        residence = self.plan.parameters
        is_one_left = not self.has_sharded_grads and not self.is_accumulating  # when all gradients are here
        live = b * self.model.unit_numel * (0 if not self.has_sharded_params else 1 if is_one_left else _LIVE)
        if residence.kind is MemoryKind.NVME:
            return Footprint(device=live, host=_TURNS * b * s, disk=b * m)
        if self.plan.has_host and residence.is_away:
            return Footprint(device=live, host=b * m)
        return Footprint(device=live + b * (m if self.has_sharded_params else self.model.numel))

    def states(self) -> Footprint:
        b, m, s = self._shares()
        # Parameters of float32 are their own masters, unless the optimizer steps in another memory.
        is_apart = self.steps_on_host != (self.plan.has_host and self.plan.parameters.is_away)
        k = optimizer_bytes_per_element(num_states=self.model.num_states, param_bytes=0 if is_apart else b)
        sent = b * s if is_apart and self.steps_on_host else 0.0  # new parameters, on their way to the device
        if self.plan.states.kind is MemoryKind.NVME:
            return Footprint(host=_TURNS * k * s + sent, disk=k * m)
        return Footprint(host=k * m + sent) if self.steps_on_host else Footprint(device=k * m)

    def whole_grads(self) -> Footprint:
        """As autograd makes them; one more has just been made where it is added."""
        b = self.model.param_bytes
        return Footprint(
            device=b * self.model.numel + (b * self.model.param_numel if self.is_accumulating else 0)
        )

    def shards(self) -> Footprint:
        b, m, s = self._shares()
        u, p = self.model.unit_numel, self.model.param_numel
        num_flats = _FLATS + (1 if self.is_gpu and self.steps_on_host else 0)  # the last is being copied
        received = 0.0
        if not self.is_gpu and self.num_ranks > 1:
            others = (self.num_ranks - 1) / self.num_ranks  # each rank's part is there
            received = _FLATS * b * u * others + (_SUM_BYTES * s if b < _SUM_BYTES else 0)
        # A gradient has gone into its flat buffer before that is sent.
        on_way = Footprint(device=num_flats * b * u + max(b * p, received))
        wider = _SUM_BYTES * m if self.is_accumulating else 0.0
        if self.plan.states.kind is MemoryKind.NVME:
            kept = _SUM_BYTES if self.is_accumulating else b
            files = b * m + (wider if b < _SUM_BYTES else 0)
            return on_way + Footprint(host=_GRAD_TURNS * kept * s, disk=files)
        if self.steps_on_host:
            return on_way + Footprint(host=b * m + wider)
        return on_way + Footprint(device=_SUM_BYTES * m)

    def _shares(self) -> tuple[int, float, float]:
        return (
            self.model.param_bytes,
            self.model.numel / self.num_ranks,
            self.model.unit_numel / self.num_ranks,
        )
