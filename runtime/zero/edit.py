"""Agreement of the ranks inside GatheredParameters(modifier_rank=...) of a model that has no engine yet.

One rank may run alone there, as transformers has rank 0 initialize each module. A use of a parameter that was
not gathered brings it on all ranks together; so does another GatheredParameters. Hence the rank whose values
count says what it does, and the others listen: where they do the same, and at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

import torch

from ..comm.numbers import on_device
from ..comm.rank_group import Job
from .parameters.early_parameter import EarlyParameter


class _Act(IntEnum):
    """The next act of all ranks, with one parameter."""

    END = 0
    BRING = 1
    PUT_AWAY = 2
    SPREAD = 3  # spread the values of the rank that speaks


class Edit:
    """One such context. It may stand inside another; all ranks enter and leave both.

    Order: a collective where it does one of the acts, and at the end
    """

    def __init__(
        self,
        rank: int,
        job: Job,
        *,
        device: torch.device,
        find: Callable[[int], EarlyParameter],
        is_idle: Callable[[EarlyParameter], bool],
    ) -> None:
        """`find` gives the parameter with a serial, `is_idle` says whether nothing uses its memory."""
        self.rank = rank
        self._job, self._device = job, device
        self._find, self._is_idle = find, is_idle
        self._brought: dict[EarlyParameter, None] = {}
        self._num_spread: Counter[EarlyParameter] = Counter()
        self._num_awaited: Counter[EarlyParameter] = Counter()
        self._has_ended = False

    @property
    def _speaks(self) -> bool:
        return self._job.index == self.rank

    def use(self, wanted: Iterable[EarlyParameter]) -> None:
        """Have these parameters here, if the rank that speaks uses them, too."""
        away = [early for early in wanted if not early.is_whole]
        if self._speaks:
            for early in [early for early in self._brought if early not in wanted and not early.is_held]:
                if self._is_idle(early):
                    self._say(_Act.PUT_AWAY, early)
            for early in away:
                self._say(_Act.BRING, early)
        while not self._has_ended and not all(early.is_whole for early in away):
            self._listen()

    def spread(self, params: Sequence[EarlyParameter]) -> None:
        """Take the values that the rank that speaks has written to these parameters, where it has done so,
        too.
        """
        self._num_awaited.update(params)
        for early in params if self._speaks else ():
            self._say(_Act.SPREAD, early)
        while not self._has_ended and any(
            self._num_spread[early] < self._num_awaited[early] for early in params
        ):
            self._listen()

    def end(self) -> list[EarlyParameter]:
        """End the edit, and return the parameters that are still here."""
        if self._speaks:
            self._say(_Act.END, None)
        while not self._has_ended:
            self._listen()
        return list(self._brought)

    def _say(self, act: _Act, early: EarlyParameter | None) -> None:
        self._send(act, 0 if early is None else early.serial)
        self._do(act, early)

    def _listen(self) -> None:
        act, serial = self._send(0, 0)
        self._do(_Act(act), None if act == _Act.END else self._find(serial))

    def _send(self, act: int, serial: int) -> tuple[int, int]:
        sent = on_device([act, serial], dtype=torch.int64, device=self._device)
        self._job.broadcast(sent, what=f"what rank {self.rank} uses", source=self.rank)
        heard_act, heard_serial = sent.tolist()
        return heard_act, heard_serial

    def _do(self, act: _Act, early: EarlyParameter | None) -> None:
        if early is None:
            self._has_ended = True
        elif act is _Act.BRING:
            early.use()
            self._brought[early] = None
        elif act is _Act.PUT_AWAY:
            del self._brought[early]
            early.keep_shard(source=self.rank)
        else:
            early.spread(self.rank)
            self._num_spread[early] += 1
