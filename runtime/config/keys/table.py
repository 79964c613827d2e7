"""Every key of a ds_config that is known here.

A section is any path that other paths continue; a section that no path continues is one opaque OBJECT.
null anywhere means the same as leaving the key out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from .absent import ABSENT
from .experts import EXPERTS
from .key import Fate, Key, used
from .mesh import MESH
from .monitor import MONITOR
from .optimizer import OPTIMIZER, SCHEDULER
from .pipeline import PIPELINE
from .precision import PRECISION
from .sequence import SEQUENCE
from .storage import STORAGE
from .tensor import TENSOR
from .training import TRAINING
from .value import OBJECT
from .zero import ZERO

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
    """Whether the dotted `path` is one of them, or inside one."""
    return any(f"{path}.".startswith(f"{removed}.") for removed in REMOVED)


def _say_if_removed(key: Key) -> Key:
    if key.fate is not Fate.REFUSED or not is_removed(key.path):
        return key
    return replace(key, note=f"DeepSpeed 0.19.8 has removed it, too: {key.note}")


KEYS: tuple[Key, ...] = tuple(
    map(
        _say_if_removed,
        (
            *TRAINING,
            *OPTIMIZER,
            *SCHEDULER,
            *PRECISION,
            *ZERO,
            *STORAGE,
            *TENSOR,
            *MESH,
            *PIPELINE,
            *EXPERTS,
            *SEQUENCE,
            *MONITOR,
            *ABSENT,
        ),
    )
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
            keys.setdefault(path, used(path, ""))
    for section, kind in (("optimizer", optimizer_type), ("scheduler", scheduler_type)):
        if kind is None or not any(path.startswith(f"{section}.params.") for path in keys):
            keys = {path: key for path, key in keys.items() if not path.startswith(f"{section}.params.")}
            keys[f"{section}.params"] = Key(path=f"{section}.params", fate=Fate.DETAIL, kind=OBJECT)
    return keys
