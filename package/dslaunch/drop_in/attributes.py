"""Attributes by dotted names, as programs that replace layers of a model ask for them.

Source: DeepSpeed 0.19.8 utils/module_utils.py, and compression/helper.py for programs that
        were written before it
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any


def recursive_getattr(model: Any, module_name: str) -> Any:
    return attrgetter(module_name)(model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    owner, _, name = module_name.rpartition(".")
    setattr(attrgetter(owner)(model) if owner else model, name, module)
