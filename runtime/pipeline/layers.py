"""Layers that are built where they are needed.

Source: DeepSpeed 0.19.8 runtime/pipe/module.py, `LayerSpec` and `TiedLayerSpec`
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

_log = logging.getLogger("dslaunch")


class LayerSpec:
    """A class of modules with the arguments to build one; only the ranks of the layer's stage build it."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        """Errors: RuntimeError unless `typename` is a class of modules"""
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise RuntimeError(f"LayerSpec({typename!r}): give a class of torch.nn.Module, and its arguments")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs
        self.global_rank = dist.get_rank() if dist.is_initialized() else -1

    def __repr__(self) -> str:
        given = [repr(one) for one in self.module_args]
        given += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{self.typename.__name__}({', '.join(given)})"

    def build(self, log: bool = False) -> nn.Module:
        """Return a new layer."""
        if log:
            _log.info("rank %d builds %r", self.global_rank, self)
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that is used in several places under one `key`; its parameters are the same in all of them.

    `forward_fn(module, x)` is called in place of the module, so that an embedding can be the head, too.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        """`tied_weight_attr` names parameters that the module must have; all others are tied, too."""
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = (
            [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)
        )


def name_of(layer: object) -> str:
    """Return the class of a layer, or the name of a function."""
    if isinstance(layer, LayerSpec):
        return layer.typename.__name__
    if isinstance(layer, nn.Module):
        return type(layer).__name__
    return str(getattr(layer, "__name__", type(layer).__name__))
