"""A profile as text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ...shared.table import table
from ..errors import ConfigError
from .amounts import duration_to_string, flops_to_string, macs_to_string, number_to_string, params_to_string


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """One module, with all that it calls. Units: elements, operations, seconds."""

    name: str  # name in its parent
    class_name: str
    params: int
    flops: int
    duration_s: float
    extra: str
    children: tuple[ModuleRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRun:
    """The training of which the profile is a step."""

    world_size: int
    model_parallel_size: int
    micro_batch_size: int
    train_batch_size: int
    times_s: Mapping[str, float]  # "forward", "backward", "step", all micro batches of the step together
    recompute_fwd_factor: float
    is_compiled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """The profile of a model, for printing. FLOPS are operations per second."""

    root: ModuleRow
    run: ProfiledRun | None
    step: int
    uncounted: Mapping[str, int]
    num_calls: int

    def lines(self, *, module_depth: int, top_modules: int, detailed: bool) -> Iterator[str]:
        """Yield the lines of the whole profile."""
        yield f"-- profile of {self.root.class_name} after step {self.step}, on this rank --"
        yield from table([(f"{title}:", value) for title, value in self._totals()])
        yield (
            "FLOPs: matrix products, convolutions and attention. Latencies: with the count running, a device "
            "waited for at modules."
        )
        if self.run is not None and self.run.is_compiled:
            yield (
                "The model is compiled, but no compiled code ran here: these latencies are "
                "not those of training."
            )
        for name, times in sorted(self.uncounted.items()):
            yield f"not counted, no formula is known: {name}, {times} times"
        yield ""
        yield from aggregated_lines(self.root, module_depth=module_depth, top_modules=top_modules)
        if detailed:
            yield ""
            yield "each module: parameters, MACs, latency of the forward, FLOPS"
            yield from self._tree(self.root, depth=0, max_depth=module_depth)
        yield "-- end of the profile --"

    def _totals(self) -> Iterator[tuple[str, str]]:
        root, run = self.root, self.run
        if run is not None:
            yield "ranks", str(run.world_size)
            yield "model parallel size", str(run.model_parallel_size)
            yield "samples in a micro batch on one rank", str(run.micro_batch_size)
        yield "forwards", str(self.num_calls)
        yield "parameters of the model", params_to_string(root.params)
        yield "MACs of a forward", macs_to_string(root.flops // 2 / self.num_calls)
        yield "FLOPs of a forward", number_to_string(root.flops / self.num_calls).strip()
        times = {} if run is None else run.times_s
        forward_s = times.get("forward", root.duration_s)
        yield "forward latency", duration_to_string(forward_s / self.num_calls)
        yield "forward FLOPS", _rate(root.flops, forward_s)
        if run is not None and {"backward", "step"} <= times.keys():
            yield from self._step_totals(run, forward_s)

    def _step_totals(self, run: ProfiledRun, forward_s: float) -> Iterator[tuple[str, str]]:
        factor = 2.0 + run.recompute_fwd_factor
        flops, backward_s, step_s = self.root.flops, run.times_s["backward"], run.times_s["step"]
        whole_s = forward_s + backward_s + step_s
        yield "backward latency", duration_to_string(backward_s / self.num_calls)
        yield f"backward FLOPS, {factor:g} times the forward's FLOPs", _rate(factor * flops, backward_s)
        yield "forward and backward FLOPS", _rate((1 + factor) * flops, forward_s + backward_s)
        yield "step latency", duration_to_string(step_s)
        yield "forwards, backwards and step", duration_to_string(whole_s)
        yield "FLOPS of these", _rate((1 + factor) * flops, whole_s)
        yield "samples/s of these", f"{run.train_batch_size / whole_s:.2f}"

    def _tree(self, row: ModuleRow, *, depth: int, max_depth: int) -> Iterator[str]:
        if 0 <= max_depth < depth:
            return
        root = self.root
        cells = [
            f"{params_to_string(row.params)} = {_percent(row.params, root.params)} Params",
            f"{macs_to_string(row.flops // 2)} = {_percent(row.flops, root.flops)} MACs",
            f"{duration_to_string(row.duration_s)} = {_percent(row.duration_s, root.duration_s)} latency",
            _rate(row.flops, row.duration_s),
        ]
        name = f"({row.name}): " if row.name else ""
        yield f"{'  ' * depth}{name}{row.class_name}({', '.join(filter(None, [*cells, row.extra]))})"
        for child in row.children:
            yield from self._tree(child, depth=depth + 1, max_depth=max_depth)


def aggregated_lines(root: ModuleRow, *, module_depth: int, top_modules: int) -> Iterator[str]:
    """Yield a line for each depth: the `top_modules` classes with most parameters, MACs and latency,
    all modules of a class together.
    """
    by_depth: list[dict[str, list[float]]] = []
    _add_up(root, 0, by_depth)
    yield f"the first {top_modules} classes of modules at each depth"
    for depth, classes in enumerate(by_depth):
        if 0 <= module_depth < depth:
            return
        yield f"depth {depth}:"
        columns = (
            ("params", params_to_string),
            ("MACs", macs_to_string),
            ("fwd latency", duration_to_string),
        )
        for index, (title, show) in enumerate(columns):
            first = sorted(classes.items(), key=lambda item: item[1][index], reverse=True)[:top_modules]
            yield f"    {title:<11} - " + ", ".join(f"{name}: {show(sums[index])}" for name, sums in first)


def _add_up(row: ModuleRow, depth: int, by_depth: list[dict[str, list[float]]]) -> None:
    if depth == len(by_depth):
        by_depth.append({})
    sums = by_depth[depth].setdefault(row.class_name, [0.0, 0.0, 0.0])
    for index, value in enumerate((row.params, row.flops // 2, row.duration_s)):
        sums[index] += value
    for child in row.children:
        _add_up(child, depth + 1, by_depth)


def write(lines: Iterable[str], output_file: str | None) -> None:
    """Print the lines, or write them to a file, with its folder.

    Errors: ConfigError if that cannot be written
    """
    text = "\n".join(lines)
    if not output_file:
        print(text, flush=True)
        return
    path = Path(output_file)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the profile cannot be written to {output_file}: {error.strerror}; set "
            "flops_profiler.output_file to another file"
        ) from error


def _rate(flops: float, seconds: float) -> str:
    return flops_to_string(flops / seconds) if seconds > 0.0 else "0 FLOPS"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.4g}%" if whole else "0%"
