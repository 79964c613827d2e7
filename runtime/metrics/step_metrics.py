"""The numbers that an engine tells without being asked, where the launcher asks for numbers."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoint.training_state import Progress
from ..comm.phases import EVALUATING, PAUSED, Phases
from ..zero.model.sharded_model import ShardedModel
from .memory_numbers import MemoryNumbers
from .pipe import Pipe, Teller

_TOKEN_TYPES = frozenset(
    getattr(torch, name) for name in ("int64", "int32", "int16", "int8", "uint16", "uint32", "uint64")
)
_VALUES = ("step", "samples", "skipped", "loss", "grad_norm", "loss_scale")
_TRAINERS = frozenset(("transformers", "peft", "trl"))  # their Trainer evaluates the module past its engine
_watched: weakref.WeakKeyDictionary[nn.Module, StepMetrics] = weakref.WeakKeyDictionary()


class _LastStep:
    """Numbers of an engine's last step. Most steps are not reported, so here they only leave them."""

    def __init__(self) -> None:
        self.values: tuple[Any, ...] = ()  # one for each name in _VALUES
        # this rank's tokens, and the number of ranks that have the same ones
        self.tokens, self.num_copies = 0, 1
        # returns the rate of each group
        self.get_lr: weakref.WeakMethod[Callable[[], Sequence[float]]] | None = None

    def numbers(self) -> dict[str, Any]:
        """Return the numbers of the last step by name."""
        values = dict(zip(_VALUES, self.values, strict=True))
        loss = values["loss"]
        if isinstance(loss, Tensor) and loss.is_cpu:
            values["loss"] = loss.item()
        get_lr = None if self.get_lr is None else self.get_lr()
        if get_lr is not None and (rates := get_lr()):  # an engine that has ended has none
            values["lr"] = rates[0]
        if self.tokens:
            values["tokens"] = self.tokens * self.num_copies
        return {name: value for name, value in values.items() if value is not None}


class _Process:
    """Common numbers of the engines of a process: where its time goes, and its memory."""

    def __init__(self, device: torch.device) -> None:
        self.phases = Phases(device)
        self.memory = MemoryNumbers(device)
        # returns the numbers of the last step, unless they were told
        self.last: Callable[[], dict[str, Any]] | None = None
        self.is_evaluating = self.is_generating = False
        self.is_quiet = False  # inside of an untimed step: its calls tell nothing

    def numbers(self) -> dict[str, Any]:
        """Return the new numbers; none before the next step has ended."""
        last, self.last = self.last, None
        return {} if last is None else {**last(), **self.phases.take(), **self.memory.look()}


@cache
def _process(pipe: Pipe, device: torch.device) -> _Process:
    return _Process(device)


class StepMetrics:
    """Metrics of one engine. They never wait, for a device or for another rank."""

    def __init__(self, pipe: Pipe, device: torch.device) -> None:
        self.process = process = _process(pipe, device)
        self._pipe, self._phases = pipe, process.phases
        pipe.ask = process.numbers
        self.made_at = self.ended_at = time.monotonic()
        self._self: weakref.ref[Teller] = weakref.ref(self)
        self._last = _LastStep()
        self._tell_last = self._last.numbers
        self._hook: Any = None
        pipe.has_engine = True

    def join(self, model: ShardedModel) -> None:
        """The engine has its model."""
        self.process.memory.models.add(model)
        axes = model.domains.axes
        self._last.num_copies = axes.dp * axes.sp
        recorder, pipe = model.domains.wire.recorder, self._pipe
        recorder.phases = self._phases
        recorder.tell_hang = lambda text: pipe.tell_file("hang", json.dumps(text))  # outlives this engine
        recorder.tell_wait = lambda seconds: pipe.add({"waiting": seconds})

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
        if self.process.last is self._tell_last:
            last = self._tell_last()  # the engine is asked now, before it ends
            self.process.last = lambda: last
        self._pipe.release(self._self)

    def during(self, phase: str) -> AbstractContextManager[None]:
        """The call of the engine inside is this part of a step."""
        if self.process.is_evaluating:
            self.process.is_evaluating = False
            self._pipe.tell_state(None)
        if self._pipe.line is not None:
            self._pipe.look()
        self.process.is_quiet = not self._phases.is_timed
        return self._phases.during(phase)

    @contextmanager
    def state(self, name: str) -> Iterator[None]:
        """Around "saving" or "loading", which takes long."""
        self._pipe.tell_state(name, at_once=True)
        try:
            with self._phases.during(PAUSED):
                yield
        finally:
            self._pipe.tell_state("evaluating" if self.process.is_evaluating else None)

    def evaluating(self) -> AbstractContextManager[None]:
        """Return the context of a forward that is part of no step."""
        if self.process.is_generating:
            self._pipe.look_if_due()
            return self._phases.during(EVALUATING)
        if not self.process.is_evaluating:
            self._pipe.look_if_due()  # the numbers of earlier steps are training's
            self.process.is_evaluating = True
            self.process.is_quiet = False
            self._pipe.tell_state("evaluating")
        self._pipe.look_if_due()
        return self._phases.during(EVALUATING)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Around the forwards of a generation, which are part of no step."""
        self._pipe.look_if_due()  # the numbers of earlier steps are training's
        self.process.is_generating, self.process.is_quiet = True, False
        self._pipe.tell_state("generating", at_once=True)
        try:
            yield
        finally:
            self.process.is_generating = self.process.is_evaluating = False
            self._pipe.tell_state(None)

    def note_inputs(self, given: Any) -> None:
        """Count the tokens of a micro batch: the elements of the first tensor of integers that is
        [batch, sequence].
        """
        tokens = _first_tokens(given)
        if tokens is not None:
            self._last.tokens += tokens.numel()

    def end_micro_batch(self) -> None:
        """Note the end of a call of step() that ends no optimizer step."""
        self._phases.end_micro_batch()

    def end_step(
        self,
        progress: Progress,
        *,
        loss: Tensor | float | None,
        get_lr: Callable[[], Sequence[float]],
        grad_norm: float | None,
        loss_scale: float | None,
    ) -> None:
        """After an optimizer step. What this costs is paid in each: most is done once for a line.

        `get_lr` gives that of each group; it is a method.
        """
        pipe = self._pipe
        self.ended_at = now = time.monotonic()
        if pipe.teller is not self._self and not pipe.claim(self._self):
            return
        last, process, step = self._last, self.process, progress.global_steps
        last.values = step, progress.global_samples, progress.skipped_steps, loss, grad_norm, loss_scale
        if last.get_lr is None:
            last.get_lr = weakref.WeakMethod(get_lr)
        self._phases.end_step(step + 1)
        process.last = self._tell_last  # a handler of a signal may tell it from now on
        process.is_quiet = False
        if now >= pipe.due_at:
            pipe.look()

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
            pass  # the time from here on is part of it, up to the next forward that trains


def _first_tokens(given: Any) -> Tensor | None:
    """Return the first tensor, depth first; a dict's input_ids go before its other values."""
    # It runs for each micro batch. Values that are no tensor are found first: torch's own isinstance takes
    # longer.
    if isinstance(given, (tuple, list)):
        parts = given
    elif isinstance(given, dict):
        parts = (given["input_ids"],) if "input_ids" in given else tuple(given.values())
    else:
        is_tokens = isinstance(given, Tensor) and given.dtype in _TOKEN_TYPES and given.dim() == 2
        return given if is_tokens else None
    for part in parts:
        tokens = _first_tokens(part)
        if tokens is not None:
            return tokens
    return None
