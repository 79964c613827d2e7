"""The speeds of a cluster as `dslaunch check --bandwidth` measured them, and the files that keep them.

A file is one JSON object with a version. Measuring the same hosts again replaces it, with what runs have said
of the speeds before.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import LaunchError
from ..inputs.named_file import read_named
from ..job.mesh import HostSlots
from ..output.job_report import put_file
from .devices import CPU
from .past_run import CompareRun, run_as_data, run_of
from .speeds import MOST_HIDDEN, Points, Speeds

OPTION = "--speeds"
KIND, VERSION = "dslaunch measured speeds", 1
MEASURE = "dslaunch check --bandwidth"
MAX_RUNS = 8
_LEAST = 1e-30  # seconds, and speeds: what is less, or more than its inverse, is no measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpeeds:
    """The speeds of one rank on hosts that were measured together, the slowest rank's of each."""

    hosts: tuple[HostSlots, ...]
    device: str  # name of the GPU; "none": the hosts have none
    device_bytes: int
    torch: str
    num_cores: int  # cores of a host that a job may use
    num_threads: int  # threads of a rank
    measured_at: str  # ISO 8601
    arithmetic: Mapping[str, Points]  # this and the others as in Speeds
    memory: Mapping[str, float]
    inside: Mapping[str, Points]
    between: Mapping[str, Points]
    launch_s: float
    update_bytes_per_s: float
    copied_bytes_per_s: float
    disk_bytes_per_s: float
    runs: tuple[CompareRun, ...] = ()  # the newest last

    @property
    def is_on_gpu(self) -> bool:
        """Tell whether the ranks compute on GPUs."""
        return self.device != CPU

    @property
    def device_name(self) -> str:
        """Return what the ranks compute on, for messages."""
        return self.device if self.is_on_gpu else "CPUs"

    @property
    def day(self) -> str:
        """Return the date of the measurement."""
        return self.measured_at.partition("T")[0]

    def speeds(self) -> Speeds:
        """Return what a plan computes with."""
        return Speeds(
            is_measured=True,
            arithmetic=tuple(self.arithmetic.items()),
            memory=tuple(self.memory.items()),
            launch_s=self.launch_s,
            adds_launches=not self.is_on_gpu,
            inside=tuple((self.inside or self.between).items()),
            between=tuple((self.between or self.inside).items()),
            update_bytes_per_s=self.update_bytes_per_s,
            copied_bytes_per_s=self.copied_bytes_per_s,
            disk_bytes_per_s=self.disk_bytes_per_s,
            hidden=self._hidden(),
        )

    def _hidden(self) -> float:
        """Return the share of computing that hides messages: on CPUs, whose cores send them, that of the
        cores that no rank computes on.
        """
        if self.is_on_gpu:
            return MOST_HIDDEN
        most = max(one.num_ranks for one in self.hosts)
        idle = self.num_cores - most * self.num_threads
        return min(MOST_HIDDEN, max(0.0, idle / most))

    def with_run(self, run: CompareRun) -> ClusterSpeeds:
        """Return the speeds with one more run that was compared; a run that was there already is replaced."""
        others = tuple(one for one in self.runs if one.job != run.job)
        return replace(self, runs=(*others, run)[-MAX_RUNS:])


class _Rank(NamedTuple):
    """Speeds that one rank has measured, in the form that a file has."""

    speeds: Mapping[str, Any]
    device: str
    device_bytes: int
    torch: str
    num_cores: int
    num_threads: int


