"""Times of the collectives, by operation and size, for `comms_logger`.

How they are timed
------------------
A collective that is timed blocks: the device is waited for, the message is sent and waited for, and the
device is waited for again. So nothing runs beside it, which costs speed, and the time is that of this
message alone, with the wait for the last rank. What gloo adds up after a message (see collectives.py) is not
part of it, and its messages have the names of our collectives: an all_reduce over gloo is a reduce_scatter
and an all_gather.
Bandwidths are those of NVIDIA's nccl-tests (doc/PERFORMANCE.md). Algorithm bandwidth is the whole buffer's
size by the time. Bus bandwidth is what a rank sends by the time: (N-1)/N of the buffer for a reduce_scatter
or an all_gather among N ranks, twice that for an all_reduce, all of it for a broadcast. Where one of the two
is not known, as of pickled objects, it is left out.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, TypeVar

import torch.distributed as dist

from ...shared.table import table
from ..clock import wait_for_device
from ..config.monitor import CommsLoggerConfig
from ..config.section import read_section
from ..errors import ConfigError

T = TypeVar("T")
_log = logging.getLogger("dslaunch")
_GBIT = 1e9 / 8  # bytes


@dataclass(slots=True)
class _Row:
    """One operation on one size; None is unknown."""

    nbytes: int | None  # bytes of the whole buffer
    bus_bytes: int | None = 0  # sent, in all messages
    times_s: array[float] = field(default_factory=lambda: array("d"))

    def describe(self) -> dict[str, Any]:
        """Return the row in DeepSpeed's words and units: gigabits of 1e9 bits."""
        count, total_s = len(self.times_s), sum(self.times_s)
        return {
            "count": count,
            "total_latency_ms": total_s * 1e3,
            "avg_latency_ms": total_s * 1e3 / count,
            "tput_avg_gbps": None if self.nbytes is None else _gbps(self.nbytes * count, total_s),
            "busbw_avg_gbps": _gbps(self.bus_bytes, total_s),
            "msg_size_bytes": self.nbytes,
            "msg_size_str": _size(self.nbytes),
        }


class Stopwatch:
    """Times one collective."""

    def __init__(self, comms_log: CommsLog, name: str, *, nbytes: int | None, bus_bytes: int | None) -> None:
        self._comms_log, self._name, self._nbytes, self._bus_bytes = comms_log, name, nbytes, bus_bytes

    def time(self, send: Callable[[], T]) -> T:
        """Return `send()`, once it and all that it has begun have ended."""
        wait_for_device()
        began = time.perf_counter()
        result = send()
        if isinstance(result, dist.Work):
            result.wait()
        wait_for_device()
        took_s = time.perf_counter() - began
        self._comms_log.add(self._name, took_s, nbytes=self._nbytes, bus_bytes=self._bus_bytes)
        return result


class CommsLog:
    """The log of this process: the collectives of all its engines."""

    def __init__(self) -> None:
        self.config = CommsLoggerConfig()
        self._rows: dict[tuple[str, int | None], _Row] = {}

    @property
    def is_on(self) -> bool:
        """Whether anything is timed."""
        return self.config.enabled

    def stopwatch(
        self, op: str, what: str, *, nbytes: int | None, sent_bytes: int | None
    ) -> Stopwatch | None:
        """Return what times this one; None if it is none of those that are wanted."""
        config = self.config
        if not config.enabled or not (config.prof_all or op in config.prof_ops):
            return None
        name = f"{op} of {what}" if config.debug else op
        bus_bytes = nbytes if op == "broadcast" else None if op == "gather" else sent_bytes
        return Stopwatch(self, name, nbytes=nbytes, bus_bytes=bus_bytes)

    def add(self, name: str, took_s: float, *, nbytes: int | None, bus_bytes: int | None) -> None:
        """Note one collective; print it, on rank 0, where `verbose` asks for that."""
        row = self._rows.setdefault((name, nbytes), _Row(nbytes))
        row.times_s.append(took_s)
        row.bus_bytes = None if row.bus_bytes is None or bus_bytes is None else row.bus_bytes + bus_bytes
        if self.config.verbose and dist.get_rank() == 0:
            print(
                f"comm op: {name} | time (ms): {took_s * 1e3:.3f} | msg size: {_size(nbytes)} | algbw "
                f"(Gbps): {_shown(_gbps(nbytes, took_s))} | busbw (Gbps): {_shown(_gbps(bus_bytes, took_s))}",
                flush=True,
            )

    def clear(self) -> None:
        """Forget all."""
        self._rows.clear()

    def rows(self) -> list[tuple[str, _Row]]:
        """Rows by operation and size."""
        return [
            (key[0], self._rows[key]) for key in sorted(self._rows, key=lambda key: (key[0], key[1] or 0))
        ]


_PROCESS = CommsLog()  # DeepSpeed's log_summary() knows no engine


def process_log() -> CommsLog:
    """Return the log of this process."""
    return _PROCESS


def configure_from(config: CommsLoggerConfig | None) -> None:
    """Take a ds_config's section; where it has none, all stays as it is."""
    if config is not None:
        _PROCESS.config = config


