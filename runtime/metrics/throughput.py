"""Number of samples per second that are trained."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ..clock import wait_for_device
from ..config.monitor import ThroughputConfig
from ..errors import ConfigError

_START_STEP = 2  # the first steps allocate memory, compile kernels and open connections


class ThroughputTimer:
    """Measures from `start()` to `stop()`: what passes between a step and the next forward is not counted.

    The first two steps are not counted either. A GPU is waited for only before the first step that counts
    and before a line.
    Units: `batch_size` is the samples of one optimizer step, over all ranks;
           `steps_per_output` is optimizer steps
    Source: DeepSpeed 0.19.8 utils/timer.py, `ThroughputTimer`: the same counters
    """

    def __init__(
        self,
        config: ThroughputConfig,
        batch_size: int,
        start_step: int = _START_STEP,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], object] | None = None,
    ) -> None:
        """`steps_per_output` None: no lines. `logging_fn` None: they are printed.

        Errors: ConfigError for `monitor_memory`
        """
        if monitor_memory:
            raise ConfigError(
                "ThroughputTimer(monitor_memory=True): no use of memory is printed; leave it out, or "
                "call see_memory_usage()"
            )
        self.enabled = steps_per_output is not None if config.enabled is None else config.enabled
        self.batch_size = batch_size
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.epoch_count = 0
        self.micro_step_count = 0  # count in the epoch
        self.global_step_count = 0
        self._log = logging_fn or partial(print, flush=True)
        self._must_wait = config.synchronized
        self._began_s: float | None = None
        self._is_running = False
        self._total = (0, 0.0)  # samples, seconds
        self._last = (0, 0.0)  # at the last line
        self._open_s = 0.0  # time of the step that has not ended

    def update_epoch_count(self) -> None:
        """Say that another epoch begins."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Start the clock, unless it runs."""
        if not self.enabled or self._is_running:
            return
        self._is_running = True
        if self.global_step_count >= self.start_step:
            if self._total[0] == 0:
                self._wait()
            self._began_s = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End a micro batch and, if `global_step`, an optimizer step; say what was measured where that
        is due and wanted.
        """
        if not self.enabled or not self._is_running:
            return
        self._is_running = False
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self._began_s is None:
            return
        every = self.steps_per_output
        is_due = global_step and report_speed and every is not None and self.global_step_count % every == 0
        if is_due:
            self._wait()
        self._open_s += time.perf_counter() - self._began_s
        self._began_s = None
        if not global_step:
            return
        self._total = (self._total[0] + self.batch_size, self._total[1] + self._open_s)
        self._last = (self._last[0] + self.batch_size, self._last[1] + self._open_s)
        self._open_s = 0.0
        if is_due:
            self._log(
                f"step={self.global_step_count}, epoch={self.epoch_count}, "
                f"micro_step={self.micro_step_count}, samples/s={_rate(self._last):.1f}, on "
                f"average={_rate(self._total):.1f}"
            )
            self._last = (0, 0.0)

    def avg_samples_per_sec(self) -> float:
        """Return samples per second over all steps that count; 0 before the first of them has ended."""
        return _rate(self._total)

    def _wait(self) -> None:
        if self._must_wait:
            wait_for_device()


def _rate(measured: tuple[int, float]) -> float:
    samples, seconds = measured
    return samples / seconds if seconds > 0.0 else 0.0
