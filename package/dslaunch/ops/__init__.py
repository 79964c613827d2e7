"""Fused optimizers by DeepSpeed's names, for training with or without the engine: `adam`, `lion`, `adagrad`, `lamb`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import adagrad as adagrad, adam as adam, lamb as lamb, lion as lion

__all__ = ["adagrad", "adam", "lamb", "lion"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dslaunch.ops' has no attribute {name!r}; it has {', '.join(__all__)}")
    return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return __all__
