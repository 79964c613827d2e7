"""One parameter's float32 value, gradient and optimizer states: whole, or this rank's own part;
to read or to write.

They work at every stage. Of a parameter that no engine trains the getters return None. Those with `full` are
collectives: all ranks must call them, in the same order, and each moves the parameter's whole sub-buffer
once. Those with `local` are not; a rank's part is 1-D, the run of the parameter's elements that its shard
holds, which may be none.
Source: DeepSpeed 0.19.8 utils/tensor_fragment.py, of the same names
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..placement.stage_policy import Placement
from .param_home import Home, home_of

# ---- float32 values


@torch.no_grad()
def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """A copy of what the optimizer updates, of the parameter's shape."""
    home = _trained(param)
    if home is None:
        return None
    with home.part.here():
        return _whole(home, home.part.optimizer_shard.master)


@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set it, and the parameter with it; every rank gives the same value. Not a collective.

    Errors: ConfigError if no engine trains it, or the shape is another
    """
    home = _to_write(param, value)
    with home.part.here(is_written=True):
        home.part.copy_fragment(home.place, value, home.part.optimizer_shard.master)
    home.part.param_shard.load(home.place, value)
    if home.part.is_sharded and home.unit.is_here:
        home.part.param_shard.values.views[home.place].copy_(value)


@torch.no_grad()
def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of it."""
    home = _trained(param)
    if home is None:
        return None
    with home.part.here():
        return _own(home, home.part.optimizer_shard.master)


@torch.no_grad()
def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of it, at stage 3.

    Order:  a collective where the parameter stays whole on every rank (stage3_param_persistence_threshold),
            for the others must have this rank's part too
    Errors: ConfigError if no engine trains it, the rank's part has another size,
            or the stage shards no parameters
    """
    home = _to_write_locally(param, value)
    if home.model.policy.parameters is not Placement.SHARDED:
        raise ConfigError(
            f"parameter '{home.name}' is whole on every rank at this ZeRO stage; use "
            "safe_set_full_fp32_param()"
        )
    if home.part.is_sharded and home.part.param_shard.kept.numel() > home.part.param_shard.own.numel():
        raise ConfigError(
            f"parameter '{home.name}' is kept by more than one rank (zero_hpz_partition_size), which would "
            "then differ; use safe_set_full_fp32_param()"
        )
    with home.part.here(is_written=True):
        for shard in (home.part.optimizer_shard.master, home.part.param_shard.own):
            _write_own(home, shard, value)
    if not home.part.is_sharded:
        home.model.publish(home.part).wait()
    elif home.unit.is_here:
        home.part.param_shard.writes.forget()
        home.unit.free()


# ---- optimizer states


@torch.no_grad()
def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A copy of one state, "exp_avg" for example, of the parameter's shape.

    Errors: ConfigError for a state that the optimizer does not have
    """
    home = _trained(param)
    if home is None:
        return None
    if home.place in home.part.optimizer_shard.states_of_whole:
        return _from_owner(home, optim_state_key)
    with home.part.here():
        return _whole(home, _state(home, optim_state_key))


@torch.no_grad()
def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set it; every rank gives the same value. Not a collective."""
    home = _to_write(param, value)
    if home.place in home.part.optimizer_shard.states_of_whole:
        state = home.part.optimizer_shard.states_of_whole[home.place]().get(optim_state_key)
        if state is not None:
            state.copy_(value.reshape(state.shape))
        return
    with home.part.here(is_written=True):
        home.part.copy_fragment(home.place, value, _state(home, optim_state_key))


@torch.no_grad()
def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of it."""
    home = _trained(param)
    if home is None:
        return None
    with home.part.here():
        return _own(home, _state(home, optim_state_key))


@torch.no_grad()
def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's part of it."""
    home = _to_write_locally(param, value)
    with home.part.here(is_written=True):
        _write_own(home, _state(home, optim_state_key), value)


# ---- gradients, between backward and step


@torch.no_grad()
def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """A float32 copy of the average over all ranks of what the micro batches so far gave, of the
    parameter's shape.
    """
    home = _trained(param)
    return None if home is None else _averages(home, [home.place])[0]


@torch.no_grad()
def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set it; every rank gives the same value. Not a collective."""
    home = _to_write(param, value)
    home.model.check_averaged()
    home.part.gradients.replace(home.place, value)


@torch.no_grad()
def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Set the averages of these to `update_func(average, param)`, float32, of the parameter's shape.

    Parameters that share a sub-buffer travel together, so one call for many costs less than a getter and a
    setter for each. Parameters that no engine trains are left alone. Order: every rank gives the same list
    """
    homes = [home for home in map(_trained, param_list) if home is not None]
    for part in dict.fromkeys(home.part for home in homes):
        own = [home for home in homes if home.part is part]
        for home, grad in zip(own, _averages(own[0], [home.place for home in own]), strict=True):
            param = part.members[home.place].param
            part.gradients.replace(home.place, update_func(grad, param))