def cluster_of(told: Sequence[str], hosts: Sequence[HostSlots]) -> ClusterSpeeds:
    """Return the speeds by the ranks' output after the mark: of each the slowest rank's.

    Errors: ValueError if the output has another form
    """
    try:
        ranks = [_rank(json.loads(text)) for text in told]
        first = ranks[0]
        return ClusterSpeeds(
            hosts=tuple(hosts),
            device=first.device or CPU,
            device_bytes=min(one.device_bytes for one in ranks),
            torch=first.torch,
            num_cores=min(one.num_cores for one in ranks),
            num_threads=first.num_threads,
            measured_at=_now(),
            arithmetic=_slowest_curves([one.speeds["arithmetic"] for one in ranks], min),
            inside=_slowest_curves([one.speeds["inside"] for one in ranks], max),
            between=_slowest_curves([one.speeds["between"] for one in ranks], max),
            memory={
                name: min(_number(one.speeds["memory"][name]) for one in ranks)
                for name in first.speeds["memory"]
            },
            launch_s=max(_number(one.speeds["launch_s"]) for one in ranks),
            update_bytes_per_s=_slowest(ranks, "update_bytes_per_s"),
            copied_bytes_per_s=_slowest(ranks, "copied_bytes_per_s"),
            disk_bytes_per_s=_slowest(ranks, "disk_bytes_per_s"),
        )
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def _rank(told: Mapping[str, Any]) -> _Rank:
    return _Rank(
        speeds=told,
        device=str(told["device"])[:100],
        device_bytes=int(told["device_bytes"]),
        torch=str(told["torch"])[:40],
        num_cores=int(told["num_cores"]),
        num_threads=int(told["num_threads"]),
    )


def _slowest(ranks: Sequence[_Rank], name: str) -> float:
    return min(_number(one.speeds[name]) for one in ranks)


def _slowest_curves(
    curves: Sequence[Mapping[str, Any]], slowest: Callable[[Iterable[float]], float]
) -> dict[str, Points]:
    """Return the curve of each name, whose points are those that all ranks have.

    Ranks of hosts with other numbers of ranks send other amounts: where no point is in all curves, the curve
    of one rank stands for all, of which the last value is the slowest.
    """
    found: dict[str, Points] = {}
    for name in dict.fromkeys(name for one in curves for name in one):
        by_rank = [dict(_points(one[name])) for one in curves if one.get(name)]
        places = [at for at in by_rank[0] if all(at in one for one in by_rank)]
        if places:
            found[name] = tuple((at, slowest(one[at] for one in by_rank)) for at in sorted(places))
        else:
            last = slowest(one[max(one)] for one in by_rank)
            whole = next(one for one in by_rank if one[max(one)] == last)
            found[name] = tuple(sorted(whole.items()))
    return found


# ---- the file


def file_name(hosts: Sequence[HostSlots], device: str) -> str:
    """Return the name of the file for these hosts: the first one's, and a digest of all."""
    key = json.dumps([sorted((one.name, one.num_ranks) for one in hosts), device])
    first = re.sub(r"[^A-Za-z0-9.-]", "-", hosts[0].name)[:40].strip(".-") or "host"
    return f"{first}-{hashlib.blake2b(key.encode(), digest_size=6).hexdigest()}.json"


def write_speeds(path: Path, cluster: ClusterSpeeds) -> None:
    """Write the file. Errors: LaunchError if that fails"""
    try:
        put_file(path, (json.dumps(speeds_as_dict(cluster), indent=1) + "\n").encode())
    except OSError as error:
        raise LaunchError(f"{path}: the measured speeds cannot be written: {error.strerror}") from None


def read_speeds(path: Path, *, option: str = "") -> ClusterSpeeds:
    """Return the speeds of a file. `option` is the one that named it, for messages.

    Errors: LaunchError if it cannot be read, is of another kind or version, or is damaged
    """
    name = f"{option}={path}" if option else str(path)
    what_to_do = f"measure the hosts anew with {MEASURE}, or remove the file"
    try:
        given = json.loads(read_named(path, max_bytes=1 << 20))
    except OSError as error:
        raise LaunchError(f"{name}: cannot be read: {error.strerror}; give a file that can") from None
    except (ValueError, RecursionError):
        raise LaunchError(f"{name}: is no JSON, and no file of measured speeds; {what_to_do}") from None
    if not isinstance(given, dict) or given.get("kind") != KIND:
        raise LaunchError(f"{name}: is no file of measured speeds; {what_to_do}")
    if given.get("version") != VERSION:
        raise LaunchError(
            f"{name}: has version {given.get('version')!r}, and this dslaunch reads {VERSION}; {what_to_do}"
        )
    try:
        return _of_data(given)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LaunchError(f"{name}: is damaged ({type(error).__name__}: {error}); {what_to_do}") from None


