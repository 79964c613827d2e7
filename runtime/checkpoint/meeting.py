"""How the ranks of one save find out about each other without a collective: notes in the store of the process group.

A save beside training must not send anything between the collectives of training, and has to end well when the program destroys its
process groups meanwhile. The store lives as long as somebody holds it.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ..errors import CheckpointError

_FIRST_S, _LONGEST_S = 0.0005, 0.05  # between two looks
_PATIENCE_S = 60.0  # at the end of the program, with ranks that may be gone


class Meeting:
    """One of many, each with a number of its own."""

    def __init__(self, number: int, *, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._is_alone = world_size == 1
        # PrefixStore, since the keys of others are in there, too
        self._store = None if self._is_alone else PrefixStore(f"dslaunch/save/{number}", _get_default_store())

    def tell(self, what: str, value: Any) -> None:
        """Leave a note for the others."""
        if self._store is not None:
            self._store.set(f"{what}/{self._rank}", json.dumps(value))

    def hear(self, what: str, rank: int) -> Any:
        """Wait for the note of a rank.

        Errors: CheckpointError if the rank is gone
        """
        if self._store is None:
            raise AssertionError("a rank that is alone hears nothing")
        key = f"{what}/{rank}"
        pause_s, ended_at = _FIRST_S, 0.0
        try:
            # No store.get() before it is there: it would keep other threads from the store.
            while not self._store.check([key]):
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_S)
                if not threading.main_thread().is_alive():
                    ended_at = ended_at or time.monotonic()
                    if time.monotonic() > ended_at + _PATIENCE_S:
                        raise CheckpointError(f"rank {rank} has not answered for {_PATIENCE_S:.0f} s")
            found = json.loads(self._store.get(key))
            if self._rank == 0:
                self._store.delete_key(key)  # only rank 0 hears it, and it may be long
            return found
        except RuntimeError as error:  # torch's: the store is gone, and rank 0 with it
            raise CheckpointError("rank 0, which keeps the list of files, is gone") from error

    def hear_all(self, what: str, own: Any) -> list[Any]:
        """Wait for the notes of all ranks, this one's being `own`."""
        return [own if rank == self._rank else self.hear(what, rank) for rank in range(self._world_size)]
