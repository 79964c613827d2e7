"""The section `autotuning` of a ds_config, as DeepSpeed has it, and what its keys mean to trials."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import LaunchError

SECTION = "autotuning"
METRICS = ("throughput", "latency")
RESULTS_DIR, BEST = "autotuning_results", "ds_config_optimal.json"
_MOST = 1 << 40
# Keys that have no effect on trials, and why.
_UNUSED = {
    "fast": "the keys that are tried are stage, offload and micro batch",
    "exps_dir": "trials are written into results_dir",
    "tuner_type": "rehearsals say which configurations run",
    "tuner_early_stopping": "each round runs the better half of the one before",
    "num_tuning_micro_batch_sizes": "rehearsals say which micro batches run",
    "model_info": "rehearsals know the model",
    "model_info_path": "rehearsals know the model",
}
_NUMBERS = (
    "start_profile_step", "end_profile_step", "tuner_num_trials", "mp_size",
    "max_train_batch_size", "min_train_batch_size",
    "max_train_micro_batch_size_per_gpu", "min_train_micro_batch_size_per_gpu",
)  # fmt: skip
_OTHERS = ("enabled", "metric", "metric_path", "results_dir", "overwrite", "arg_mappings")


class Sized(Protocol):
    """A configuration with the sizes of its batches."""

    @property
    def micro_batch_size(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Autotuning:
    """Requests of the section. None: it does not say."""

    metric: str = METRICS[0]
    warm_up: int | None = None  # steps before those that are measured
    steps: int | None = None  # measured ones of the first round
    num_trials: int | None = None  # configurations that run, at most
    results_dir: Path | None = None
    is_afresh: bool = False  # earlier results do not count
    arg_mappings: tuple[tuple[str, str], ...] = ()  # keys of the ds_config, and arguments that repeat them
    micro_batches: tuple[int, int] = (1, _MOST)  # the least and the greatest that may run
    batches: tuple[int, int] = (1, _MOST)  # bounds of train_batch_size, which stays as it is
    num_tensor_parts: int | None = None  # parts of each layer, which the job must have
    notes: tuple[str, ...] = ()  # sentences on keys without effect

    def allows(self, one: Sized) -> bool:
        """Tell whether a configuration may run."""
        least, most = self.micro_batches
        return least <= one.micro_batch_size <= most


def read_autotuning(section: Any) -> Autotuning:
    """Return what the section asks for; None as a section asks for nothing.

    Errors: LaunchError for a key or a value that is not here
    """
    if section is None:
        return Autotuning()
    if not isinstance(section, Mapping):
        raise _refusal("", section, "must be an object of JSON; write its keys in braces")
    _check_keys(section)
    numbers = {name: _number(section, name) for name in _NUMBERS}
    warm_up, steps = _steps(numbers["start_profile_step"], numbers["end_profile_step"])
    metric = section.get("metric", METRICS[0])
    if metric not in METRICS:
        raise _refusal(
            "metric", metric, "must be throughput, samples a second, or latency, the time of a step"
        )
    if section.get("metric_path") is not None:
        raise _refusal(
            "metric_path", section["metric_path"], "is not here; results_dir has what was measured"
        )
    results = section.get("results_dir")
    if not isinstance(results, str | None) or results == "":
        raise _refusal("results_dir", results, "must be the path of a folder")
    notes = tuple(
        f"autotuning.{name} has no effect: {why}"
        for name, why in _UNUSED.items()
        if section.get(name) is not None
    )
    return Autotuning(
        metric=metric,
        warm_up=warm_up,
        steps=steps,
        num_trials=numbers["tuner_num_trials"],
        results_dir=None if results is None else Path(results),
        is_afresh=section.get("overwrite") is True,
        arg_mappings=_mappings(section.get("arg_mappings")),
        micro_batches=(
            numbers["min_train_micro_batch_size_per_gpu"] or 1,
            numbers["max_train_micro_batch_size_per_gpu"] or _MOST,
        ),
        batches=(numbers["min_train_batch_size"] or 1, numbers["max_train_batch_size"] or _MOST),
        num_tensor_parts=numbers["mp_size"],
        notes=notes,
    )


def _check_keys(section: Mapping[str, Any]) -> None:
    known = [*_OTHERS, *_NUMBERS, *_UNUSED]
    for name in section:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise LaunchError(f"{SECTION}.{name}: there is no such key; {hint}")


def _number(section: Mapping[str, Any], name: str) -> int | None:
    value = section.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refusal(name, value, "must be a whole number above 0")
    return value


def _steps(start: int | None, end: int | None) -> tuple[int | None, int | None]:
    """Return the steps before the measurement and in it; DeepSpeed's defaults stand for the one not given."""
    if start is None and end is None:
        return None, None
    start, end = 3 if start is None else start, 5 if end is None else end
    if end <= start:
        raise _refusal("end_profile_step", end, f"must be more than start_profile_step, which is {start}")
    return start, end - start


def _mappings(given: Any) -> tuple[tuple[str, str], ...]:
    if given is None:
        return ()
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given.values()):
        raise _refusal("arg_mappings", given, "must name for keys of the ds_config the script's arguments")
    return tuple(given.items())


def _refusal(name: str, value: Any, rest: str) -> LaunchError:
    key = f"{SECTION}.{name}" if name else SECTION
    return LaunchError(f"{key} {str(value)[:60]!r}: {rest}")
