"""A last checkpoint when the machine is about to be taken away, or when the job is to have other hosts.

A batch system or cloud sends SIGTERM some time before it kills; the next step saves, and the program ends.
The launcher of an elastic job writes a file (DSLAUNCH_RESIZE_FILE): then it ends after the next step too,
or, where no place for a last checkpoint is known, after the next checkpoint that the program saves. Ranks may
hear of it at different steps, or one of them only: so all of them are asked.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from ...shared import variables
from ..comm.rank_group import Job
from ..errors import without_credentials

EXIT_CODE = 128 + signal.SIGTERM
CHANGE_CODE = os.EX_TEMPFAIL  # 75: the launcher starts the job again, with other hosts
_BY_DISK_CODE = CHANGE_CODE + 1  # among ranks: the same, and a snapshot in memory is not enough

_log = logging.getLogger("dslaunch")


class Preemption:
    """Listens to SIGTERM, from its making on until `close`, if there is a folder to save in."""

    def __init__(self, job: Job, *, save_dir: str | None, resize_file: str | None = None) -> None:
        self.save_dir = save_dir
        self._file = resize_file
        self._job = job
        self._is_asked = False
        self.agreed_code = 0  # exit code with which all ranks are to end; 0: none was asked to
        self.is_by_disk = False  # the hosts that go take a part of the snapshots with them
        self._before: Any = None
        self._is_listening = save_dir is not None and threading.current_thread() is threading.main_thread()
        if self._is_listening:
            self._before = signal.signal(signal.SIGTERM, self._hear)
        elif save_dir is not None:
            _log.warning(
                "checkpoint.preemption_save_dir has no effect: initialize() was not called in the main "
                "thread, which alone gets signals"
            )

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True

    @property
    def own_code(self) -> int:
        """The exit code with which this rank was asked to end; 0: it was not."""
        is_change = self._file is not None and os.path.exists(self._file)
        if self._is_asked or not is_change:
            return EXIT_CODE if self._is_asked else 0
        return _BY_DISK_CODE if os.path.exists(f"{self._file}{variables.BY_DISK}") else CHANGE_CODE

    def settle(self, codes: Sequence[float]) -> None:
        """Take the codes of all ranks. Where SIGTERM and the file ask, the signal counts: its sender
        does not start the job again.
        """
        code = int(max(codes))
        self.is_by_disk = code == _BY_DISK_CODE
        self.agreed_code = CHANGE_CODE if self.is_by_disk else code

    def ask(self, device: torch.device) -> None:
        """Settle it between two steps, whose norms bring the ranks' codes.

        Order: a collective
        """
        what = "whether to save and end"
        self.settle(
            [code for (code,) in self._job.all_gather_numbers([self.own_code], device=device, what=what)]
        )

    def close(self) -> None:
        """Give SIGTERM its previous effect again."""
        if self._is_listening:
            self._is_listening = False
            signal.signal(signal.SIGTERM, self._before)


def last_words(where: str, code: int) -> str:
    """Return the last message before the end."""
    where = without_credentials(where)
    if code == CHANGE_CODE:
        return f"the hosts change: training is saved in {where}, and ends to go on from there with others"
    return (
        f"SIGTERM: training is saved in {where}, and ends; start it again, and "
        "load_checkpoint() goes on from there"
    )
