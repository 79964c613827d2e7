"""The optimizer that the user sees: their parameter groups in front, flat shards behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError, ConfigError
from ..zero.unit import SubBuffer
from .loss_scale import LossScaler
from .rule import Rule, Shard


class FlatOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose states are one tensor per sub-buffer and rank.

    `param_groups` hold the user's parameters and hyper-parameters; schedulers and users change lr there. Parameters
    that no group contains, and frozen ones, are left alone.
    """

    def __init__(self, param_groups: list[dict[str, Any]], *, defaults: dict[str, Any], rule: Rule) -> None:
        super().__init__(param_groups, defaults)
        self.param_groups = param_groups  # the very list, so a client's scheduler and we see the same lr
        self.rule = rule
        self.num_steps = 0  # applied, not skipped
        self.parts: tuple[SubBuffer, ...] = ()
        self._scaler: LossScaler | None = None

    def attach(self, parts: Sequence[SubBuffer], *, scaler: LossScaler) -> None:
        """Allocate the states of this rank's shards."""
        self.parts = tuple(parts)
        self._scaler = scaler
        for part in self.parts:
            part.states = {name: torch.zeros_like(part.master) for name in self.rule.state_names}

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied with before backward; 1 without fp16."""
        return 1.0 if self._scaler is None else self._scaler.scale

    cur_scale = loss_scale

    @property
    def states(self) -> tuple[dict[str, Tensor], ...]:
        """Per part: name -> [shard] float32."""
        return tuple(part.states for part in self.parts)

    @torch.no_grad()
    def step(  # type: ignore[override]  # a closure would have to run forward and backward on all ranks
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: float | None = None,
        after_part: Callable[[SubBuffer], None] | None = None,
    ) -> None:
        """Update this rank's shards from reduced gradients; `after_part` is called as each sub-buffer is done.

        Errors: ConfigError when called by a user: gradients would not be reduced, nor parameters gathered
        """
        if grad_scale is None or closure is not None:
            raise ConfigError(
                "optimizer.step() was called directly; call engine.step(), which calls it in turn"
            )
        self.num_steps += 1
        for part, states in zip(self.parts, self.states, strict=True):
            for piece in part.grad_pieces():
                run = slice(piece.offset, piece.offset + piece.grad.numel())
                shard = Shard(
                    master=part.master[run],
                    grad=piece.grad,
                    param_out=part.param_shard[run] if part.has_separate_master else None,
                    segments=piece.segments,
                )
                own_states = {name: state[run] for name, state in states.items()}
                self.rule.update(
                    shard, own_states, self.param_groups, step=self.num_steps, grad_scale=grad_scale
                )
            if after_part is not None:
                after_part(part)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero; their memory is kept, whatever `set_to_none` says."""
        for part in self.parts:
            part.gradients.zero()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is being built; afterwards the flat buffers are laid out for good."""
        if getattr(self, "parts", ()):
            raise ConfigError(
                "add_param_group() after initialize() is not supported; give initialize() all groups"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Refuse: a rank holds shards only."""
        raise CheckpointError(
            "optimizer.state_dict() would be this rank's shard; use engine.save_checkpoint()"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse: a rank holds shards only."""
        raise CheckpointError("optimizer.load_state_dict() has no whole state; use engine.load_checkpoint()")