@torch.no_grad()
def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the average. A collective all the same where gradients are not sharded."""
    home = _trained(param)
    if home is None:
        return None
    (whole,) = _averages(home, [home.place])
    _, start, numel = _bounds(home)
    return whole.reshape(-1)[start : start + numel]


@torch.no_grad()
def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the average, at stages 2 and 3.

    Errors: ConfigError if no engine trains it, the rank's part has another size, or gradients are not sharded
    """
    home = _to_write_locally(param, value)
    home.model.check_averaged()
    if value.numel():
        home.part.gradients.replace_own(home.place, value)


# ----


def _trained(param: nn.Parameter) -> Home | None:
    home = home_of(param)
    if home is None or not home.part.is_trained:
        return None
    home.model.offloaded.check_here("this function")
    return home


def _averages(home: Home, places: Sequence[int]) -> list[Tensor]:
    home.model.check_averaged()
    home.model.settle()
    return home.part.gradients.averages(places, home.model.comm)


def _must_be_trained(param: nn.Parameter) -> Home:
    home = _trained(param)
    if home is None:
        raise ConfigError(
            "no engine trains this parameter; give one that initialize() has seen, and that is not frozen"
        )
    return home


def _to_write(param: nn.Parameter, value: Tensor) -> Home:
    home = _must_be_trained(param)
    if value.shape != param.shape:
        raise ConfigError(f"parameter '{home.name}' has shape {tuple(param.shape)}, not {tuple(value.shape)}")
    home.model.before_change()
    return home


def _to_write_locally(param: nn.Parameter, value: Tensor) -> Home:
    home = _must_be_trained(param)
    _, _, numel = _bounds(home)
    if value.numel() != numel:
        raise ConfigError(f"this rank holds {numel} elements of parameter '{home.name}', not {value.numel()}")
    home.model.before_change()
    return home


def _state(home: Home, key: str) -> Tensor:
    states = home.part.optimizer_shard.states
    if home.place in home.part.optimizer_shard.states_of_whole:
        raise ConfigError(
            f"the optimizer sees parameter '{home.name}' whole, on one rank, so no rank has a part of its "
            "states; use safe_get_full_optimizer_state() or safe_set_full_optimizer_state()"
        )
    if key not in states:
        raise _no_state(home, key, states)
    return states[key]


def _from_owner(home: Home, key: str) -> Tensor:
    own = home.part.optimizer_shard.states_of_whole[home.place]()
    everywhere = home.model.comm.all_gather_objects(
        (list(own), _copied(own.get(key))), what=f"state {key!r} of parameter '{home.name}'"
    )
    found = [one for _, one in everywhere if one is not None]
    if not found:
        raise _no_state(home, key, {name for names, _ in everywhere for name in names})
    whole: Tensor = found[0]
    shape = home.part.layout.slots[home.place].shape
    return (whole.view(shape) if whole.numel() == prod(shape) else whole).to(home.part.device)


def _copied(state: Any) -> Tensor | None:
    return state.to("cpu", copy=True) if isinstance(state, Tensor) else None


def _no_state(home: Home, key: str, known: Iterable[str]) -> ConfigError:
    shown = ", ".join(sorted(known)) or "none"
    return ConfigError(f"the optimizer has no state {key!r} of parameter '{home.name}'; it has: {shown}")


def _whole(home: Home, shard: Tensor) -> Tensor:
    part = home.part
    flat = home.model.comm.gather_states(part.on_device(shard), what=f"parameter '{home.name}'")
    slot = part.layout.slots[home.place]
    return flat[slot.offset : slot.offset + slot.numel].view(slot.shape).clone()


def _bounds(home: Home) -> tuple[int, int, int]:
    """Where this rank's part begins in its shard and in the parameter, and its length, 0 if it has none."""
    part = home.part
    slot = part.layout.slots[home.place]
    fragment = part.layout.fragment(slot, part.plan.shard_index, num_shards=part.plan.num_shards)
    return (
        (0, 0, 0)
        if fragment is None
        else (fragment.offset_in_shard, fragment.offset_in_param, fragment.numel)
    )


def _own(home: Home, shard: Tensor) -> Tensor:
    start, _, numel = _bounds(home)
    return shard[start : start + numel].clone()


def _write_own(home: Home, shard: Tensor, value: Tensor) -> None:
    start, _, numel = _bounds(home)
    shard[start : start + numel].copy_(value.reshape(-1))
