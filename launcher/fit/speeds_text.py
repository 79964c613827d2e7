"""Measured speeds as a table, for the report of `dslaunch check`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...shared.table import table, terminal_columns
from ..output.screen_text import screen_text
from ..wording import count, shown_size
from .measured_speeds import ClusterSpeeds
from .speeds import Points


def speeds_as_text(cluster: ClusterSpeeds, path: Path) -> str:
    """Write the speeds, and the file that keeps them."""
    ranks = sorted({one.num_ranks for one in cluster.hosts})
    number = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    where = f"{number} on each of {count(len(cluster.hosts), 'host')}, {cluster.device_name}"
    columns = terminal_columns()
    rows = table(list(_rows(cluster)), numbers=(1,), columns=columns and columns - 2)
    return screen_text(
        [
            "",
            f"Speeds of the slowest rank, all at work ({where}):",
            *(f"  {line}" for line in rows),
            f"kept in {path}, for dslaunch plan",
        ]
    )


def _rows(cluster: ClusterSpeeds) -> Iterator[tuple[str, str]]:
    for dtype, points in cluster.arithmetic.items():
        best = max(speed for _, speed in points)
        unit, size = ("TFLOP/s", 1e12) if best >= 1e12 else ("GFLOP/s", 1e9)
        yield f"multiplies matrices, {dtype}", f"{best / size:.3g} {unit}"
    for dtype, speed in cluster.memory.items():
        yield f"operations without matrices, {dtype}", _speed(speed)
    yield "an operation at least", f"{cluster.launch_s * 1e6:.3g} us"
    for place, curves in (("inside a host", cluster.inside), ("between hosts", cluster.between)):
        for name, points in curves.items():
            yield f"{name.replace('_', ' ')}, {place}", _message(points)
    yield "optimizer on the host", _speed(cluster.update_bytes_per_s)
    if cluster.is_on_gpu:
        yield "copies between host and GPU", _speed(cluster.copied_bytes_per_s)
    yield "disk of temporary files", _speed(cluster.disk_bytes_per_s)


def _message(points: Points) -> str:
    first, last = points[0], points[-1]
    latency = f"{first[1] * 1e6:.3g} us at least"
    return (
        latency if first == last else f"{latency}, {shown_size(int(last[0]))} at {_speed(last[0] / last[1])}"
    )


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s" if bytes_per_s else "not measured"
