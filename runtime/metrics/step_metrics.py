"""The numbers that an engine tells without being asked, where the launcher asks for numbers."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.training_state import Progress
from ..comm.phases import EVALUATING, PAUSED, During, Phases
from ..zero.sharded_model import ShardedModel
from .memory_numbers import MemoryNumbers
from .pipe import Pipe

_NOT_COUNTED = (torch.bool, torch.uint8)
_TRAINERS = frozenset(("transformers", "peft", "trl"))  # their Trainer evaluates the module past its engine
_watched: weakref.WeakKeyDictionary[nn.Module, StepMetrics] = weakref.WeakKeyDictionary()


class _Process:
    """What the engines of a process have together: where its time goes, and its memory."""

    def __init__(self, device: torch.device) -> None:
        self.phases = Phases(device)
        self.memory = MemoryNumbers(device)
        self.last: dict[str, Any] = {}  # of the last step, unless it is told

    def numbers(self) -> dict[str, Any]:
        """Return what is new; nothing before the next step has ended."""
        last, self.last = self.last, {}
        return {**last, **self.phases.take(), **self.memory.look()} if last else {}


@cache
def _process(pipe: Pipe, device: torch.device) -> _Process:
    return _Process(device)


class StepMetrics:
    """Of one engine. Nothing here waits, for a device or for another rank."""

    def __init__(self, pipe: Pipe, device: torch.device) -> None:
        process = _process(pipe, device)
        self._pipe, self._process, self._phases = pipe, process, process.phases
        pipe.ask = process.numbers
        self._made_at = time.monotonic()
        self._tokens, self._num_copies = 0, 1
        self._is_evaluating = False
        self._hook: Any = None
        pipe.has_engine = True

    def join(self, model: ShardedModel) -> None:
        """The engine has its model."""
        self._process.memory.models.add(model)
        axes = model.domains.axes
        self._num_copies = axes.dp * axes.sp
        recorder, pipe = model.domains.wire.recorder, self._pipe
        recorder.phases = self._phases
        recorder.tell_hang = lambda text: pipe.tell_file("hang", json.dumps(text))  # it outlives this engine

    def watch(self, module: nn.Module) -> None:
        """Note evaluations of the engine's module that do not go through the engine, where they are usual.

        Not of any module: torch.jit.script takes none with a hook.
        """
        if any(base.__module__.partition(".")[0] in _TRAINERS for base in type(module).__mro__):
            _watched[module] = self
            self._hook = module.register_forward_pre_hook(_note_evaluation)

    def close(self) -> None:
        """The engine has ended."""
        if self._hook is not None:
            self._hook.remove()
        self._pipe.release(self)

    def during(self, phase: str) -> During:
        """The call of the engine inside is this part of a step."""
        if self._is_evaluating:
            self._is_evaluating = False
            self._pipe.tell_state(None)
        self._pipe.follow_up()
        return self._phases.during(phase)

    @contextmanager
    def state(self, name: str) -> Iterator[None]:
        """Around "saving" or "loading", which takes long."""
        self._pipe.tell_state(name, at_once=True)
        try:
            with self._phases.during(PAUSED):
                yield
        finally:
            self._pipe.tell_state("evaluating" if self._is_evaluating else None)

    def evaluating(self) -> During:
        """Around a forward that is part of no step."""
        if not self._is_evaluating:
            self._is_evaluating = True
            self._pipe.tell_state("evaluating")
        self._pipe.look_if_due()
        return self._phases.during(EVALUATING)

    def note_inputs(self, given: Any) -> None:
        """Count the tokens of a micro batch: the elements of the first tensor of integers that is
        [batch, sequence].
        """
        tokens = _first_tokens(given)
        if tokens is not None:
            self._tokens += tokens.numel()

    def end_micro_batch(self) -> None:
        """After a call of step() that ends no optimizer step."""
        self._phases.end_micro_batch()

    def end_step(
        self,
        progress: Progress,
        *,
        loss: Tensor | None,
        lr: float,
        grad_norm: float | None,
        loss_scale: float | None,
    ) -> None:
        """After an optimizer step. What this costs is paid in each: most is done once for a line."""
        if not self._pipe.claim(self, made_at=self._made_at):
            return
        self._phases.end_step()
        numbers: dict[str, Any] = {
            "step": progress.global_steps,
            "samples": progress.global_samples,
            "lr": lr,
            "skipped": progress.skipped_steps,
        }
        if loss is not None:
            numbers["loss"] = loss if loss.is_cuda else loss.item()
        if grad_norm is not None:
            numbers["grad_norm"] = grad_norm
        if loss_scale is not None:
            numbers["loss_scale"] = loss_scale
        if self._tokens:
            numbers["tokens"] = self._tokens * self._num_copies
        self._process.last = numbers
        self._pipe.look_if_due()

    def tell_config(self, config: dict[str, Any]) -> None:
        """Tell the configuration as it took effect."""
        self._pipe.tell_file("config", json.dumps(config, default=str))


def _note_evaluation(module: nn.Module, _: Any) -> None:
    """A module's forward begins. A function of this file, so the module can be copied and pickled."""
    if torch.compiler.is_compiling() or module.training or torch.is_grad_enabled():
        return
    metrics = _watched.get(module)
    if metrics is not None:
        with metrics.evaluating():
            pass  # what follows is part of it, up to the next forward that trains


def _first_tokens(given: Any) -> Tensor | None:
    """Depth first; a dict's input_ids go before its other values."""
    if isinstance(given, Tensor):
        is_whole = not (given.is_floating_point() or given.is_complex() or given.dtype in _NOT_COUNTED)
        return given if is_whole and given.dim() == 2 else None
    if isinstance(given, dict):
        given = [given["input_ids"]] if "input_ids" in given else given.values()
    elif not isinstance(given, (tuple, list)):
        return None
    return next((found for found in map(_first_tokens, given) if found is not None), None)
