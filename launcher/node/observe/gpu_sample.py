"""The state of a host's GPUs, by NVML: a process beside the agent asks, so that a driver that hangs holds up
nothing.

That process runs with the job's Python, which may have pynvml (of the package nvidia-ml-py); without it there
are no numbers of GPUs. It prints one line an interval, and ends with the agent, at the end of its input.
"""

from __future__ import annotations

import os
import time

from ...wire import fast_json
from ..system.lean_stdlib import signal, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ..system.lean_stdlib import Selector

READ_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 16
LATE_S = 5.0  # a line that is older than an interval and this is out of date
END_S = 0.2  # wait for a process that was killed

# Python text, for any Python that a job may have.
PROGRAM = """\
import json, os, select, sys
try:
    os.nice(5)
    import pynvml as n
    n.nvmlInit()
    handles = range(n.nvmlDeviceGetCount())
except Exception:
    sys.exit(0)
def look(index):
    row = {}
    def put(name, ask):
        try:
            row[name] = ask()
        except Exception:
            pass
    try:
        gpu = n.nvmlDeviceGetHandleByIndex(index)
    except Exception:
        return row
    put("util", lambda: n.nvmlDeviceGetUtilizationRates(gpu).gpu / 100)
    put("mem_used", lambda: n.nvmlDeviceGetMemoryInfo(gpu).used)
    put("mem_total", lambda: n.nvmlDeviceGetMemoryInfo(gpu).total)
    put("power_w", lambda: n.nvmlDeviceGetPowerUsage(gpu) / 1000)
    put("temp_c", lambda: n.nvmlDeviceGetTemperature(gpu, n.NVML_TEMPERATURE_GPU))
    put("ecc", lambda: n.nvmlDeviceGetTotalEccErrors(
        gpu, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, n.NVML_VOLATILE_ECC))
    return row
while True:
    sys.stdout.write(json.dumps([look(index) for index in handles]) + "\\n")
    sys.stdout.flush()
    if select.select([0], [], [], float(sys.argv[1]))[0]:
        break
"""


class GpuSample:
    """The newest numbers of the GPUs here. No method raises or waits."""

    def __init__(
        self, python: str, env: Mapping[bytes, bytes], *, interval_s: float, selector: Selector
    ) -> None:
        """Start the process; if that fails, there are no numbers."""
        import subprocess

        self._selector = selector
        self._keep_s = interval_s + LATE_S
        self._rest = b""
        self._gpus: list[dict[str, Any]] = []
        self._at = float("-inf")
        self._fd = -1
        self._process: subprocess.Popen[bytes] | None = None
        with suppress(OSError):
            self._process = subprocess.Popen(
                [os.path.expanduser(python), "-c", PROGRAM, f"{interval_s:g}"],
                env=env,
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        if self._process is not None and self._process.stdout is not None:
            self._fd = self._process.stdout.fileno()
            os.set_blocking(self._fd, False)
            selector.on_read(self._fd, self.read)

    def read(self) -> None:
        """Read the printed lines."""
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._selector.forget(self._fd)
            return
        *lines, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-MAX_LINE_BYTES:]
        if not lines:
            return
        with suppress(ValueError, RecursionError):
            told = fast_json.read(lines[-1].decode("ascii"))
            if isinstance(told, list):
                self._gpus = [one if isinstance(one, dict) else {} for one in told]
                self._at = time.monotonic()

    def last(self, now: float) -> list[dict[str, Any]]:
        """Return one row for each GPU, in nvidia-smi's order; empty if unknown or out of date."""
        return self._gpus if now - self._at <= self._keep_s else []

    def close(self) -> None:
        """Kill the process and close its pipe."""
        process, self._process = self._process, None
        if process is None:
            return
        self._selector.forget(self._fd)
        for file in (process.stdin, process.stdout):
            if file is not None:
                file.close()
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + END_S
        with suppress(ChildProcessError):  # the agent has collected it
            while os.waitpid(process.pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
                time.sleep(0.001)
        process.returncode = 0
