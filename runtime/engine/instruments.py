"""Instruments that observe an engine's steps: the clock, the throughput, monitors, the profile of one step,
the log of collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..activation import checkpointing
from ..checkpoint.training_state import Progress
from ..clock import Clock, show_times
from ..comm import comms_log
from ..comm.numbers import ReadBack
from ..comm.phases import BACKWARD, DATA, FORWARD, OPTIMIZER
from ..config import Config
from ..config.monitor import FlopsProfilerConfig, MonitorConfig, ThroughputConfig
from ..metrics.monitor import Event, MonitorMaster
from ..metrics.pipe import process_pipe
from ..metrics.profiler import FlopsProfiler, JobSizes
from ..metrics.start_phases import start_phases
from ..metrics.step_metrics import StepMetrics
from ..metrics.throughput import ThroughputTimer
from ..metrics.trial import process_trial
from ..tracing.spans import SPANS
from ..tracing.tracer import process_tracer
from ..zero.model.sharded_model import ShardedModel

# DeepSpeed's names of timers and events.
_TIMER_OF = {"forward": "fwd", "backward": "bwd", "step": "step"}
_PHASE_OF = {"forward": FORWARD, "backward": BACKWARD, "step": OPTIMIZER, "data": DATA}


class Instruments:
    """Instruments that observe an engine's steps.

    An instrument that is off costs a comparison: no time is taken, and the host waits for no device.
    """

    def __init__(
        self, module: nn.Module, config: Config, device: torch.device, *, job: JobSizes, progress: Progress
    ) -> None:
        """Open the monitors. `job` tells the profile of one step the sizes of the job.

        Errors: ConfigError, on rank 0, if one of them cannot be opened
        """
        self._module = module
        self._rank, self._progress = dist.get_rank(), progress
        monitors = MonitorConfig(
            tensorboard=config.tensorboard, csv_monitor=config.csv_monitor, wandb=config.wandb
        )
        self.monitor = MonitorMaster(monitors, rank=self._rank)
        throughput = config.timers.throughput if config.timers else ThroughputConfig()
        self.tput_timer = ThroughputTimer(
            throughput, config.train_batch_size, steps_per_output=config.steps_per_print
        )
        profile = config.flops_profiler or FlopsProfilerConfig()
        self._profile_config = profile
        self.flops_profiler = (
            FlopsProfiler(module, job, profile.recompute_fwd_factor) if profile.enabled else None
        )
        comms_log.configure_from(config.comms_logger)
        self._scales_loss = config.loss_scaling.enabled
        self._breaks_down = config.wall_clock_breakdown
        self._clock = Clock(is_on=self._breaks_down, device=device)
        self._last_times_s: dict[str, float] = {}
        # 0-d: sum of the losses' parts so far in this step, which becomes their mean; a GPU's stays on the
        # GPU.
        self._loss: Tensor | float | None = None
        self._read_loss: ReadBack
        self._writes_events = self.monitor.is_writing
        pipe = process_pipe()
        self.metrics = None if pipe is None else StepMetrics(pipe, device)
        self._start = start_phases()
        self._sums_loss = self._writes_events or self.metrics is not None
        self.tracer = process_tracer()
        self._trial, self._device = process_trial(), device

    def join(self, model: ShardedModel) -> None:
        """Count waits for the model's collectives from now on, too."""
        if self.metrics is not None:
            self.metrics.join(model)
            self.metrics.watch(self._module)

    def close(self) -> None:
        """Close all instruments: the engine has ended."""
        self.monitor.close()
        if self.metrics is not None:
            self.metrics.close()

    # ---- around the parts of a step

    def forward(self, *given: object) -> AbstractContextManager[object]:
        """Return a context for a forward of these arguments. A forward without gradients is no part of a
        step, but its time counts if the module is in training mode, as for a policy's old probabilities.
        """
        metrics = self.metrics
        if self._trial is not None:
            self._trial.note_inputs(given)
        if not torch.is_grad_enabled():
            spanned = SPANS.span("evaluation", "forward without gradients")
            if metrics is None:
                return spanned
            timed = metrics.during(FORWARD) if self._module.training else metrics.evaluating()
            return _both(timed, spanned)
        if metrics is None:
            return self._traced_forward()
        metrics.note_inputs(given)
        forward = self._traced_forward()
        return forward if metrics.process.is_quiet else _both(metrics.during(FORWARD), forward)

    def note_inputs(self, *micro_batches: object) -> None:
        """Count the tokens of these micro batches."""
        if self._trial is not None:
            self._trial.note_inputs(micro_batches)
        if self.metrics is not None:
            for micro_batch in micro_batches:
                self.metrics.note_inputs(micro_batch)

    def _traced_forward(self) -> AbstractContextManager[object]:
        self.tput_timer.start()
        if self.tracer.is_armed:
            self.tracer.enter(self._progress.global_steps + 1)
        return self._traced("forward", self._timed_forward())

    def _timed_forward(self) -> AbstractContextManager[object]:
        profiler = self.flops_profiler
        if profiler is None or self._rank or self._progress.global_steps != self._profile_config.profile_step:
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

    def time(self, name: str) -> AbstractContextManager[object]:
        """Return a context for "backward" or "step"."""
        timed = self._traced(name, self._clock.time(name))
        metrics = self.metrics
        if metrics is None or metrics.process.is_quiet:
            return timed
        return _both(metrics.during(_PHASE_OF[name]), timed)

    def part(self, name: str) -> AbstractContextManager[object]:
        """Return a context for "data", if the engine reads them, or for "forward", all work of a pipeline."""
        metrics = self.metrics
        if metrics is None or metrics.process.is_quiet:
            return nullcontext()
        return metrics.during(_PHASE_OF[name])

    def state(self, name: str) -> AbstractContextManager[object]:
        """Return a context for "saving" or "loading"."""
        paused = nullcontext() if self.metrics is None else self.metrics.state(name)
        return paused if self._start is None or name != "loading" else _both(self._start.loading(), paused)

    def evaluating(self) -> AbstractContextManager[object]:
        """Return a context for an evaluation."""
        return nullcontext() if self.metrics is None else self.metrics.evaluating()

    def generating(self) -> AbstractContextManager[None]:
        """Return a context for a block in which the program generates."""
        return nullcontext() if self.metrics is None else self.metrics.generating()

    def _traced(self, name: str, timed: AbstractContextManager[object]) -> AbstractContextManager[object]:
        return self.tracer.phase(name, timed) if SPANS.is_on else timed

    def note_loss(self, part: Tensor | float) -> None:
        """Add a micro batch's part of the mean loss of a step, as `loss_value` gives it."""
        if not self._sums_loss:
            return
        if isinstance(part, Tensor):
            part = part.float()
            if self.metrics is not None:
                part = part.clone()  # the sum is read later, and the program may change its loss
        self._loss = part if self._loss is None else self._loss + part
        if self._writes_events and isinstance(self._loss, Tensor):
            self._read_loss = ReadBack(self._loss)  # on the host at the latest when the norm is

    def forget_losses(self) -> None:
        """Forget the losses of the micro batches since the last step."""
        self._loss = None

    def end_micro_batch(self, *, is_boundary: bool) -> None:
        """End the times of a micro batch, at the end of `step()`."""
        self.tput_timer.stop(global_step=is_boundary, report_speed=self._rank == 0)
        if self.metrics is not None and not is_boundary:
            self.metrics.end_micro_batch()
        if self.tracer.is_armed:
            self.tracer.end_micro_batch()

    def end_optimizer_step(
        self, *, get_lr: Callable[[], Sequence[float]], loss_scale: float, grad_norm: float | None
    ) -> None:
        """Print, write and report the measurements of an optimizer step that has ended.

        `get_lr` returns the learning rate of each group.
        """
        if self._start is not None:
            self._start.end_step()
        if self._clock.is_on:
            self._last_times_s = self._clock.take_times_s()
        profiler = self.flops_profiler
        if profiler is not None and profiler.started:
            self._print_profile(profiler, self._last_times_s)
        if self._rank == 0:
            own = show_times(self._last_times_s) if self._breaks_down else ""
            if line := ", ".join(filter(None, (own, checkpointing.take_times()))):
                print(f"step={self._progress.global_steps}, {line}", flush=True)
        if self._writes_events:
            self.monitor.write_events(self._events(get_lr()[0], loss_scale))
        if self.metrics is not None:
            self.metrics.end_step(
                self._progress,
                loss=self._loss,
                get_lr=get_lr,
                grad_norm=grad_norm,
                loss_scale=loss_scale if self._scales_loss else None,
            )
        self._loss = None
        if self.tracer.is_armed:
            self.tracer.end_step(self._progress.global_steps)
        if self._trial is not None:
            self._trial.end_step(self._progress, self._device)

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

    def _events(self, lr: float, loss_scale: float) -> Iterator[Event]:
        """Yield the events that DeepSpeed writes after a step; the times are those of the whole step."""
        samples, times_s = self._progress.global_samples, self._last_times_s
        if self._loss is not None:
            loss = self._read_loss.wait().item() if isinstance(self._loss, Tensor) else self._loss
            yield "Train/Samples/train_loss", loss, samples
        yield "Train/Samples/lr", lr, samples
        if self._scales_loss:
            yield "Train/Samples/loss_scale", loss_scale, samples
        for name in _TIMER_OF:
            if self._breaks_down and name in times_s:
                yield f"Train/Samples/elapsed_time_ms_{name}", times_s[name] * 1e3, samples

    # ---- what can be asked

    def times_ms(self) -> dict[str, float]:
        """Return what "fwd", "bwd" and "step" took in the last step, in milliseconds; empty without
        wall_clock_breakdown.
        """
        return {
            _TIMER_OF[name]: s * 1e3
            for name, s in self._last_times_s.items()
            if self._breaks_down and name in _TIMER_OF
        }


def loss_value(loss: Tensor) -> Tensor | float:
    """Return the value of a loss without its graph: a float, or a detached tensor if the host would have to
    wait for it or the loss is not one number.
    """
    is_here = type(loss) is Tensor and loss.is_cpu and loss.numel() == 1
    return loss.item() if is_here else loss.detach()


def _both(
    outer: AbstractContextManager[object], inner: AbstractContextManager[object]
) -> AbstractContextManager[object]:
    if isinstance(inner, nullcontext):
        return outer
    return inner if isinstance(outer, nullcontext) else _nested(outer, inner)


@contextmanager
def _nested(outer: AbstractContextManager[object], inner: AbstractContextManager[object]) -> Iterator[None]:
    with outer, inner:
        yield