def find_speeds(
    folder: Path | None, hosts: Sequence[HostSlots], fits: Callable[[ClusterSpeeds], bool]
) -> tuple[Path, ClusterSpeeds] | None:
    """Return the measured speeds of these hosts, and their file; None if they were not measured.

    Speeds of exactly these hosts and ranks go before those of the same hosts, and these before those of more
    hosts; of several the newest. `fits` says whether the job's ranks may compute on what was measured.

    Errors: LaunchError for a file of measured speeds that is damaged
    """
    if folder is None:
        return None
    wanted = {one.name: one.num_ranks for one in hosts}
    found = []
    for path in sorted(folder.glob("*.json")):
        one = read_speeds(path)
        there = {host.name: host.num_ranks for host in one.hosts}
        if wanted.keys() <= there.keys() and fits(one):
            found.append((there == wanted, there.keys() == wanted.keys(), one.measured_at, path, one))
    if not found:
        return None
    *_, path, one = max(found, key=lambda row: row[:3])
    return path, one


def speeds_as_dict(one: ClusterSpeeds) -> dict[str, Any]:
    """Return the speeds as a file has them, and JSON."""
    return {
        "kind": KIND,
        "version": VERSION,
        "measured_at": one.measured_at,
        "hosts": [{"name": host.name, "ranks": host.num_ranks} for host in one.hosts],
        "device": one.device,
        "device_bytes": one.device_bytes,
        "torch": one.torch,
        "num_cores": one.num_cores,
        "num_threads": one.num_threads,
        "memory": dict(one.memory),
        "arithmetic": dict(one.arithmetic),
        "inside": dict(one.inside),
        "between": dict(one.between),
        "launch_s": one.launch_s,
        "update_bytes_per_s": one.update_bytes_per_s,
        "copied_bytes_per_s": one.copied_bytes_per_s,
        "disk_bytes_per_s": one.disk_bytes_per_s,
        "runs": [run_as_data(run) for run in one.runs],
    }


def _of_data(given: Mapping[str, Any]) -> ClusterSpeeds:
    datetime.fromisoformat(given["measured_at"])
    hosts = tuple(HostSlots(str(one["name"]), int(one["ranks"])) for one in given["hosts"])
    if not hosts or any(one.num_ranks < 1 for one in hosts):
        raise ValueError("it names no hosts")
    return ClusterSpeeds(
        hosts=hosts,
        device=str(given["device"]),
        device_bytes=int(given["device_bytes"]),
        torch=str(given["torch"]),
        num_cores=int(given["num_cores"]),
        num_threads=int(given["num_threads"]),
        measured_at=str(given["measured_at"]),
        memory={name: _number(value) for name, value in given["memory"].items()},
        arithmetic=_curves(given["arithmetic"]),
        inside=_curves(given["inside"]),
        between=_curves(given["between"]),
        launch_s=_number(given["launch_s"]),
        update_bytes_per_s=_number(given["update_bytes_per_s"]),
        copied_bytes_per_s=_number(given["copied_bytes_per_s"]),
        disk_bytes_per_s=_number(given["disk_bytes_per_s"]),
        runs=tuple(map(run_of, given["runs"])),
    )


def _curves(given: Mapping[str, Any]) -> dict[str, Points]:
    return {name: _points(points) for name, points in given.items()}


def _points(given: Iterable[Any]) -> Points:
    points = tuple((_number(at), _number(value)) for at, value in given)
    if not all(at for at, _ in points):
        raise ValueError("a curve has a point at 0")
    return points


def _number(value: Any) -> float:
    number = float(value)
    if number and not _LEAST <= number <= 1 / _LEAST:
        raise ValueError(f"{value!r} is no speed")
    return number


def _now() -> str:
    return datetime.now(tz=timezone.utc).isoformat(timespec="seconds")
