"""Notes of the ranks of one save to each other, without a collective:
they lie in the store of the process group.

A save beside training must not send anything between the collectives of training, and has to end well when
the program destroys its process groups meanwhile. The store lives as long as one rank holds it.
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ..errors import CheckpointError

_FIRST_S, _LONGEST_S = 0.0005, 0.05  # pause between two looks for a note
BEAT_S = 1.0  # pause between two signs of life
PATIENCE_S = 30.0  # patience with a rank that gives no sign of life


class RankNotes:
    """Notes of one save, which has a number of its own. Inside the `with` block this rank gives signs of
    life.
    """

    def __init__(self, number: int, *, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._store = None
        if world_size > 1:
            self._store = PrefixStore(f"dslaunch/save/{number}", _get_default_store())
        self._is_over = threading.Event()

    def __enter__(self) -> RankNotes:
        if self._store is not None:
            # a daemon, since it only says that this process goes on
            threading.Thread(target=self._beat, name="dslaunch-alive", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()

    def tell(self, what: str, value: Any) -> None:
        """Leave a note for the others."""
        if self._store is not None:
            self._store.set(f"{what}/{self._rank}", json.dumps(value))

    def hear(self, what: str, rank: int) -> Any:
        """Wait for the note of another rank.

        Errors: CheckpointError if the rank is gone
        """
        store = self._store
        if store is None:
            raise AssertionError("a rank that is alone hears nothing")
        key = f"{what}/{rank}"
        pause_s, last_beat, patience_ends = _FIRST_S, b"", time.monotonic() + PATIENCE_S
        try:
            # get() waits until a note is there: it would keep other threads from the store.
            while not store.check([key]):
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_S)
                beat = store.get(f"alive/{rank}") if store.check([f"alive/{rank}"]) else b""
                if beat != last_beat:
                    last_beat, patience_ends = beat, time.monotonic() + PATIENCE_S
                elif time.monotonic() > patience_ends:
                    raise CheckpointError(
                        f"rank {rank} has ended, or its host is lost: no sign of it for {PATIENCE_S:g} s"
                    )
            note = json.loads(store.get(key))
            if self._rank == 0:
                store.delete_key(key)  # only rank 0 hears it, and it may be long
            return note
        except CheckpointError:
            raise
        except RuntimeError as error:  # torch's: the store is gone
            raise CheckpointError("rank 0 has ended, or its host is lost") from error

    def hear_all(self, what: str, own: Any) -> list[Any]:
        """Wait for the notes of all ranks, this one's being `own`."""
        return [own if rank == self._rank else self.hear(what, rank) for rank in range(self._world_size)]

    def wait_until_heard(self) -> None:
        """Let rank 0 stay until the others have heard the last of it: its process may serve the
        store, and end next.
        """
        with suppress(RuntimeError, CheckpointError):  # a rank is gone, and all is said
            if self._rank == 0:
                self.hear_all("heard", None)
            else:
                self.tell("heard", None)

    def _beat(self) -> None:
        count = 0
        while self._store is not None and not self._is_over.wait(BEAT_S):
            count += 1
            try:
                self._store.set(f"alive/{self._rank}", str(count))
            except RuntimeError:  # the store is gone, which `hear` tells
                return
