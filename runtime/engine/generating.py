"""Blocks in which a model generates: no gradients, no dropout, and parameters that are gathered once or for
each token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from ..environment import read_environment
from ..errors import ConfigError
from ..metrics.memory_numbers import free_device_memory, free_host_memory
from ..placement.generation_plan import (
    UNITS,
    Generation,
    GenerationRoom,
    KeysAndValues,
    cache_misfit,
    plan_generation,
)
from ..tensor.inputs import InputCheck
from ..zero.model.sharded_model import ShardedModel
from .keys_and_values import cache_of, cache_of_call, draws_tokens, model_of_transformers

_log = logging.getLogger("dslaunch")


class Generating:
    """Blocks of one engine; one inside another one changes nothing."""

    def __init__(
        self, module: nn.Module, model: ShardedModel, noted: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """`noted` returns a context in which the launcher knows that this rank generates."""
        self._module, self._model, self._noted = module, model, noted
        self._now: Generation | None = None

    @contextmanager
    def block(self, *, weights: str | None, cache: KeysAndValues) -> Iterator[Generation]:
        """Have the module ready to generate inside; see `StepEngine.generating`."""
        if self._now is not None:
            yield self._now
            return
        self._check_axes()
        self._now = plan_generation(self._rooms(cache), wanted=weights)
        if self._model.job.is_first:
            _log.info(self._now.line)
        trained = [one for one in self._module.modules() if one.training]
        gathers = self._model.in_lockstep() if self._now.weights == UNITS else self._model.gathered()
        try:
            with self._noted(), gathers, torch.no_grad():
                self._module.eval()
                yield self._now
        finally:
            self._now = None
            for one in trained:
                one.training = True

    def generate(
        self,
        own: Callable[..., Any],
        inputs: InputCheck | None,
        naming: Callable[[], AbstractContextManager[object]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call `own`, the module's `generate`, in such a block.

        `inputs` checks what is given to ranks that divide layers; None if no layer is divided. `naming` is a
        context for their forwards. transformers lets ranks that have ended compute until all have, which is
        not needed here.
        """
        inner = model_of_transformers(self._module)
        if inputs is not None:
            inputs.compare(args, kwargs)
            if inner is not None and draws_tokens(inner, kwargs):
                inputs.compare_random_numbers()
        cache = KeysAndValues()
        if inner is not None:
            cache = cache_of_call(inner, args, kwargs, num_ranks=self._model.domains.axes.tp)
            kwargs = {"synced_gpus": False, **kwargs}
        with self.block(weights=None, cache=cache), self._naming_the_cache(cache), naming():
            return own(*args, **kwargs)

    @contextmanager
    def _naming_the_cache(self, cache: KeysAndValues) -> Iterator[None]:
        """Name the cache as the cause where memory ends and the cache takes most of what was free."""
        room = self._room(cache)
        try:
            yield
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _is_of_memory(error) or room.cache.num_bytes < room.free_bytes / 2:
                raise
            rank = self._model.domains.job.index
            raise ConfigError(f"no memory is left in generate(): {cache_misfit(room, rank)}") from error

    def check_room(self, num_tokens: int) -> None:
        """Check that the keys and values of one sequence of so many tokens fit.

        Order:  a collective
        Errors: ConfigError
        """
        inner = model_of_transformers(self._module)
        if inner is not None:
            cache = cache_of(inner, 1, num_tokens, num_ranks=self._model.domains.axes.tp)
            plan_generation(self._rooms(cache._replace(is_static=True)))

    def _check_axes(self) -> None:
        together = self._model.domains.together
        if together is not None:
            axis, size = together
            raise ConfigError(
                f"engine.generating() with {axis}={size}: ranks along {axis} compute each forward "
                "together, each with tokens of its own, so none may stop before the others; generate without "
                "the block, by engine.module.generate(..., synced_gpus=True) of transformers, or in a job "
                "without this axis"
            )

    def _rooms(self, cache: KeysAndValues) -> list[GenerationRoom]:
        """Return the memory of the ranks that generate in step: those that share weights, or else layers."""
        domains, device = self._model.domains, self._model.device
        together = domains.holders if self._model.has_shards else domains.copies_group
        own = self._room(cache)
        numbers = [own.gathered_bytes, own.free_bytes, *own.cache]
        said = together.all_gather_numbers(numbers, device=device, what="memory for a generation")
        return [
            GenerationRoom(gathered, free, KeysAndValues._make(rest))
            for gathered, free, *rest in ([*map(int, numbers)] for numbers in said)
        ]

    def _room(self, cache: KeysAndValues) -> GenerationRoom:
        device = self._model.device
        sharded = [one for unit in self._model.units for one in unit.sub_buffers if one.is_sharded]
        if device.type == "cuda":
            free = free_device_memory(device)
        else:
            free = free_host_memory() // max(1, read_environment().local_world_size)
        gathered = sum(one.layout.numel * one.plan.dtype.itemsize for one in sharded)
        return GenerationRoom(gathered, free, cache)


def _is_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)
