"""The profile of a model: what each module computes in a forward, how long that takes, and how many
parameters it has.

Source: DeepSpeed 0.19.8 profiling/flops_profiler/profiler.py: the same names and arguments.
        Different on purpose:
- FLOPs are those of matrix products, convolutions and attention (see flop_count.py), so MACs are half of
  them; DeepSpeed adds estimates for what works element by element.
- `ignore_list`, `ignore_modules`: what such modules compute belongs to the module that calls them;
  DeepSpeed loses some of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from ..clock import wait_for_device
from ..errors import ConfigError
from .amounts import duration_to_string, macs_to_string, number_to_string, params_to_string
from .flop_count import FlopCount, counted
from .model_profile import ModelProfile, ModuleRow, ProfiledRun, aggregated_lines, write


class JobSizes(Protocol):
    """Facts of the job in which a profile was made; an engine tells them."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""

    @property
    def mp_world_size(self) -> int:
        """Return over how many ranks each layer is divided."""

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return how many samples a rank takes in a micro batch."""

    def train_batch_size(self) -> int:
        """Return how many samples all ranks take in a step."""


@dataclass(slots=True)
class _Reading:
    """All calls of one module, with the calls that it makes itself."""

    num_calls: int = 0
    flops: int = 0
    duration_s: float = 0.0
    open_calls: list[tuple[float, int]] = field(default_factory=list)  # begin of each, and FLOPs before it


class FlopsProfiler:
    """Measures from start_profile() to stop_profile(), in which the model is called; what was measured stays
    until end_profile().

    Latencies are of a forward whose operations are counted, with the device waited for at both ends of every
    module. Both cost time: about 15 microseconds for an operation, which tells in small models.
    """

    def __init__(
        self, model: nn.Module, ds_engine: JobSizes | None = None, recompute_fwd_factor: float = 0.0
    ) -> None:
        """`ds_engine` tells the size of the batch and of the job, for print_model_profile()."""
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self.step_times_s: Mapping[str, float] = {}  # "forward", "backward" and "step" of the engine's step
        self.flops = self.macs = self.params = 0  # as the last print_model_profile() printed them
        self._readings: dict[nn.Module, _Reading] = {}
        self._uncounted: dict[str, int] = {}
        self._open = ExitStack()
        self._ignored: tuple[type[nn.Module], ...] = ()

    def start_profile(self, ignore_list: Iterable[type[nn.Module]] | None = None) -> None:
        """Forget what was measured, and measure. Modules of the types in `ignore_list` are not told apart."""
        self.stop_profile()
        self._ignored = tuple(ignore_list or ())
        self.reset_profile()
        self.started = True
        self.resume_profile()

    def resume_profile(self) -> None:
        """Measure again after stop_profile(), beside what was measured before."""
        count = self._open.enter_context(counted())
        for module, reading in self._readings.items():
            self._watch(module, reading, count)
        self._open.callback(self._note_uncounted, count)

    def _watch(self, module: nn.Module, reading: _Reading, count: FlopCount) -> None:
        def begin(module: nn.Module, args: Any) -> None:
            wait_for_device()
            reading.open_calls.append((time.perf_counter(), count.total))

        def end(module: nn.Module, args: Any, output: Any) -> None:
            if not reading.open_calls:  # the profile was stopped inside
                return
            wait_for_device()
            began_s, flops = reading.open_calls.pop()
            if not reading.open_calls:  # the outermost call, not a call inside a call
                reading.num_calls += 1
                reading.duration_s += time.perf_counter() - began_s
                reading.flops += count.total - flops

        # The first hook and the last one: the hooks between, which bring parameters, are part of the latency.
        handles = (
            module.register_forward_pre_hook(begin, prepend=True),
            module.register_forward_hook(end, always_call=True),
        )
        for handle in handles:
            self._open.callback(handle.remove)

    def _note_uncounted(self, count: FlopCount) -> None:
        for name, times in count.uncounted.items():
            self._uncounted[name] = self._uncounted.get(name, 0) + times

    def stop_profile(self) -> None:
        """Stop measuring; the results can be asked for."""
        self._open.close()
        for reading in self._readings.values():
            reading.open_calls.clear()

    def reset_profile(self) -> None:
        """Forget the results."""
        modules = (module for module in self.model.modules() if not isinstance(module, self._ignored))
        self._readings = {module: _Reading() for module in modules}
        self._readings.setdefault(self.model, _Reading())
        self._uncounted = {}
        self.step_times_s = {}

    def end_profile(self) -> None:
        """Stop, and forget the results."""
        self.stop_profile()
        self.started = False
        self._readings = {}
        self._uncounted = {}

    # ---- what was measured

    def get_total_flops(self, as_string: bool = False) -> int | str:
        """Return the floating-point operations of the model's forwards."""
        flops = self._flops(self.model)
        return number_to_string(flops) if as_string else flops

    def get_total_macs(self, as_string: bool = False) -> int | str:
        """Return the multiply-accumulate operations of the model's forwards: half of the FLOPs."""
        macs = self._flops(self.model) // 2
        return macs_to_string(macs) if as_string else macs

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """Return the seconds of the model's forwards."""
        duration_s = self._duration_s(self.model)
        return duration_to_string(duration_s) if as_string else duration_s

    def get_total_params(self, as_string: bool = False) -> int | str:
        """Return the elements of all parameters, of which a rank may have a shard only;
        a tied one counts once.
        """
        params = num_params(self.model)
        return params_to_string(params) if as_string else params

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | None = None,
    ) -> None:
        """Print the totals, the greatest classes of modules at each depth and, if `detailed`, every module.

        The totals are `flops`, `macs` and `params` from then on.
        `output_file`: write there instead. `module_depth` -1: to the innermost ones.
        Without a profile, nothing.
        Errors: ConfigError if the file cannot be written
        """
        if not self.started:
            return
        root = self._row(self.model, type(self.model).__name__, name="")
        self.flops, self.macs, self.params = root.flops, root.flops // 2, root.params
        report = ModelProfile(
            root=root,
            run=self._run(),
            step=profile_step,
            uncounted=self._uncounted,
            num_calls=max(1, self._readings[self.model].num_calls),
        )
        write(
            report.lines(module_depth=module_depth, top_modules=top_modules, detailed=detailed), output_file
        )

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the classes of modules that have most parameters, MACs and latency at each depth.

        Without a profile, nothing.
        """
        if self.started:
            root = self._row(self.model, type(self.model).__name__, name="")
            write(aggregated_lines(root, module_depth=module_depth, top_modules=top_modules), None)

    def _row(self, module: nn.Module, class_name: str, *, name: str) -> ModuleRow:
        return ModuleRow(
            name=name,
            class_name=class_name,
            params=num_params(module),
            flops=self._flops(module),
            duration_s=self._duration_s(module),
            extra=module.extra_repr(),
            children=tuple(
                self._row(child, type(child).__name__, name=child_name)
                for child_name, child in module.named_children()
                if child in self._readings
            ),
        )

    def _run(self) -> ProfiledRun | None:
        engine = self.ds_engine
        if engine is None:
            return None
        return ProfiledRun(
            world_size=engine.world_size,
            model_parallel_size=engine.mp_world_size,
            micro_batch_size=engine.train_micro_batch_size_per_gpu(),
            train_batch_size=engine.train_batch_size(),
            times_s=self.step_times_s,
            recompute_fwd_factor=self.recompute_fwd_factor,
            is_compiled=getattr(engine, "is_compiled", False),
        )

    def _flops(self, module: nn.Module) -> int:
        """Return the module's operations; for a container that is never called, as a ModuleList, its
        children's.
        """
        reading = self._readings.get(module)
        if reading is not None and reading.num_calls:
            return reading.flops
        return sum(self._flops(child) for child in module.children())

    def _duration_s(self, module: nn.Module) -> float:
        reading = self._readings.get(module)
        if reading is not None and reading.num_calls:
            return reading.duration_s
        return sum(self._duration_s(child) for child in module.children())


def get_model_profile(  # noqa: PLR0913  (DeepSpeed's signature)
    model: nn.Module,
    input_shape: tuple[int, ...] | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 1,
    warm_up: int = 1,
    as_string: bool = True,
    output_file: str | None = None,
    ignore_modules: Iterable[type[nn.Module]] | None = None,
    mode: str = "forward",
) -> tuple[int | str, int | str, int | str]:
    """Return FLOPs, MACs and parameters of one call of the model, in evaluation and without gradients.

    `input_shape` makes the model's only argument, of zeros in the dtype and on the device of its parameters;
    else `args` and `kwargs` are its arguments. `mode` "generate" calls `model.generate()`. The model is
    called `warm_up` times before.
    Errors: ConfigError for another mode, for a shape that is no tuple, and without arguments
    """
    if mode not in ("forward", "generate"):
        raise ConfigError(f'get_model_profile(mode={mode!r}): must be "forward" or "generate"')
    if input_shape is not None:
        if not isinstance(input_shape, tuple) or not input_shape:
            raise ConfigError(
                f"get_model_profile(input_shape={input_shape!r}): must be a tuple with a "
                "size in it, as (8, 128)"
            )
        args = (_zeros_for(model, input_shape),)
    elif not args and not kwargs:
        raise ConfigError("get_model_profile(): give input_shape=, args= or kwargs=")
    call = model if mode == "forward" else model.generate
    was_training = {module: module.training for module in model.modules()}
    model.eval()
    profiler = FlopsProfiler(model)
    try:
        with torch.no_grad():
            for _ in range(warm_up):
                call(*args, **(kwargs or {}))  # type: ignore[operator]
            profiler.start_profile(ignore_list=ignore_modules)
            call(*args, **(kwargs or {}))  # type: ignore[operator]
            profiler.stop_profile()
        if print_profile:
            profiler.print_model_profile(
                profile_step=warm_up,
                module_depth=module_depth,
                top_modules=top_modules,
                detailed=detailed,
                output_file=output_file,
            )
        return (
            profiler.get_total_flops(as_string),
            profiler.get_total_macs(as_string),
            profiler.get_total_params(as_string),
        )
    finally:
        profiler.end_profile()
        for module, was in was_training.items():
            module.training = was


def num_params(module: nn.Module) -> int:
    """Return the elements of its parameters. A sharded one keeps its shape."""
    return sum(param.numel() for param in module.parameters())


def _zeros_for(model: nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    first = next(model.parameters(), torch.empty(0, device="cpu"))
    return torch.zeros(shape, dtype=first.dtype, device=first.device)
