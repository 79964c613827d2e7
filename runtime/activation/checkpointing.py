"""Activation checkpointing under DeepSpeed's names: `dslaunch.checkpointing`.

Of a checkpointed function only the inputs are kept; the backward computes again what else autograd needs.
torch.utils.checkpoint (use_reentrant=False) does that, and repeats the same random numbers. Here is what
DeepSpeed adds: inputs that wait in host memory, a tracker of random states, and the settings for both. Inputs
of torch's own checkpoint(), as models of transformers call it, wait there too if an engine runs the model.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..clock import Clock
from ..config import load_config
from ..config.activation import ActivationConfig
from ..config.section import read_section
from ..environment import read_environment
from ..errors import ConfigError
from ..mesh.mpu import tensor_place
from ..zero.param_location import ParamLocation, location_of
from ..zero.parameters.uncompiled import uncompiled
from .host_inputs import HostInputs, is_of_torchs_checkpoint
from .rng_tracker import DEFAULT_NAME, RngReplay, RngTracker, device_random

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "non_reentrant_checkpoint",
    "reset",
]

_SEED_OFFSET = 2718  # added to a seed for the ranks of a model-parallel group, as in DeepSpeed

_log = logging.getLogger("dslaunch")


class _Process:
    """Configuration of checkpointing in this process, and what has happened since."""

    def __init__(self) -> None:
        self.config = ActivationConfig()
        self.model_parallel_rank = 0
        self.is_configured = False
        self.is_explicit = False  # True after configure(), False if a ds_config of initialize() configured it
        self.was_called = False  # True once checkpoint() was called
        self.inputs = HostInputs()
        self.is_warned = False
        self.tracker = RngTracker()
        self.clock = _make_clock(self.config)

    def configure(self, config: ActivationConfig) -> None:
        self.config = config
        self.is_configured = True
        self.clock = _make_clock(config)
        _warn_of_what_has_no_effect(config)


def _make_clock(config: ActivationConfig) -> Clock:
    # is_available() makes forks impossible: ask only for `profile`
    has_gpu = config.profile and torch.cuda.is_available()
    return Clock(is_on=config.profile, device=torch.device("cuda" if has_gpu else "cpu"))


_PROCESS = _Process()  # module-level: DeepSpeed's functions below take no object that could hold it
# Programs read these two by DeepSpeed's names.
_CUDA_RNG_STATE_TRACKER, _MODEL_PARALLEL_RNG_TRACKER_NAME = _PROCESS.tracker, DEFAULT_NAME


# ---- DeepSpeed's functions


def configure(
    mpu_: Any,
    deepspeed_config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Configure `checkpoint()` in this process from now on; a ds_config that initialize() is given does not
    change it any more.

    `mpu_` is None or tells this rank's place in its model-parallel group. A named argument has precedence
    over the section activation_checkpointing of `deepspeed_config`; an option that neither sets is off.
    Errors: ConfigError for values of the wrong type, and for partition_activations in a model-parallel group
    Source: DeepSpeed 0.19.8 runtime/activation_checkpointing/checkpointing.py, `configure`
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    base = ActivationConfig()
    if deepspeed_config is not None:
        settings = load_config(deepspeed_config, world_size=_world_size())
        base = settings.activation_checkpointing or base
    problems: dict[str, str] = {}
    values = base.model_dump() | {name: value for name, value in given.items() if value is not None}
    config = read_section(ActivationConfig, values, path="activation_checkpointing", problems=problems)
    if config is None:
        raise ConfigError("\n".join(f"checkpointing.configure(): {line}" for line in problems.values()))
    rank, size = tensor_place(mpu_)
    if config.partition_activations and size > 1:
        raise ConfigError(
            f"checkpointing.configure(partition_activations=True) in a model-parallel group of {size} ranks "
            "is not available; leave it out, or use checkpoint_in_cpu=True"
        )
    _PROCESS.model_parallel_rank = rank
    _PROCESS.is_explicit = True
    _PROCESS.configure(config)


def is_configured() -> bool:
    """Tell whether `configure()`, or a ds_config with a section activation_checkpointing, was used."""
    return _PROCESS.is_configured


@uncompiled
def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return `function(*args, **kwargs)`, and keep for the backward only the tensors among its arguments,
    also those in containers.

    The backward calls `function` again, with the same random numbers. `function` may return anything, and
    need not use tensors that require a gradient. torch.compile breaks its graph at this call.
    """
    process = _PROCESS
    process.was_called = True
    leaves, structure = tree_flatten((args, kwargs))
    # The second computation may get sharded parameters as arguments. No module's hook unshards these, so
    # they are unsharded around it.
    locations = [location for leaf in leaves if (location := _sharded_location(leaf)) is not None]

    def run(*leaves: Any) -> Any:
        for location in locations:
            location.model.unshard_until_end(location.unit)
        args, kwargs = tree_unflatten(list(leaves), structure)
        return function(*args, **kwargs)

    def contexts() -> tuple[_Boundary, _Boundary]:
        return (
            _Boundary("checkpoint forward", process, nullcontext()),
            _Boundary("checkpoint recompute", process, RngReplay(process.tracker)),
        )

    with process.inputs.hooks(_is_not_sharded) if process.config.cpu_checkpointing else nullcontext():
        return torch_checkpoint(run, *leaves, use_reentrant=False, context_fn=contexts)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Do as `checkpoint`, which always uses torch's non-reentrant kind here."""
    return checkpoint(function, *args, **kwargs)


