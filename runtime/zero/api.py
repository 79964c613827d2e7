"""What a program says to ZeRO itself: `dslaunch.zero`.

Everything here works at every stage, and is a collective: all ranks must call it, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .home import Home, home_of
from .leaf import get_z3_leaf_modules, set_z3_leaf_modules, unset_z3_leaf_modules
from .offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from .peek import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)

T = TypeVar("T")

__all__ = [
    "GatheredParameters",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "get_z3_leaf_modules",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
]


class GatheredParameters:
    """Inside `with GatheredParameters(params):` every rank has these parameters whole, to be read.

    With `modifier_rank=r` they may also be written, all ranks get rank r's values at the end, and so do the optimizer's
    float32 masters. Parameters that no engine has are left alone. May be nested.
    Order:  a collective at both ends
    Errors: ConfigError if sharded parameters were written without a modifier_rank
    Source: DeepSpeed 0.19.8 runtime/zero/partition_parameters.py, `GatheredParameters`, which drops such writes silently
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        """`fwd_module` is not needed here: what a forward uses is brought by its use."""
        wanted = [params] if isinstance(params, Tensor) else list(params)
        homes = [home_of(param) for param in wanted] if enabled else []
        self._homes = [home for home in homes if home is not None]
        self._modifier_rank = modifier_rank
        self._versions: list[int] = []
        self._open = ExitStack()

    def __enter__(self) -> None:
        for model in _unique(home.model for home in self._homes):
            units = {home.unit for home in self._homes if home.model is model}
            self._open.enter_context(model.gathered([unit for unit in model.units if unit in units]))
        self._versions = [_param(home)._version for home in self._homes]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._open:
            if kind is None and self._modifier_rank is None:
                self._check_unchanged()
            elif kind is None:
                self._spread()

    def _check_unchanged(self) -> None:
        for home, version in zip(self._homes, self._versions, strict=True):
            if home.part.is_sharded and (_param(home)._version != version or home.part.is_edited):
                raise ConfigError(
                    f"parameter '{home.name}' was written inside GatheredParameters without modifier_rank, so each rank would "
                    "keep what it wrote to its own shard; say whose values count: GatheredParameters(params, modifier_rank=0)"
                )

    @torch.no_grad()
    def _spread(self) -> None:
        for part in _unique(home.part for home in self._homes):
            comm = next(home.model.comm for home in self._homes if home.part is part)
            comm.broadcast(part.values.flat, what=part.label, source=self._modifier_rank or 0)
            part.take_edits()


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Have this parameter here whenever `module` runs, which uses it without owning it.

    Only needed where it is used through a reference of the program's own: `other_module.weight` is noticed by itself.
    Errors: ConfigError unless `initialize()` has seen the parameter
    """
    home = home_of(parameter)
    if home is None:
        raise ConfigError(
            "register_external_parameter(): initialize() has not seen this parameter; call it afterwards"
        )
    model, unit = home.model, home.unit
    module.register_forward_pre_hook(lambda module, args: model.lend(unit))


def _param(home: Home) -> nn.Parameter:
    return home.part.members[home.place].param


def _unique(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))
