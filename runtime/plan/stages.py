"""One rank's stages of a model without the other ranks: what these send and tell.

[Note: what stages tell each other]
A stage knows the shapes and dtypes that it is sent from the stage before, and the kinds of micro batches from
the first rank. A rehearsal keeps what its own stages tell, as plain data, and is given what the stages of
other ranks have told in their rehearsals. Where something was not told yet it ends, and is begun anew when
another rank has told that: with several stages on each rank, the first rank takes what the last one sends.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..engine.stages_engine import StagesEngine
from ..pipeline.executor import Executor
from ..pipeline.messages import Contents, Post
from ..pipeline.reading import Reading
from .streams import host_waits
from .without_values import WithoutValues

_KEYS = "keys"  # the numbers of the micro batches of each batch; see Batch
_TRAINING, _EVALUATION = "training", "evaluation"  # whether gradients are wanted
_LENGTH_BYTES = 8  # a message first says how long the one with the contents is


class UntoldInputError(BaseException):
    """No other rank has told what this one is sent. No `except Exception` of the program stops it."""

    def __init__(self, place: str, text: str) -> None:
        """`place`: the key of what is to be told."""
        super().__init__(text)
        self.place = place


class PlannedStages:
    """Stages of the other ranks; see [Note: what stages tell each other].

    `told` is what this rank's stages tell: the keys of micro batches, and by the place of a message the
    contents of those that come with a description, in order.
    """

    def __init__(self, mode: WithoutValues, known: Mapping[str, Any]) -> None:
        """`known`: what the stages of other ranks have told."""
        self.told: dict[str, list[Any]] = {}
        self._mode, self._known = mode, known
        self._asked = ""  # place of the message that is received next
        self._num_taken: Counter[str] = Counter()

    def put(self) -> None:
        """Put in what other stages say, in this process."""
        self._tell_loss()
        self._tell_keys()
        self._tell_contents()

    def _tell_loss(self) -> None:
        engine_class: Any = StagesEngine
        plain, mode = engine_class._mean, self._mode

        @functools.wraps(plain)
        def mean(engine: Any, outcome: Any, num_micro_batches: int) -> Any:
            """Take the mean as the last stage, whose losses all ranks are told; let each be 1."""
            if engine.is_last_stage():
                for loss in outcome.losses:
                    mode.put_number(loss, 1.0)
                return plain(engine, outcome, num_micro_batches)
            engine.is_last_stage = lambda: True
            try:
                losses = [mode.put_number(torch.empty((), device=engine.device), 1.0)]
                return plain(engine, replace(outcome, losses=losses), num_micro_batches)
            finally:
                del engine.is_last_stage

        engine_class._mean = mean

    def _tell_keys(self) -> None:
        reading_class: Any = Reading
        plain = reading_class.agree

        @functools.wraps(plain)
        def agree(reading: Any, job: Any, number: int, line: Any, device: Any) -> list[int]:
            """Take the keys from the first rank of the pipeline."""
            keys: list[int] = plain(reading, job, number, line, device)
            if job.index == line[0]:
                self.told.setdefault(_KEYS, []).append(keys)
                return keys
            told: list[int] = self._next(_KEYS, "which micro batches have the same shapes")
            return told

        reading_class.agree = agree

    def _tell_contents(self) -> None:
        executor_class: Any = Executor
        note, known = executor_class.note, executor_class.known

        @functools.wraps(note)
        def noted(executor: Any, stage: int, key: int, number: int, contents: Contents) -> bool:
            has_to_tell: bool = note(executor, stage, key, number, contents)
            if has_to_tell:
                self.told.setdefault(_place(stage, key), []).append(json.loads(contents.to_bytes()))
            return has_to_tell

        @functools.wraps(known)
        def asked(executor: Any, stage: int, key: int) -> Any:
            self._asked = _place(stage, key)
            return known(executor, stage, key)

        def contents(post: Any, fetch: Any) -> Contents:
            return self._received(post._device)

        executor_class.note, executor_class.known = noted, asked
        post_class: Any = Post
        post_class._told_contents = contents

    def _received(self, device: torch.device) -> Contents:
        """Return the contents of the next message. Those that describe it take memory on the device."""
        stage, _, mode = self._asked.split("/")
        told = self._next(self._asked, f"what stage {stage} of the model sends it")
        data = json.dumps(told).encode()
        held = [torch.empty(one, dtype=torch.uint8, device=device) for one in (_LENGTH_BYTES, len(data))]
        host_waits()  # for their values
        held.clear()
        contents = Contents.from_bytes(data)
        if mode == _TRAINING:
            return contents
        return contents._replace(tensors=tuple(one._replace(wants_grad=False) for one in contents.tensors))

    def _next(self, place: str, what: str) -> Any:
        """Return the next value that was told of a place.

        Errors: UntoldInputError
        """
        number = self._num_taken[place]
        told = self._known.get(place, ())
        if not told:  # the same is sent in an evaluation and in training, but for the wish for gradients
            told = self._known.get(place.replace(_EVALUATION, _TRAINING), ())
        if number >= len(told):
            raise UntoldInputError(
                place.replace(_EVALUATION, _TRAINING),
                f"this rank of a pipeline does not know {what}, which the rehearsal of another rank tells",
            )
        self._num_taken[place] += 1
        return told[number]


def _place(stage: int, key: int) -> str:
    """Return the name of messages from a stage, by the key of their micro batches."""
    return f"{stage}/{key}/{_TRAINING if torch.is_grad_enabled() else _EVALUATION}"
