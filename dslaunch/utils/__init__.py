"""Tools beside training, by DeepSpeed's names: `zero_to_fp32`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import zero_to_fp32 as zero_to_fp32

__all__ = ["zero_to_fp32"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(
            f"module 'dslaunch.utils' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    return import_module(f".{name}", __name__)


def __dir__() -> list[str]:
    return __all__
