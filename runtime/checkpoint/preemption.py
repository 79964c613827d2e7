"""A last checkpoint when the machine is about to be taken away: SIGTERM asks for it,
and the next step saves and ends.

A batch system or cloud sends SIGTERM some time before it kills. Ranks may get it at different steps, or one
of them only: so each step asks all of them.
"""

from __future__ import annotations

import logging
import signal
import threading
from types import FrameType
from typing import Any

import torch

from ..comm.rank_group import Job

EXIT_CODE = 128 + signal.SIGTERM

_log = logging.getLogger("dslaunch")


class Preemption:
    """Listens to SIGTERM, from its making on until `close`."""

    def __init__(self, job: Job, *, save_dir: str) -> None:
        self.save_dir = save_dir
        self._job = job
        self._is_asked = False
        self._before: Any = None
        self._is_listening = threading.current_thread() is threading.main_thread()
        if self._is_listening:
            self._before = signal.signal(signal.SIGTERM, self._hear)
        else:
            _log.warning(
                "checkpoint.preemption_save_dir has no effect: initialize() was not called in the main "
                "thread, which alone gets signals"
            )

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True

    def is_agreed(self, device: torch.device) -> bool:
        """Whether any rank was asked to end.

        Order: a collective
        """
        own = torch.tensor(float(self._is_asked), dtype=torch.float64, device=device)
        return bool(self._job.all_gather_float64(own, what="whether to save and end").any())

    def close(self) -> None:
        """Let SIGTERM do what it did before."""
        if self._is_listening:
            self._is_listening = False
            signal.signal(signal.SIGTERM, self._before)


def last_words(where: str) -> str:
    """Return what is said before the end."""
    return (
        f"SIGTERM: training is saved in {where}, and ends; start it again, and "
        "load_checkpoint() goes on from there"
    )
