"""Parameters that are here for a while, because the program asks for them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from .home import Home, early_of, home_of

T = TypeVar("T")


class GatheredParameters:
    """Inside `with GatheredParameters(params):` every rank has these parameters whole, to be read.

    With `modifier_rank=r` they may also be written, all ranks get rank r's values at the end, and so do the optimizer's
    float32 masters. Parameters that neither an engine nor zero.Init has are left alone. May be nested.
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
        early = [early_of(param) for param in wanted] if enabled else []
        self._homes = [home for home in homes if home is not None]
        self._early = _unique(one for one in early if one is not None)
        self._modifier_rank = modifier_rank
        self._versions: list[int] = []
        self._open = ExitStack()

    def __enter__(self) -> None:
        for model in _unique(home.model for home in self._homes):
            units = {home.unit for home in self._homes if home.model is model}
            self._open.enter_context(model.gathered([unit for unit in model.units if unit in units]))
        for early in self._early:
            self._open.enter_context(early.held())
        self._versions = [_param(home)._version for home in self._homes]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._open:
            if kind is None:
                self._end(self._modifier_rank)

    def close(self, *, modifier_rank: int | None) -> None:
        """Leave, when only now it is known whose values count."""
        with self._open:
            self._end(modifier_rank)

    def _end(self, modifier_rank: int | None) -> None:
        if modifier_rank is None:
            self._check_unchanged()
        else:
            self._spread(modifier_rank)

    def _check_unchanged(self) -> None:
        written = [
            home.name
            for home, version in zip(self._homes, self._versions, strict=True)
            if home.part.is_sharded and (_param(home)._version != version or home.part.is_edited)
        ]
        written += [early.name for early in self._early if early.is_edited]
        # All ranks must know, or those that saw nothing would go on to a collective and wait for the others there.
        comms = {home.model.comm: home.part.device for home in self._homes if home.part.is_sharded}
        comms |= {early.init.comm: early.init.device for early in self._early}
        flags = [
            comm.all_gather_float64(
                torch.tensor(float(bool(written)), dtype=torch.float64, device=device),
                what="edits of parameters",
            )
            for comm, device in comms.items()
        ]
        if any(bool(flag.any()) for flag in flags):
            which = f"parameter '{written[0]}' was" if written else "parameters were"
            raise ConfigError(
                f"{which} written inside GatheredParameters without modifier_rank, so each rank would keep what it wrote to "
                "its own shard; say whose values count: GatheredParameters(params, modifier_rank=0)"
            )

    @torch.no_grad()
    def _spread(self, rank: int) -> None:
        for model in _unique(home.model for home in self._homes):
            model.before_change()
        for part in _unique(home.part for home in self._homes):
            comm = next(home.model.comm for home in self._homes if home.part is part)
            comm.broadcast(part.values.flat, what=part.label, source=rank)
            part.take_edits()
        for early in self._early:
            early.spread(rank)


def _param(home: Home) -> nn.Parameter:
    return home.part.members[home.place].param


def _unique(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))
