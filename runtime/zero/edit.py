"""What a rank uses beside, inside GatheredParameters(modifier_rank=...) of a model that no engine has yet.

There one rank may run alone, as transformers has rank 0 initialize each module, and a use of a parameter that
was not gathered brings it on all ranks together. So the rank whose values count says what it uses, and the
others listen: where they use something themselves, and at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ..comm.rank_group import Job
from .early_parameter import EarlyParameter

_END = -1  # a message that is not negative brings the parameter with this serial,
_FIRST_PUT_AWAY = -2  # from here down: it puts one away


class Edit:
    """One such context. It may be inside another, and all ranks enter and leave both.

    Order: a collective where it brings or puts away, and at the end
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
        self._rank, self._job, self._device = rank, job, device
        self._find, self._is_idle = find, is_idle
        self._brought: dict[EarlyParameter, None] = {}
        self._has_ended = False

    def use(self, wanted: Iterable[EarlyParameter]) -> None:
        """Have these here, if the rank that speaks uses them, too."""
        away = [early for early in wanted if not early.is_whole]
        if self._job.index != self._rank:
            while not self._has_ended and not all(early.is_whole for early in away):
                self._listen()
            return
        for early in [early for early in self._brought if early not in wanted and self._is_idle(early)]:
            self._say(_FIRST_PUT_AWAY - early.serial)
        for early in away:
            self._say(early.serial)

    def end(self) -> list[EarlyParameter]:
        """Return what is here still, with the values of the rank that spoke."""
        if self._job.index == self._rank:
            self._say(_END)
        while not self._has_ended:
            self._listen()
        for early in self._brought:
            early.spread(self._rank)
        return list(self._brought)

    def _say(self, message: int) -> None:
        self._send(message)
        self._obey(message)

    def _listen(self) -> None:
        self._obey(self._send(0))

    def _send(self, message: int) -> int:
        sent = torch.tensor([message], device=self._device)
        self._job.broadcast(sent, what=f"what rank {self._rank} uses", source=self._rank)
        return int(sent)

    def _obey(self, message: int) -> None:
        if message == _END:
            self._has_ended = True
        elif message <= _FIRST_PUT_AWAY:
            early = self._find(_FIRST_PUT_AWAY - message)
            del self._brought[early]
            early.keep_shard(source=self._rank)
        else:
            early = self._find(message)
            early.use()
            self._brought[early] = None
