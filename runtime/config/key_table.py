"""Table of every key of a ds_config that is known here.

A key that is used is a field of a model, by its alias; keys/ has those without effect or refused.
A section is any path that other paths continue; a section that no path continues is one opaque OBJECT.
null anywhere means the same as leaving the key out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args, get_origin

from . import optimizer, scheduler
from .config import Config
from .keys.absent import ABSENT
from .keys.experts import EXPERTS
from .keys.key import Fate, Key
from .keys.monitor import MONITOR
from .keys.optimizer import OPTIMIZER
from .keys.pipeline import PIPELINE
from .keys.precision import PRECISION
from .keys.storage import STORAGE
from .keys.tensor import TENSOR
from .keys.training import TRAINING
from .keys.value import OBJECT
from .keys.zero import ZERO
from .section import Section

# Source: DeepSpeed 0.19.8 runtime/config.py, `_REMOVED_TOP_LEVEL_CONFIG_KEYS` and
#         `_REMOVED_ZERO_CONFIG_KEYS`.
REMOVED = (
    "amp",
    "compression_training",
    "curriculum_learning",
    "eigenvalue",
    "elasticity",
    "graph_harvesting",
    "nebula",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
    "sparse_gradients",
    "zero_optimization.mics_hierarchical_params_gather",
    "zero_optimization.mics_shard_size",
    "zero_optimization.zeropp_loco_param",
)


def is_removed(path: str) -> bool:
    """True if the dotted `path` is a removed key, or inside one."""
    return any(f"{path}.".startswith(f"{removed}.") for removed in REMOVED)


def _say_if_removed(key: Key) -> Key:
    if key.fate is not Fate.REFUSED or not is_removed(key.path):
        return key
    return replace(key, note=f"DeepSpeed 0.19.8 has removed it, too: {key.note}")


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyOwner:
    """A field that a key is read into; `type` is the optimizer or scheduler type that has it, "" for any."""

    model: type[Section]
    name: str
    type: str = ""


_PARAMS: dict[str, Mapping[str, type[Section]]] = {
    "optimizer.params": optimizer.PARAMS_OF,
    "scheduler.params": scheduler.PARAMS_OF,
}


def _fields(model: type[Section], path: str = "", type_: str = "") -> Iterator[tuple[str, KeyOwner]]:
    """Each key of the section at `path`, with its owner."""
    for name, field in model.model_fields.items():
        inner = f"{path}{field.alias or name}"
        section = _section(field.annotation)
        if inner in _PARAMS:
            for kind, params in _PARAMS[inner].items():
                yield from _fields(params, f"{inner}.", kind)
        elif section is not None:
            yield from _fields(section, f"{inner}.", type_)
        elif not field.exclude:
            yield inner, KeyOwner(model=model, name=name, type=type_)


def _section(annotation: Any) -> type[Section] | None:
    """Return the model of a field that is a section, or may be none."""
    kinds = (annotation,) if get_origin(annotation) is tuple else (annotation, *get_args(annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _by_path() -> dict[str, tuple[KeyOwner, ...]]:
    fields: dict[str, tuple[KeyOwner, ...]] = {}
    for path, owner in _fields(Config):
        fields[path] = (*fields.get(path, ()), owner)
    return fields


FIELDS = _by_path()  # path -> field, of the keys that are used


def _used(path: str, owners: Iterable[KeyOwner] = ()) -> Key:
    return Key(path=path, fate=Fate.USED, types=tuple(owner.type for owner in owners if owner.type))


KEYS: tuple[Key, ...] = (
    *(_used(path, owners) for path, owners in FIELDS.items()),
    *map(
        _say_if_removed,
        (
            *TRAINING,
            *OPTIMIZER,
            *PRECISION,
            *ZERO,
            *STORAGE,
            *TENSOR,
            *PIPELINE,
            *EXPERTS,
            *MONITOR,
            *ABSENT,
        ),
    ),
)


def keys_for(
    optimizer_type: str | None, scheduler_type: str | None, class_params: Mapping[str, Iterable[str]]
) -> dict[str, Key]:
    """The keys of a config with these types, by path.

    A type that is None is not known: everything below its `params` is accepted, since the type itself is the
    fault. `class_params` are, by section, the keyword arguments of a class of torch, which no table can list.
    """
    keys = {
        key.path: key
        for key in KEYS
        if not key.types or optimizer_type in key.types or scheduler_type in key.types
    }
    for section, names in class_params.items():
        for path in (f"{section}.params.{name}" for name in names):
            keys.setdefault(path, _used(path))
    for section, kind in (("optimizer", optimizer_type), ("scheduler", scheduler_type)):
        if kind is None or not any(path.startswith(f"{section}.params.") for path in keys):
            keys = {path: key for path, key in keys.items() if not path.startswith(f"{section}.params.")}
            keys[f"{section}.params"] = Key(path=f"{section}.params", fate=Fate.DETAIL, kind=OBJECT)
    return keys
