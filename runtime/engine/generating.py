"""Blocks in which a model generates: no gradients, no dropout, and parameters that are gathered once or for
each token.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..environment import read_environment
from ..errors import ConfigError
from ..metrics.memory_numbers import free_device_memory, free_host_memory
from ..placement.generation_plan import UNITS, Generation, GenerationRoom, plan_generation
from ..zero.model.sharded_model import ShardedModel

_log = logging.getLogger("dslaunch")
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")


class Generating:
    """Blocks of one engine; one inside another one changes nothing."""

    def __init__(self, module: nn.Module, model: ShardedModel) -> None:
        self._module, self._model = module, model
        self._now: Generation | None = None

    @contextmanager
    def block(self, *, weights: str | None, cache_bytes: int) -> Iterator[Generation]:
        """Have the module ready to generate inside; see `StepEngine.generating`."""
        if self._now is not None:
            yield self._now
            return
        self._check_axes()
        self._now = plan_generation(self._rooms(cache_bytes), wanted=weights)
        if self._model.job.is_first:
            _log.info(self._now.line)
        trained = [one for one in self._module.modules() if one.training]
        gathers = self._model.in_lockstep() if self._now.weights == UNITS else self._model.gathered()
        try:
            with gathers, torch.no_grad():
                self._module.eval()
                yield self._now
        finally:
            self._now = None
            for one in trained:
                one.training = True

    def generate(
        self, own: Callable[..., Any], compare: Callable[[Any, Any], None], *args: Any, **kwargs: Any
    ) -> Any:
        """Call `own`, the module's `generate`, in such a block.

        `compare` checks what is given to ranks that divide layers. transformers lets ranks that have ended
        compute until all have, which is not needed here.
        """
        compare(args, kwargs)
        inner = _of_transformers(self._module)
        num_bytes = 0 if inner is None else _cache_bytes(inner, args, kwargs)
        if inner is not None:
            kwargs = {"synced_gpus": False, **kwargs}
        with self.block(weights=None, cache_bytes=num_bytes):
            return own(*args, **kwargs)

    def _check_axes(self) -> None:
        domains = self._model.domains
        experts = [together.size for together, _ in domains.of_experts.values()]
        sizes = {"sp": domains.axes.sp, "ep": max(experts, default=1)}
        axis = next((name for name, size in sizes.items() if size > 1), None)
        if axis is not None:
            raise ConfigError(
                f"engine.generating() with {axis}={sizes[axis]}: ranks along {axis} compute each forward "
                "together, each with tokens of its own, so none may stop before the others; generate without "
                "the block, by engine.module.generate(..., synced_gpus=True) of transformers, or in a job "
                "without this axis"
            )

    def _rooms(self, cache_bytes: int) -> list[GenerationRoom]:
        device = self._model.device
        sharded = [one for unit in self._model.units for one in unit.sub_buffers if one.is_sharded]
        gathered = sum(one.layout.numel * one.plan.dtype.itemsize for one in sharded)
        if device.type == "cuda":
            free = free_device_memory(device)
        else:
            free = free_host_memory() // max(1, read_environment().local_world_size)
        told = self._model.domains.holders.all_gather_numbers(
            [gathered, free, cache_bytes], device=device, what="memory for a generation"
        )
        return [GenerationRoom(*map(int, one)) for one in told]


def _of_transformers(module: nn.Module) -> Any:
    """Return the model of transformers that generates, without an adapter of peft around it; else None."""
    of_adapter: Any = getattr(module, "get_base_model", None)
    inner: Any = module if of_adapter is None else of_adapter()
    method = getattr(type(inner), "generate", None)
    return inner if method is not None and "synced_gpus" in inspect.signature(method).parameters else None


def _cache_bytes(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the bytes of the keys and values that a model of transformers keeps at the end, as far as the
    arguments say; 0 if they do not.
    """
    given = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    inputs = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
    if not isinstance(inputs, Tensor) or inputs.dim() < 2:
        return 0

    def asked(name: str) -> int:
        value = kwargs.get(name) or getattr(given, name, None)
        return value if isinstance(value, int) else 0

    config = model.config.get_text_config(decoder=True)
    sizes = {name: getattr(config, name, None) for name in _SIZES}
    if not all(sizes[name] for name in _SIZES[:3]):
        return 0
    num_layers, hidden, heads, kv_heads, width = (sizes[name] or 0 for name in _SIZES)
    num_numbers = num_layers * 2 * (kv_heads or heads) * (width or hidden // heads)
    length = inputs.shape[1] + asked("max_new_tokens") if asked("max_new_tokens") else asked("max_length")
    num_sequences = inputs.shape[0] * max(asked("num_beams"), asked("num_return_sequences"), 1)
    return int(num_numbers * length * num_sequences * model.dtype.itemsize)
