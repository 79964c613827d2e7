"""Fused optimizers, for training with or without the engine: modules by DeepSpeed's names; other
optimizers by their class.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..runtime.optimizers.registry import DEEPSPEEDS, OPTIMIZERS

if TYPE_CHECKING:
    from . import adagrad as adagrad, adam as adam, lamb as lamb, lion as lion

_CLASSES = {name: row for row in OPTIMIZERS if not row.is_deepspeeds for name in row.classes}

__all__ = sorted([*(row.module for row in DEEPSPEEDS), *_CLASSES])


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dslaunch.ops' has no attribute {name!r}; it has {', '.join(__all__)}")
    return _CLASSES[name].load(name) if name in _CLASSES else import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return __all__
