"""Host memory that this process uses."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import psutil

_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"  # proc(5)
_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


class ResidentMemory:
    """Bytes of physical memory: all of the process, libraries and the interpreter included,
    not tensors alone.

    The peak is the kernel's own. Where it cannot be reset or read, it is the most that any
    call here has seen.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._is_from_start = True  # the kernel's peak, as far as we know
        self._seen = 0

    def current(self) -> int:
        """Return the bytes in use."""
        rss: int = self._process.memory_info().rss
        self._seen = max(self._seen, rss)
        return rss

    def peak(self) -> int:
        """Return the most bytes that were in use at once, since the last reset or the
        start of the process.
        """
        current = self.current()
        match = _PEAK.search(_STATUS.read_text()) if self._is_from_start and _STATUS.exists() else None
        return max(current, self._seen if match is None else int(match[1]) * 1024)

    def reset_peak(self) -> None:
        """Let the peak count from now."""
        self._seen = 0
        self._is_from_start = False
        with suppress(OSError):  # a kernel, or a sandbox, without it
            _CLEAR_REFS.write_text(_RESET_PEAK)
            self._is_from_start = True
        self.current()
