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
from types import FrameType
from typing import Any

import torch

from ..comm.rank_group import Job
from ..errors import without_credentials

EXIT_CODE = 128 + signal.SIGTERM
CHANGE_CODE = os.EX_TEMPFAIL  # 75: the launcher starts the job again, with other hosts

_log = logging.getLogger("dslaunch")


class Preemption:
    """Listens to SIGTERM, from its making on until `close`, if there is a folder to save in."""

    def __init__(self, job: Job, *, save_dir: str | None, resize_file: str | None = None) -> None:
        self.save_dir = save_dir
        self._file = resize_file
        self._job = job
        self._is_asked = False
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

    def agreed_code(self, device: torch.device) -> int:
        """The exit code with which all ranks are to end if any was asked to; 0: none was. Where SIGTERM and
        the file ask, the signal counts: what sent it does not start the job again.

        Order: a collective
        """
        is_change = self._file is not None and os.path.exists(self._file)
        own = EXIT_CODE if self._is_asked else CHANGE_CODE if is_change else 0
        asked = torch.tensor(float(own), dtype=torch.float64, device=device)
        return int(self._job.all_gather_float64(asked, what="whether to save and end").max())

    def close(self) -> None:
        """Let SIGTERM do what it did before."""
        if self._is_listening:
            self._is_listening = False
            signal.signal(signal.SIGTERM, self._before)


def last_words(where: str, code: int) -> str:
    """Return what is said before the end."""
    where = without_credentials(where)
    if code == CHANGE_CODE:
        return f"the hosts change: training is saved in {where}, and ends to go on from there with others"
    return (
        f"SIGTERM: training is saved in {where}, and ends; start it again, and "
        "load_checkpoint() goes on from there"
    )
