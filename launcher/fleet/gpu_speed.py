"""Speeds of GPUs, as `dslaunch check --gpu` measured them; slow and wrong GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ...shared.table import table, terminal_columns
from ..output.screen_text import screen_text
from ..wording import count
from .check_facts import Finding, clean

SLOW = 0.8  # part of the speed of most GPUs of that name
MAX_SHOWN = 64
_KINDS = {  # name and unit of each quantity
    "flops_per_s": ("multiplies matrices at", "TFLOP/s", 1e12),
    "copied_bytes_per_s": ("copies its memory at", "GB/s", 1e9),
    "loaded_bytes_per_s": ("is loaded from the host's memory at", "GB/s", 1e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGpu:
    """One GPU. `name` is empty if PyTorch finds no GPU there; `problem` says why it was not measured.

    `speeds` has the keys that the rank printed; values are operations or bytes per second.
    """

    host: str
    device: str
    name: str
    problem: str = ""
    num_wrong: int = 0
    speeds: Mapping[str, float]


def read_gpus(told: Sequence[str], slots: Mapping[int, tuple[str, str]]) -> tuple[MeasuredGpu, ...]:
    """Read the ranks' output after the mark; `slots` has the host and device of each rank.

    Errors: ValueError if the output has another form
    """
    found: dict[int, MeasuredGpu] = {}
    for text in told:
        try:
            one: dict[str, Any] = json.loads(text)
            host, device = slots[one["rank"]]
            has_speeds = not one["problem"] and one["name"]
            found[one["rank"]] = MeasuredGpu(
                host=host,
                device=device,
                name=clean(str(one.get("name", ""))),
                problem=clean(str(one["problem"])),
                num_wrong=int(one["num_wrong"]) if has_speeds else 0,
                speeds={kind: float(one[kind]) for kind in _KINDS} if has_speeds else {},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None
    return tuple(found[rank] for rank in sorted(found))


def faults_of_speed(gpus: Sequence[MeasuredGpu]) -> tuple[Finding, ...]:
    """Return the faults: first GPUs that are broken or compute wrong results, then those slower than most of
    the same name.
    """
    found = [*_broken(gpus)]
    for kind, (does, unit, size) in _KINDS.items():
        by_name: dict[str, list[float]] = {}
        for gpu in gpus:
            if kind in gpu.speeds:
                by_name.setdefault(gpu.name, []).append(gpu.speeds[kind])
        for gpu in gpus:
            usual = median(by_name[gpu.name]) if kind in gpu.speeds else 0.0
            if usual and gpu.speeds[kind] < SLOW * usual:
                told = f"GPU {gpu.device} {does} {gpu.speeds[kind] / size:.3g} {unit}"
                found.append(
                    _fault(
                        gpu,
                        f"{told}, where most {gpu.name} reach {usual / size:.3g}; look at its heat, power "
                        "and PCIe link (nvidia-smi -q), and at what else runs there",
                    )
                )
    return tuple(found)


def _broken(gpus: Sequence[MeasuredGpu]) -> Iterable[Finding]:
    has_gpus = any(gpu.name for gpu in gpus)
    for gpu in gpus:
        if gpu.problem:
            yield _fault(gpu, f"GPU {gpu.device} cannot be used: {gpu.problem}; look at nvidia-smi there")
        elif not gpu.name and has_gpus:
            yield _fault(
                gpu, f"PyTorch finds no GPU for slot {gpu.device}; look at nvidia-smi and the build of torch"
            )
        elif gpu.num_wrong:
            sums = count(gpu.num_wrong, "row") if gpu.num_wrong == 1 else f"{gpu.num_wrong} rows or columns"
            yield _fault(
                gpu,
                f"GPU {gpu.device} computes wrong: {sums} of a product of matrices; leave it out with "
                "--exclude, and have it replaced",
            )


def _fault(gpu: MeasuredGpu, text: str) -> Finding:
    return Finding(hosts=(gpu.host,), text=text, is_problem=True)


def gpus_as_text(gpus: Sequence[MeasuredGpu]) -> str:
    """Write the results as text, the slowest first if there are many, then the faults."""
    measured = [gpu for gpu in gpus if gpu.speeds]
    lines = ["", "GPUs, one rank on each:"]
    shown = measured
    if len(measured) > MAX_SHOWN:
        shown = sorted(measured, key=lambda gpu: gpu.speeds["flops_per_s"])[:MAX_SHOWN]
        lines.append(f"  the slowest {MAX_SHOWN} of {len(measured)}:")
    rows = [
        (
            f"{gpu.host}:{gpu.device}",
            gpu.name,
            *(f"{gpu.speeds[kind] / size:.3g} {unit}" for kind, (_, unit, size) in _KINDS.items()),
        )
        for gpu in shown
    ]
    columns = terminal_columns()
    if rows:
        head = ("GPU", "name", "multiplies", "copies", "is loaded")
        lines += [
            f"  {line}" for line in table(rows, head=head, numbers=(2, 3, 4), columns=columns and columns - 2)
        ]
    else:
        lines.append("  none that PyTorch can use")
    faults = faults_of_speed(gpus)
    if faults:
        lines += ["", "Problems:", *(f"  {one.hosts[0]}: {one.text}" for one in faults)]
    return screen_text(lines)


def gpus_as_dict(gpus: Sequence[MeasuredGpu]) -> dict[str, Any]:
    """Return the results as JSON has them."""
    return {
        "problems": [{"hosts": list(one.hosts), "text": one.text} for one in faults_of_speed(gpus)],
        "gpus": [
            {
                "host": gpu.host,
                "device": gpu.device,
                "name": gpu.name,
                "problem": gpu.problem,
                "num_wrong": gpu.num_wrong,
                **gpu.speeds,
            }
            for gpu in gpus
        ],
    }
