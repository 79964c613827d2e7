"""Float32 value, gradient and optimizer states of one parameter: whole, or this rank's own part;
to read or to write.

These calls work at every stage. The getters return None for a parameter that no engine trains. Calls with
`full` are collectives: all ranks must call them, in the same order, and each moves the parameter's whole
sub-buffer once. Calls with `local` are not; a rank's part is 1-D, the run of the parameter's elements that
its shard holds, which may be none.
Source: DeepSpeed 0.19.8 utils/tensor_fragment.py, the functions of the same names
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..placement.stage_policy import Placement
from .param_location import ParamLocation, location_of
from .stand_ins import stand_in_of

# ---- float32 values


@torch.no_grad()
def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """A copy of the value that the optimizer updates, of the parameter's shape."""
    if (stand_in := stand_in_of(param)) is not None:
        return stand_in.value()
    location = _trained(param)
    if location is None:
        return None
    with location.sub_buffer.here():
        return _whole(location, location.sub_buffer.optimizer_shard.master).float()


@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set it, and the parameter with it; every rank gives the same value. Not a collective.

    Errors: ConfigError if no engine trains it, or the shape is another
    """
    if (stand_in := stand_in_of(param)) is not None:
        stand_in.set_value(value)
        return
    location = _to_write(param, value)
    with location.sub_buffer.here(is_written=True):
        _copy_part(location, value, location.sub_buffer.optimizer_shard.master)
    part = location.sub_buffer.part_of(location.member_index, value)
    location.sub_buffer.param_shard.load(location.member_index, part)
    if location.sub_buffer.is_sharded and location.unit.is_here:
        location.sub_buffer.param_shard.values.views[location.member_index].copy_(part)


@torch.no_grad()
def safe_get_local_fp32_param(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the float32 value."""
    location = _trained(param)
    if location is None:
        return None
    with location.sub_buffer.here():
        return _own(location, location.sub_buffer.optimizer_shard.master).float()


@torch.no_grad()
def safe_set_local_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the float32 value, at stage 3.

    Order:  a collective where the parameter stays whole on every rank (stage3_param_persistence_threshold),
            for the others must have this rank's part too
    Errors: ConfigError if no engine trains it, the rank's part has another size,
            or the stage shards no parameters
    """
    location = _to_write_locally(param, value)
    if location.model.policy.parameters is not Placement.SHARDED:
        raise ConfigError(
            f"parameter '{location.name}' is whole on every rank at this ZeRO stage; use "
            "safe_set_full_fp32_param()"
        )
    if (
        location.sub_buffer.is_sharded
        and location.sub_buffer.param_shard.kept.numel() > location.sub_buffer.param_shard.own.numel()
    ):
        raise ConfigError(
            f"parameter '{location.name}' is kept by more than one rank (zero_hpz_partition_size), which "
            "would then differ; use safe_set_full_fp32_param()"
        )
    with location.sub_buffer.here(is_written=True):
        for shard in (location.sub_buffer.optimizer_shard.master, location.sub_buffer.param_shard.own):
            _write_own(location, shard, value)
    if not location.sub_buffer.is_sharded:
        location.model.publish(location.sub_buffer).wait()
    elif location.unit.is_here:
        location.sub_buffer.param_shard.writes.forget()
        location.unit.reshard()


# ---- optimizer states


@torch.no_grad()
def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """A copy of one state, "exp_avg" for example, of the parameter's shape.

    Errors: ConfigError for a state that the optimizer does not have
    """
    if (stand_in := stand_in_of(param)) is not None:
        return stand_in.state(optim_state_key)
    location = _trained(param)
    if location is None:
        return None
    if location.member_index in location.sub_buffer.optimizer_shard.states_of_whole:
        return _from_owner(location, optim_state_key)
    with location.sub_buffer.here():
        return _whole(location, _state(location, optim_state_key)).float()


@torch.no_grad()
def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set the optimizer state; every rank gives the same value. Not a collective."""
    if (stand_in := stand_in_of(param)) is not None:
        stand_in.set_state(optim_state_key, value)
        return
    location = _to_write(param, value)
    if location.member_index in location.sub_buffer.optimizer_shard.states_of_whole:
        with location.sub_buffer.here(is_written=True):
            states = location.sub_buffer.optimizer_shard.states_of_whole[location.member_index]()
            if (state := states.get(optim_state_key)) is not None:
                state.copy_(value.reshape(state.shape))
        return
    with location.sub_buffer.here(is_written=True):
        state = _state(location, optim_state_key)
        _copy_part(location, value, state)
        location.sub_buffer.optimizer_shard.set_value(optim_state_key, state)


