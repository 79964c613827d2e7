"""The values of one model that are moved away from the device that computes, and the files for them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from ..comm.rank_group import Job
from ..config.offload import AioConfig
from ..config.zero import ZeroConfig
from ..placement.offload_plan import ON_DEVICE, MemoryKind, OffloadPlan, Residence, StepAt
from .host_memory import give_back_freed_memory
from .outbox import Outbox
from .spill import Spill
from .spill_folder import SpillFolder

# a unit has at most 1/16 of the trained elements, so that the offloaded share is met closely
_SHARE_STEPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SubBufferResidence:
    """Places of one sub-buffer's values between their uses."""

    steps_on_host: bool = False  # the optimizer has its master and states in host memory, or on a disk
    states: Residence = ON_DEVICE
    params_on_host: bool = False  # this rank's shard of the parameters is in host memory, or on a disk
    parameters: Residence = ON_DEVICE

    @property
    def pins_states(self) -> bool:
        """Tell whether master and states are in page-locked memory."""
        return self.steps_on_host and self.states.kind is MemoryKind.CPU and self.states.pin_memory

    @property
    def pins_parameters(self) -> bool:
        """True if memory for offloaded parameters is pinned."""
        away = self.parameters
        return self.params_on_host and away.kind is MemoryKind.CPU and away.pin_memory

    @property
    def has_grads_on_disk(self) -> bool:
        """Tell whether sharded gradients go to the disk where the states are."""
        return self.states.kind is MemoryKind.NVME

    @property
    def is_apart(self) -> bool:
        """True if the optimizer steps in another memory than where this rank's shard of the
        parameters lies.
        """
        return self.steps_on_host != self.params_on_host


class Offload:
    """Offload of one model. Its methods are called for one sub-buffer after the other, in the same order on
    every rank.
    """

    def __init__(
        self,
        plan: OffloadPlan | None = None,
        *,
        num_trained: int = 0,
        max_unit_numel: int = sys.maxsize,
        folders: Mapping[Residence, SpillFolder] | None = None,
    ) -> None:
        """`num_trained` counts the trained elements; `folders` take the values that go to NVMe."""
        self._plan = plan or OffloadPlan()
        self._folders = folders or {}
        self._num_left = self._plan.share * num_trained
        self.max_unit_numel = max_unit_numel  # size up to which units may be merged
        self._num_spills = 0
        self.outbox = Outbox()  # gradients on their way to files

    @property
    def step_at(self) -> StepAt:
        """Return when states in host memory are updated."""
        return self._plan.step_at

    @property
    def warmup_steps(self) -> int:
        """Number of steps before those that are delayed."""
        return self._plan.warmup_steps

    @property
    def frees_gradients(self) -> bool:
        """Tell whether sharded gradients go to host memory or to a disk as soon as they are averaged."""
        states = self._plan.states
        return states.is_away and (self._plan.has_host or states.kind is MemoryKind.NVME)

    def residence_of(self, numel: int, *, is_trained: bool) -> SubBufferResidence:
        """Return where the next sub-buffer lies; it has `numel` elements."""
        plan = self._plan
        takes = is_trained and plan.states.is_away and self._num_left > 0
        if takes:
            self._num_left -= numel
        return SubBufferResidence(
            steps_on_host=takes and plan.has_host,
            states=plan.states if takes else ON_DEVICE,
            params_on_host=plan.parameters.is_away and plan.has_host,
            parameters=plan.parameters,
        )

    def make_spill(
        self, residence: Residence, tensors: Callable[[], Mapping[str, Tensor]], *, what: str
    ) -> Spill | None:
        """Return a spill that keeps such tensors on a disk; None if they stay in memory. `what`
        names them.
        """
        if residence not in self._folders:
            return None
        return self.make_disk_spill(residence, tensors, what=what)

    def make_disk_spill(
        self, residence: Residence, tensors: Callable[[], Mapping[str, Tensor]], *, what: str
    ) -> Spill:
        """Return the spill of a residence that is on a disk."""
        self._num_spills += 1
        return Spill(self._folders[residence], f"{self._num_spills}", tensors, what=what)

    def begin(self) -> None:
        """Give memory back to the system once all states are made: the earlier memory of parameters, and the
        memory through which values went to a disk.
        """
        give_back_freed_memory()

    def close(self) -> None:
        """Remove the files."""
        for folder in self._folders.values():
            folder.close()


def make_offload(
    plan: OffloadPlan, zero: ZeroConfig, aio: AioConfig, *, num_trained: int, job: Job
) -> Offload:
    """Return the offload of one engine's model.

    Order:  a collective for each kind of value on NVMe
    Errors: ConfigError if a folder cannot be used
    """
    max_unit_numel = sys.maxsize
    if plan.states.is_away and plan.share < 1.0:
        max_unit_numel = max(1, num_trained // _SHARE_STEPS)
    folders = {}
    for key, residence in (("offload_optimizer", plan.states), ("offload_param", plan.parameters)):
        if residence.nvme_path is not None and residence not in folders:
            max_unit_numel = min(max_unit_numel, zero.sub_group_numel)
            folders[residence] = SpillFolder(
                residence.nvme_path, aio, key=f"zero_optimization.{key}", job=job
            )
    return Offload(plan, num_trained=num_trained, max_unit_numel=max_unit_numel, folders=folders)