def reset() -> None:
    """Do nothing: DeepSpeed frees buffers here, and dslaunch has none of its own to free."""


def get_cuda_rng_tracker() -> RngTracker:
    """Return the tracker of random states; for the recomputation `checkpoint()` resets it to its earlier
    states.
    """
    return _PROCESS.tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device with `seed`, and the tracker's default state differently on each rank of a
    model-parallel group.
    """
    device_random().manual_seed(seed)
    _PROCESS.tracker.reset()
    _PROCESS.tracker.add(DEFAULT_NAME, seed + _SEED_OFFSET + _PROCESS.model_parallel_rank)


# ---- for the engine


def around_forward() -> AbstractContextManager[object]:
    """Return a context for a forward of a model: with cpu_checkpointing, inputs of torch's own checkpoint()
    inside it wait in host memory, too, whichever kind it is.
    """
    process = _PROCESS
    if not process.config.cpu_checkpointing or not torch.is_grad_enabled():
        return nullcontext()
    process.inputs.begin_forward()
    return process.inputs.hooks(is_of_torchs_checkpoint)


def configure_from(config: ActivationConfig | None) -> None:
    """Use a ds_config's section; without one, or after a call of `configure()`, change nothing."""
    if config is not None and not _PROCESS.is_explicit:
        _PROCESS.configure(config)


def warn_if_never_called(config: ActivationConfig | None) -> None:
    """Warn, once, if a ds_config configures checkpointing and nothing of it had an effect. DeepSpeed says
    nothing then.
    """
    if config is None or not config.asks_for_something or _PROCESS.was_called or _PROCESS.is_warned:
        return
    if _PROCESS.inputs.num_taken and config.asks_for_inputs_alone:
        return
    _PROCESS.is_warned = True
    if _rank() == 0:
        _log.warning(
            "activation_checkpointing is configured, but a whole step has passed without "
            "dslaunch.checkpointing.checkpoint(), so %s; call that in the model in place of "
            "torch.utils.checkpoint.checkpoint(), or leave the section out",
            "nothing of it but cpu_checkpointing has an effect"
            if _PROCESS.inputs.num_taken
            else "nothing of it has an effect",
        )


def take_times() -> str:
    """Return what checkpointed functions took since the last call; empty unless `profile` is on."""
    return _PROCESS.clock.take()


# ---- around one function


def _is_not_sharded(tensor: Tensor) -> bool:
    return _sharded_location(tensor) is None


def _sharded_location(leaf: Any) -> ParamLocation | None:
    """Return the location of the sharded parameter that `leaf` is, or is a view of; None if there is no such
    parameter.
    """
    if not isinstance(leaf, Tensor):
        return None
    location = location_of(leaf if leaf._base is None else leaf._base)
    return location if location is not None and location.sub_buffer.is_sharded else None


class _Boundary:
    """Around one run of a checkpointed function. torch enters it again for each backward through it."""

    def __init__(self, name: str, process: _Process, inner: AbstractContextManager[object]) -> None:
        self._name = name
        self._clock = process.clock
        self._must_wait = process.config.synchronize_checkpoint_boundary and torch.cuda.is_available()
        self._inner = inner
        self._open = ExitStack()

    def __enter__(self) -> None:
        if self._must_wait:
            torch.cuda.synchronize()
        self._open.enter_context(self._clock.time(self._name))
        self._open.enter_context(self._inner)

    def __exit__(self, *error: Any) -> None:
        self._open.close()
        if self._must_wait:
            torch.cuda.synchronize()


# ---- settings


def _warn_of_what_has_no_effect(config: ActivationConfig) -> None:
    notes = []
    if config.partition_activations:
        notes.append("partition_activations has nothing to divide without model parallelism")
    idle = [
        name for name in ("contiguous_memory_optimization", "number_checkpoints") if getattr(config, name)
    ]
    if idle:
        verb = "have" if len(idle) > 1 else "has"
        notes.append(f"{' and '.join(idle)} {verb} no effect: inputs stay in the memory that they have")
    if notes and _rank() == 0:
        _log.warning("activation_checkpointing: %s", "; ".join(notes))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else read_environment().rank


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else read_environment().world_size
