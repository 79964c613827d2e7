"""What a training loop reads of an engine: counters, sizes, what is on."""

from __future__ import annotations

from typing import Any

from .checkpoint.progress import Progress
from .comm.collectives import Collectives
from .config import Config
from .optim.flat import FlatOptimizer
from .zero.policy import Placement, Policy


class Readings:
    """DeepSpeed's getters, most of which are methods. None of them is a collective."""

    config: Config
    optimizer: FlatOptimizer | None
    _policy: Policy
    _progress: Progress
    _comm: Collectives
    _grad_norm: float | None
    _was_step_applied: bool

    @property
    def micro_steps(self) -> int:
        return self._progress.micro_steps

    @property
    def global_steps(self) -> int:
        return self._progress.global_steps

    @property
    def global_samples(self) -> int:
        return self._progress.global_samples

    @property
    def skipped_steps(self) -> int:
        return self._progress.skipped_steps

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the parameters."""
        return self._was_step_applied

    def get_global_grad_norm(self) -> float | None:
        """Return the last step's gradient norm, before clipping, the same on all ranks; None before the first."""
        return self._grad_norm

    def get_lr(self) -> list[float]:
        """Return each parameter group's learning rate."""
        return [float(group["lr"]) for group in self._groups()]

    def get_mom(self) -> list[Any]:
        """Return each parameter group's momentum, or betas."""
        return [
            group["betas"] if "betas" in group else group.get("momentum", 0.0) for group in self._groups()
        ]

    def train_batch_size(self) -> int:
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        return self.config.gradient_accumulation_steps

    def gradient_clipping(self) -> float:
        return self.config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self._policy.stage

    def zero_optimization(self) -> bool:
        """Whether anything is sharded."""
        return self._policy.is_sharded

    def zero_optimization_partition_gradients(self) -> bool:
        return self._policy.gradients is Placement.SHARDED

    def zero_optimization_partition_weights(self) -> bool:
        return self._policy.parameters is Placement.SHARDED

    def bfloat16_enabled(self) -> bool:
        return self.config.bf16.enabled

    def fp16_enabled(self) -> bool:
        return self.config.fp16.enabled

    def comm_bytes(self) -> dict[str, int]:
        """Return the bytes that this rank has sent, by kind of collective (ring formulas; see `Meter`)."""
        return self._comm.meter.bytes_by_kind()

    def comm_order_hash(self) -> int:
        """Return a hash of the order of collectives so far; equal on all ranks unless one has gone astray."""
        return self._comm.meter.order_hash

    def _groups(self) -> list[dict[str, Any]]:
        return [] if self.optimizer is None else self.optimizer.param_groups