def configure(
    deepspeed_config: object | None = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Change what is timed from now on; None leaves a setting as it is.

    `initialize()` reads the ds_config's section by itself.

    Errors: ConfigError for a name in `prof_ops` that is no collective of ours, and for `deepspeed_config`
    Source: DeepSpeed 0.19.8 comm/comm.py, `configure`
    """
    if deepspeed_config is not None:
        raise ConfigError(
            "comm.configure(deepspeed_config=...): initialize() reads the ds_config's "
            "comms_logger; leave it out"
        )
    given = {
        "enabled": enabled,
        "prof_all": prof_all,
        "prof_ops": prof_ops,
        "verbose": verbose,
        "debug": debug,
    }
    values = _PROCESS.config.model_dump() | {
        name: value for name, value in given.items() if value is not None
    }
    problems: dict[str, str] = {}
    config = read_section(CommsLoggerConfig, values, path="comms_logger", problems=problems)
    if config is None:
        raise ConfigError("\n".join(f"comm.configure(): {line}" for line in problems.values()))
    _PROCESS.config = config


def reset_log() -> None:
    """Forget the times so far."""
    _PROCESS.clear()


def has_comm_data() -> bool:
    """Whether a collective was timed since the last `reset_log()`."""
    return bool(_PROCESS.rows())


def get_comm_operation_count() -> int:
    """Return how many collectives of this process were timed since the last `reset_log()`."""
    return sum(len(row.times_s) for _, row in _PROCESS.rows())


def get_logged_comm_ops() -> list[str]:
    """Return the names of the operations that were timed, sorted, each once."""
    return sorted({name for name, _ in _PROCESS.rows()})


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print on rank 0 what the collectives took on it; return that as a dict,
    on each rank its own, if `return_dict`.

    `show_straggler`: beside, what of it was the wait for other ranks. Of each collective the rank that came
    last has did not wait, so the least time of all ranks is the message's.
    Units:  milliseconds; gigabits (1e9 bits) per second
    Order:  with `show_straggler` every rank must call this
    Source: DeepSpeed 0.19.8 comm/comm.py, `log_summary`: the same dict, with None for what is not known
    """
    if not _PROCESS.is_on and not _PROCESS.rows():
        _log.warning(
            "log_summary(): comms_logger.enabled is not true in the ds_config, so no collective was timed"
        )
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    rows = _PROCESS.rows()
    stragglers = _stragglers(rows, world_size) if show_straggler else None
    if rank == 0:
        print(_table(rows) if rows else "no collective has been timed; one process sends nothing", flush=True)
        if stragglers is not None:
            print(_straggler_table(stragglers), flush=True)
    if not return_dict:
        return None
    summary: dict[str, dict[int | None, dict[str, Any]]] = {}
    for name, row in rows:
        summary.setdefault(name, {})[row.nbytes] = row.describe()
    return {
        "summary": summary,
        "straggler_analysis": stragglers,
        "metadata": {
            "world_size": world_size,
            "rank": rank,
            "timestamp": datetime.now(timezone.utc).isoformat(),
        },
    }


def _stragglers(rows: list[tuple[str, _Row]], world_size: int) -> dict[str, dict[int | None, dict[str, Any]]]:
    """Compare the ranks where all have timed equally often. A collective."""
    own = {(name, row.nbytes): row.times_s for name, row in rows}
    everywhere: list[Any] = [own]
    if world_size > 1:
        everywhere = [None] * world_size
        dist.all_gather_object(everywhere, own)
    stragglers: dict[str, dict[int | None, dict[str, Any]]] = {}
    for (name, nbytes), times_s in own.items():
        beside = [ranks.get((name, nbytes), array("d")) for ranks in everywhere]
        if any(len(other) != len(times_s) for other in beside):
            continue
        least = [min(times) for times in zip(*beside, strict=True)]
        message_ms, wait_ms = sum(least) * 1e3, (sum(times_s) - sum(least)) * 1e3
        stragglers.setdefault(name, {})[nbytes] = {
            "count": len(times_s),
            "total_comm_lat_ms": message_ms,
            "total_straggler_ms": wait_ms,
            "avg_comm_lat_ms": message_ms / len(times_s),
            "avg_straggler_ms": wait_ms / len(times_s),
            "msg_size_bytes": nbytes,
            "msg_size_str": _size(nbytes),
        }
    return stragglers


def _table(rows: list[tuple[str, _Row]]) -> str:
    head = ("collective", "message size", "count", "total ms", "average ms", "algbw Gbps", "busbw Gbps")
    cells = []
    for name, row in rows:
        figures = row.describe()
        cells.append(
            (
                name,
                figures["msg_size_str"],
                str(figures["count"]),
                f"{figures['total_latency_ms']:.2f}",
                f"{figures['avg_latency_ms']:.3f}",
                _shown(figures["tput_avg_gbps"]),
                _shown(figures["busbw_avg_gbps"]),
            )
        )
    return "\n".join(table(cells, head=head, numbers=range(1, len(head))))


def _straggler_table(stragglers: dict[str, dict[int | None, dict[str, Any]]]) -> str:
    numbers = ("total_comm_lat_ms", "total_straggler_ms", "avg_comm_lat_ms", "avg_straggler_ms")
    head = ("collective", "message size", "count", "message ms", "wait ms", "average ms", "average wait ms")
    cells = []
    for name, sizes in stragglers.items():
        for row in sizes.values():
            figures = (f"{row[key]:.3f}" for key in numbers)
            cells.append((name, row["msg_size_str"], str(row["count"]), *figures))
    lines = table(cells, head=head, numbers=range(1, len(head)))
    return "\n".join(["of these, timed equally often on all ranks:", *lines])


def _gbps(nbytes: int | None, took_s: float) -> float | None:
    return None if nbytes is None or took_s <= 0.0 else nbytes / took_s / _GBIT


def _shown(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"


def _size(nbytes: int | None) -> str:
    """Return the size in powers of 1024."""
    if nbytes is None:
        return "-"
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.2f} {units[0]}" if units[0] != "B" else f"{nbytes} B"