@torch.no_grad()
def safe_get_local_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """This rank's part of the optimizer state."""
    location = _trained(param)
    if location is None:
        return None
    with location.sub_buffer.here():
        return _own(location, _state(location, optim_state_key)).float()


@torch.no_grad()
def safe_set_local_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Set this rank's part of the optimizer state."""
    location = _to_write_locally(param, value)
    with location.sub_buffer.here(is_written=True):
        state = _state(location, optim_state_key)
        _write_own(location, state, value)
        location.sub_buffer.optimizer_shard.set_value(optim_state_key, state)


# ---- gradients, between backward and step


@torch.no_grad()
def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """A float32 copy of the average over all ranks of the gradients so far, of the
    parameter's shape.
    """
    if (stand_in := stand_in_of(param)) is not None:
        return stand_in.gradient()
    location = _trained(param)
    return None if location is None else _averages(location, [location.member_index])[0]


@torch.no_grad()
def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set the gradient; every rank gives the same value. Not a collective."""
    if (stand_in := stand_in_of(param)) is not None:
        stand_in.set_gradient(value)
        return
    location = _to_write(param, value)
    location.model.check_averaged()
    part = location.sub_buffer.part_of(location.member_index, value)
    location.sub_buffer.gradients.replace(location.member_index, part)


@torch.no_grad()
def safe_update_full_grad_vectorized(
    param_list: Sequence[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Set the averages of these to `update_func(average, param)`, float32, of the parameter's shape.

    Parameters that share a sub-buffer travel together, so one call for many costs less than a getter and a
    setter for each. Parameters that no engine trains are left alone. Order: every rank gives the same list
    """
    for param in param_list:
        if (stand_in := stand_in_of(param)) is not None:
            stand_in.set_gradient(update_func(stand_in.gradient(), param))
    locations = [location for location in map(_trained, param_list) if location is not None]
    for sub_buffer in dict.fromkeys(location.sub_buffer for location in locations):
        own = [location for location in locations if location.sub_buffer is sub_buffer]
        for location, grad in zip(
            own, _averages(own[0], [location.member_index for location in own]), strict=True
        ):
            param = sub_buffer.members[location.member_index].param
            index = location.member_index
            sub_buffer.gradients.replace(index, sub_buffer.part_of(index, update_func(grad, param)))


@torch.no_grad()
def safe_get_local_grad(param: nn.Parameter) -> Tensor | None:
    """This rank's part of the average. A collective all the same where gradients are not sharded."""
    location = _trained(param)
    if location is None:
        return None
    (part,) = _own_averages(location, [location.member_index])
    _, start, numel = _bounds(location)
    return part.reshape(-1)[start : start + numel]


@torch.no_grad()
def safe_set_local_grad(param: nn.Parameter, value: Tensor) -> None:
    """Set this rank's part of the average, at stages 2 and 3.

    Errors: ConfigError if no engine trains it, the rank's part has another size, or gradients are not sharded
    """
    location = _to_write_locally(param, value)
    location.model.check_averaged()
    if value.numel():
        location.sub_buffer.gradients.replace_own(location.member_index, value)


# ----


def _trained(param: nn.Parameter) -> ParamLocation | None:
    location = location_of(param)
    if location is None or not location.sub_buffer.is_trained:
        return None
    location.model.parked_states.check_here("this function")
    return location


def _averages(location: ParamLocation, indices: Sequence[int]) -> list[Tensor]:
    """Return the averages, [the parameter's shape] each."""
    parts = _own_averages(location, indices)
    return [location.sub_buffer.gather_parts(index, part) for index, part in zip(indices, parts, strict=True)]


def _own_averages(location: ParamLocation, indices: Sequence[int]) -> list[Tensor]:
    """Return as much of them as there is of each parameter on this rank."""
    location.model.check_averaged()
    location.model.settle()
    return location.sub_buffer.gradients.averages(indices, location.sub_buffer.comm)


def _must_be_trained(param: nn.Parameter) -> ParamLocation:
    location = _trained(param)
    if location is None:
        raise ConfigError(
            "no engine trains this parameter; give one that initialize() has seen, and that is not frozen"
        )
    return location


