"""Values of a DeepSpeed checkpoint beside its tensors, in the words of our training.pt; see format.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...optimizers.registry import ELEMENTWISE, OptimizerRow
from .folder import DeepSpeedFolder
from .pieces import base_optimizer

# DeepSpeed's own keys in a file of the model; all else is client_state.
_OWN_KEYS = frozenset(
    (
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "sparse_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "universal_checkpoint_info",
        "num_experts",
        "ds_autoep_layers",
        "autoep_layers",
        "ds_config",
        "ds_version",
    )
)
# Options of torch's optimizers for how they compute; they do not change the result.
_SWITCHES = frozenset(
    (
        "params",
        "param_names",
        "step",
        "foreach",
        "fused",
        "capturable",
        "differentiable",
        "maximize",
        "amsgrad",
    )
) | {"decoupled_weight_decay"}
_KNOWN = tuple(row for row in ELEMENTWISE if row.is_deepspeeds or row.torch_classes)
# Optimizers of the ds_config, whose states have the names of their meaning.
_TYPES = frozenset(name.lower() for row in _KNOWN for name in row.names)


def optimizer_of(folder: DeepSpeedFolder, model: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what rank 0 wrote of the optimizer, None if there was none."""
    if folder.is_universal:
        common = folder.universal_common()
        if "optimizer_state_dict" in common:  # stage 3: all of rank 0's values
            return common
        return {**common, "base_optimizer_state": {"state": {}}}
    if folder.num_optimizer_files:
        return folder.optimizer(0)
    optimizer: Mapping[str, Any] | None = model["optimizer"]
    return optimizer


def describe_training(
    model: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None,
    *,
    steps: Sequence[int],
    buffers: Sequence[str],
    aliases: Mapping[str, str],
    frozen: frozenset[str],
    extra_state: Mapping[str, Any],
    state_names: Sequence[str],
) -> dict[str, Any]:
    """Return the values that our training.pt would hold."""
    return {
        "world_size": int(model["dp_world_size"]),
        "buffers": sorted(buffers),
        "left_out": [],
        "frozen": sorted(frozen),
        "aliases": dict(aliases),
        "optimizer": None
        if optimizer is None
        else _describe_optimizer(optimizer, model, steps=steps, state_names=state_names),
        "extra_state": dict(extra_state),
        "scheduler": model["lr_scheduler"],
        "loss_scale": None if optimizer is None else _loss_scale(optimizer),
        "progress": {name: int(model[name]) for name in ("global_steps", "global_samples", "skipped_steps")},
        "data": None,
        "rng": [],
        "client_state": client_state_of(model),
        "config": model["ds_config"],
    }


def client_state_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the program gave to the rank that wrote this file of the model."""
    return {name: value for name, value in model.items() if name not in _OWN_KEYS}


class ClientStates(Sequence[dict[str, Any]]):
    """Client states of all ranks at stage 3, where each has a file of the model, which is opened when asked
    for.
    """

    def __init__(self, folder: DeepSpeedFolder) -> None:
        self._folder = folder

    def __len__(self) -> int:
        return self._folder.num_model_files

    def __getitem__(self, rank: Any) -> Any:
        if rank >= len(self):
            raise IndexError(rank)
        return client_state_of(self._folder.model(rank))


def _describe_optimizer(
    optimizer: Mapping[str, Any],
    model: Mapping[str, Any],
    *,
    steps: Sequence[int],
    state_names: Sequence[str],
) -> dict[str, Any]:
    """Return what our training.pt says of an optimizer; of one that cannot be continued here, a name that
    no run of ours has.
    """
    groups = groups_of(optimizer)
    names = _names(groups, model["ds_config"], state_names)
    counts = set(steps) or {int(group["step"]) for group in groups if "step" in group}
    if len(counts) > 1:
        names = (f"one whose parameters have made {' and '.join(map(str, sorted(counts)))} steps",)
    return {
        "name": names[0],
        "names": names,
        "num_steps": counts.pop() if counts else int(model["global_steps"]) - int(model["skipped_steps"]),
        "groups": [{key: value for key, value in group.items() if key not in _SWITCHES} for group in groups],
        "state_names": list(state_names),
        "beside": {},
    }


def groups_of(optimizer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the hyper-parameters of each group; none of a checkpoint that leaves them out."""
    base = optimizer if "param_groups" in optimizer else base_optimizer(optimizer)
    groups: list[dict[str, Any]] = base.get("param_groups", [])
    return groups


def _names(
    groups: Sequence[Mapping[str, Any]], config: Mapping[str, Any], state_names: Sequence[str]
) -> tuple[str, ...]:
    """Return the names of our optimizers with these states.

    Adam and AdamW have the same states; torch's own say which they were.
    """
    if not groups:
        return ("one without hyper-parameters (zero_optimization.elastic_checkpoint)",)
    given = config.get("optimizer") or {}
    kind = str(given.get("type", "")) if isinstance(given, Mapping) else ""
    if kind and kind.lower() not in _TYPES:
        return (kind,)
    switched = next((flag for group in groups for flag in ("amsgrad", "maximize") if group.get(flag)), None)
    if switched is not None:
        return (f"one with {switched}",)
    row = _row(groups[0], state_names)
    names = ("Muon",) if not state_names and "use_muon" in groups[0] else row.names if row else ()
    if row is not None and len(names) > 1 and "decoupled_weight_decay" in groups[0]:
        return (row.formula().for_group(groups[0]).name,)
    return names or (f"one with the states {', '.join(state_names)}",)


def _row(group: Mapping[str, Any], state_names: Sequence[str]) -> OptimizerRow | None:
    """Return the optimizer that has these states; where there are none, it has not stepped,
    or needs none: by its group.
    """
    if state_names:
        rows = (row for row in _KNOWN if {*row.formula().state_names} == {*state_names})
        return next(rows, None)
    known = [row for row in _KNOWN if group.keys() >= {*row.group_keys}]
    return max(known, key=lambda row: len(row.group_keys), default=None)


def _loss_scale(optimizer: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return fp16's dynamic scale: an object at the stages 1 to 3, plain values at stage 0."""
    if not optimizer.get("dynamic_loss_scale"):
        return None
    scaler = optimizer.get("loss_scaler")
    values: Mapping[str, Any] = optimizer if scaler is None else vars(scaler)
    last = values.get("last_overflow_iter", -1)
    return {
        "scale": _plain(values["cur_scale"]),
        "num_steps": int(_plain(values["cur_iter"])),
        "last_overflow": int(_plain(last)),
        "num_left": int(
            values.get("cur_hysteresis", 1)
        ),  # without hysteresis an overflow halves the scale at once
    }


def _plain(value: Any) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)
