"""What watches an engine's steps: the clock, the throughput, monitors, the profile of one step,
the log of collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..activation import checkpointing
from ..clock import Clock, show_times
from ..comm import comms_log
from ..config import Config
from ..config.monitor import FlopsProfilerConfig, MonitorConfig, ThroughputConfig
from ..metrics.monitor import Event, MonitorMaster
from ..metrics.profiler import FlopsProfiler
from ..metrics.throughput import ThroughputTimer
from .getters import Readings
from .skipped_steps import SkippedSteps

# As DeepSpeed's timers are called, and its events.
_TIMER_OF = {"forward": "fwd", "backward": "bwd", "step": "step"}


class Instruments(Readings):
    """A part of the engine. What is off costs a comparison: nothing is timed, and no device is waited for."""

    module: nn.Module
    monitor: MonitorMaster
    tput_timer: ThroughputTimer
    flops_profiler: FlopsProfiler | None
    _clock: Clock
    _skipped: SkippedSteps | None

    def _install(self, config: Config, device: torch.device) -> None:
        """Open the monitors.

        Errors: ConfigError, on rank 0, if one of them cannot be opened
        """
        monitors = MonitorConfig(
            tensorboard=config.tensorboard, csv_monitor=config.csv_monitor, wandb=config.wandb
        )
        self.monitor = MonitorMaster(monitors, rank=self.global_rank)
        throughput = config.timers.throughput if config.timers else ThroughputConfig()
        self.tput_timer = ThroughputTimer(
            throughput, config.train_batch_size, steps_per_output=config.steps_per_print
        )
        profile = config.flops_profiler or FlopsProfilerConfig()
        self._profile_config = profile
        self.flops_profiler = (
            FlopsProfiler(self.module, self, profile.recompute_fwd_factor) if profile.enabled else None
        )
        comms_log.configure_from(config.comms_logger)
        self._scales_loss = config.loss_scaling.enabled
        self._breaks_down = config.wall_clock_breakdown
        self._clock = Clock(is_on=self._breaks_down, device=device)
        self._last_times_s: dict[str, float] = {}
        self._loss: Tensor | None = (
            None  # 0-d: the mean of this step's micro batches, as far as they have come
        )
        self._writes_events = self.monitor.is_writing

    # ---- around the parts of a step

    def _watch_forward(self) -> AbstractContextManager[object]:
        """Around a forward. One without gradients is no part of a step."""
        if not torch.is_grad_enabled():
            return nullcontext()
        self.tput_timer.start()
        profiler = self.flops_profiler
        if profiler is None or self.global_rank or self.global_steps != self._profile_config.profile_step:
            return self._clock.time("forward")
        return self._profiled_forward(profiler)

    @contextmanager
    def _profiled_forward(self, profiler: FlopsProfiler) -> Iterator[None]:
        self._clock.is_on = True
        if profiler.started:
            profiler.resume_profile()
        else:
            profiler.start_profile()
        try:
            with self._clock.time("forward"):
                yield
        finally:
            profiler.stop_profile()

    def _note_loss(self, part: Tensor) -> None:
        """Add a micro batch's part of the mean loss of a step.

        It stays on the device until the step has ended.
        """
        if self._skipped is not None:
            self._skipped.note_loss(part)
        if self._writes_events:
            part = part.detach().float()
            self._loss = part if self._loss is None else self._loss + part

    def _forget_losses(self) -> None:
        """The micro batches since the last step count no more."""
        self._loss = None
        if self._skipped is not None:
            self._skipped.forget_losses()

    def _report_step(self) -> None:
        """After an optimizer step: print and write what was measured in it."""
        if self._clock.is_on:
            self._last_times_s = self._clock.take_times_s()
        profiler = self.flops_profiler
        if profiler is not None and profiler.started:
            self._print_profile(profiler, self._last_times_s)
        if self.global_rank == 0:
            own = show_times(self._last_times_s) if self._breaks_down else ""
            if line := ", ".join(filter(None, (own, checkpointing.take_times()))):
                print(f"step={self.global_steps}, {line}", flush=True)
        if self._writes_events:
            self.monitor.write_events(self._events(self._last_times_s))
            self._loss = None

    def _print_profile(self, profiler: FlopsProfiler, times_s: dict[str, float]) -> None:
        profile = self._profile_config
        profiler.step_times_s = times_s
        self._clock.is_on = self._breaks_down
        profiler.print_model_profile(
            profile_step=profile.profile_step,
            module_depth=profile.module_depth,
            top_modules=profile.top_modules,
            detailed=profile.detailed,
            output_file=profile.output_file,
        )
        profiler.end_profile()

    def _events(self, times_s: dict[str, float]) -> Iterator[Event]:
        """What DeepSpeed writes after a step; the times are those of the whole step."""
        samples = self.global_samples
        if self._loss is not None:
            yield "Train/Samples/train_loss", self._loss.item(), samples
        yield "Train/Samples/lr", self.get_lr()[0], samples
        if self._scales_loss:
            yield "Train/Samples/loss_scale", self._scaler.scale, samples
        for name in _TIMER_OF:
            if self._breaks_down and name in times_s:
                yield f"Train/Samples/elapsed_time_ms_{name}", times_s[name] * 1e3, samples

    # ---- what can be asked

    def get_wall_clock_timers(self) -> dict[str, float]:
        """Return what "fwd", "bwd" and "step" took in the last step, in milliseconds; empty without
        wall_clock_breakdown.
        """
        return {
            _TIMER_OF[name]: s * 1e3
            for name, s in self._last_times_s.items()
            if self._breaks_down and name in _TIMER_OF
        }

    def log_comm_summary(
        self, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print what the collectives of this process took, as `comms_log.log_summary()`, which see."""
        return comms_log.log_summary(show_straggler, return_dict)

    def flops_profiler_enabled(self) -> bool:
        return self._profile_config.enabled

    def flops_profiler_profile_step(self) -> int:
        return self._profile_config.profile_step

    def flops_profiler_module_depth(self) -> int:
        return self._profile_config.module_depth

    def flops_profiler_top_modules(self) -> int:
        return self._profile_config.top_modules

    def flops_profiler_detailed(self) -> bool:
        return self._profile_config.detailed

    def flops_profiler_output_file(self) -> str | None:
        return self._profile_config.output_file

    def flops_profiler_recompute_fwd_factor(self) -> float:
        return self._profile_config.recompute_fwd_factor