def _to_write(param: nn.Parameter, value: Tensor) -> ParamLocation:
    location = _must_be_trained(param)
    shape = location.sub_buffer.whole_shape(location.member_index)
    if tuple(value.shape) != shape:
        raise ConfigError(
            f"parameter '{location.name}' has shape {shape}, not {tuple(value.shape)}; give "
            "a tensor of the whole parameter's shape"
        )
    location.model.before_change()
    return location


def _to_write_locally(param: nn.Parameter, value: Tensor) -> ParamLocation:
    location = _must_be_trained(param)
    _, _, numel = _bounds(location)
    if value.numel() != numel:
        raise ConfigError(
            f"this rank holds {numel} elements of parameter '{location.name}', not {value.numel()}; give as "
            "many as safe_get_local_fp32_param() returns, or the whole to safe_set_full_fp32_param()"
        )
    location.model.before_change()
    return location


def _state(location: ParamLocation, key: str) -> Tensor:
    shard = location.sub_buffer.optimizer_shard
    if location.member_index in location.sub_buffer.optimizer_shard.states_of_whole:
        raise ConfigError(
            f"the optimizer sees parameter '{location.name}' whole, on one rank, so no rank has a part of "
            "its states; use safe_get_full_optimizer_state() or safe_set_full_optimizer_state()"
        )
    if key not in shard.state_names:
        raise _no_state(location, key, shard.state_names)
    return shard.value_of(key)


def _from_owner(location: ParamLocation, key: str) -> Tensor:
    with location.sub_buffer.here():
        own = location.sub_buffer.optimizer_shard.states_of_whole[location.member_index]()
        found = list(own), _copied(own.get(key))
    everywhere = location.sub_buffer.comm.sharers.all_gather_objects(
        found, what=f"state {key!r} of parameter '{location.name}'"
    )
    values = [one for _, one in everywhere if one is not None]
    if not values:
        raise _no_state(location, key, {name for names, _ in everywhere for name in names})
    whole: Tensor = values[0]
    shape = location.sub_buffer.whole_shape(location.member_index)
    return (whole.view(shape) if whole.numel() == prod(shape) else whole).to(location.sub_buffer.device)


def _copied(state: Any) -> Tensor | None:
    return state.to("cpu", copy=True) if isinstance(state, Tensor) else None


def _no_state(location: ParamLocation, key: str, known: Iterable[str]) -> ConfigError:
    shown = ", ".join(sorted(known)) or "none"
    return ConfigError(f"the optimizer has no state {key!r} of parameter '{location.name}'; it has: {shown}")


def _whole(location: ParamLocation, shard: Tensor) -> Tensor:
    sub_buffer = location.sub_buffer
    flat = sub_buffer.comm.gather_states(sub_buffer.on_device(shard), what=f"parameter '{location.name}'")
    slot = sub_buffer.layout.slots[location.member_index]
    part = flat[slot.offset : slot.offset + slot.numel].view(slot.shape)
    return sub_buffer.gather_parts(location.member_index, part.clone())


def _copy_part(location: ParamLocation, whole: Tensor, shard: Tensor) -> None:
    """Copy into `shard` what it holds of a value of the parameter's shape."""
    sub_buffer, index = location.sub_buffer, location.member_index
    sub_buffer.copy_fragment(index, sub_buffer.part_of(index, whole), shard)


def _bounds(location: ParamLocation) -> tuple[int, int, int]:
    """Return where this rank's part begins in its shard and in the parameter, and its length, 0 if it has
    none.
    """
    sub_buffer = location.sub_buffer
    slot = sub_buffer.layout.slots[location.member_index]
    fragment = sub_buffer.layout.fragment(
        slot, sub_buffer.plan.shard_index, num_shards=sub_buffer.plan.num_shards
    )
    return (
        (0, 0, 0)
        if fragment is None
        else (fragment.offset_in_shard, fragment.offset_in_param, fragment.numel)
    )


def _own(location: ParamLocation, shard: Tensor) -> Tensor:
    start, _, numel = _bounds(location)
    return shard[start : start + numel].clone()


def _write_own(location: ParamLocation, shard: Tensor, value: Tensor) -> None:
    start, _, numel = _bounds(location)
    shard[start : start + numel].copy_(value.reshape(-1))
