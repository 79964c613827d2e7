"""The optimizer that the user sees: their parameter groups in front, flat shards behind."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..comm.collectives import Collectives
from ..errors import CheckpointError, ConfigError
from ..zero.units.sub_buffer import SubBuffer
from .host_update import Update, UpdateSubBuffer
from .loss_scale import LossScaler
from .rule import AfterSubBuffer, Rule, SubBufferRule, hyper_parameters

# torch's method without its wrapper. The wrapper, which hides it from torch.compile, imports the compiler on
# the first call: more than a second on every rank of a job that compiles nothing.
_ADD_PARAM_GROUP = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class FlatOptimizer(torch.optim.Optimizer):
    """A torch optimizer whose states are one tensor per sub-buffer and rank.

    `param_groups` hold the user's parameters and hyper-parameters; schedulers and users change lr there.
    Parameters that no group contains, and frozen ones, are left alone.
    """

    clip_grad: float | None = 0.0
    """The largest norm of all gradients; None or 0: no limit. It counts from the next step on."""
    overflow = False
    """Whether the last step was skipped, because gradients were infinite or NaN."""
    _global_grad_norm: float | None = 0.0
    """The last step's gradient norm before clipping."""
    _scaler: LossScaler | None = None
    _look_for_overflow: Callable[[], bool] | None = None

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        *,
        defaults: dict[str, Any],
        rule: Rule,
        client: torch.optim.Optimizer | None = None,
    ) -> None:
        """`client` is the program's own optimizer, if it has one, with the same groups."""
        super().__init__(param_groups, defaults)
        self.param_groups = param_groups  # the very list, so a client's scheduler and we see the same lr
        self.rule = rule
        self.num_steps = 0  # applied, not skipped
        self.sub_buffers: tuple[SubBuffer, ...] = ()
        self._client = client
        self._zero_gradients: Callable[[], None] | None = None

    def attach(
        self,
        sub_buffers: Sequence[SubBuffer],
        *,
        comm: Collectives,
        scaler: LossScaler,
        zero_gradients: Callable[[], None],
        look_for_overflow: Callable[[], bool] | None = None,
    ) -> None:
        """Get ready to update this rank's shards."""
        self.sub_buffers = tuple(sub_buffers)
        self._zero_gradients = zero_gradients
        self._scaler = scaler
        self._look_for_overflow = look_for_overflow
        self.rule.attach(self.sub_buffers, self.param_groups, comm)

    @property
    def states(self) -> tuple[dict[str, Tensor], ...]:
        """Return for each sub-buffer: name -> [shard] float32. They may be written to until the next
        backward.
        """
        for sub_buffer in self.sub_buffers:
            if sub_buffer.before_use is not None:
                sub_buffer.before_use(True)
        return tuple(sub_buffer.optimizer_shard.states for sub_buffer in self.sub_buffers)

    @torch.no_grad()
    def step(  # type: ignore[override]  # a closure would have to run forward and backward on all ranks
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: float | None = None,
        after_sub_buffer: AfterSubBuffer | None = None,
    ) -> None:
        """Update this rank's shards from reduced gradients; `after_sub_buffer` is called as each
        sub-buffer is done.

        Errors: ConfigError when called by a user: gradients would not be reduced, nor parameters gathered
        """
        if grad_scale is None or closure is not None:
            raise ConfigError(
                "optimizer.step() was called directly; call engine.step(), which calls it in turn"
            )
        self.num_steps += 1
        self.rule.step(
            self.param_groups, step=self.num_steps, grad_scale=grad_scale, after_sub_buffer=after_sub_buffer
        )

    def next_update(self, grad_scale: float) -> Update:
        """Return what the next step does, with the groups as they are now."""
        groups = tuple(
            {name: _value(value) for name, value in hyper_parameters(group).items()}
            for group in self.param_groups
        )
        return Update(groups=groups, step=self.num_steps + 1, grad_scale=grad_scale)

    def sub_buffer_update(self, update: Update) -> UpdateSubBuffer:
        """Return the update of one sub-buffer.

        Errors: AssertionError for an optimizer that does not step part by part
        """
        if not isinstance(self.rule, SubBufferRule):
            raise AssertionError(f"{self.rule.name} does not step part by part")
        groups = [dict(group) for group in update.groups]
        return self.rule.sub_buffer_update(groups, step=update.step, grad_scale=update.grad_scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to zero; their memory is kept for any value of `set_to_none`."""
        if self._zero_gradients is not None:
            self._zero_gradients()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimizer is being built; refuse it afterwards, when the layout of the flat
        buffers is fixed.
        """
        if getattr(self, "sub_buffers", ()):
            raise ConfigError(
                "add_param_group() after initialize() is not supported; give initialize() all groups"
            )
        _ADD_PARAM_GROUP(self, param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the groups with their hyper-parameters, for a program that reads these. Reading "state"
        raises, because a rank holds only shards.
        """
        groups = [hyper_parameters(group) for group in self.param_groups]
        return {"state": _ShardedStates(), "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refuse: a rank holds shards only."""
        raise CheckpointError("optimizer.load_state_dict() has no whole state; use engine.load_checkpoint()")


class _ShardedStates(Mapping[Any, Any]):
    """Stand-in for states: a program may gather or save a state_dict that has it, but reading it raises."""

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse()

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __len__(self) -> NoReturn:
        self._refuse()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle as the same stand-in, so that a program can save it, and reading it after a load raises,
        too.
        """
        return type(self), ()

    def _refuse(self) -> NoReturn:
        """Errors: CheckpointError"""
        raise CheckpointError(
            'optimizer.state_dict()["state"] would be this rank\'s shard; use engine.save_checkpoint()'
        )


def _value(value: Any) -> Any:
    """Return a hyper-parameter as a value that is not changed in place."""
    if isinstance(value, Tensor):
        return value.tolist()
    return tuple(value) if isinstance(value, list) else value
