"""Facts from a look at hosts, and findings about them, as data.

Answers of a host are checked here: a wrong answer counts as no answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..wording import cleaned

_DISK: dict[str, Any] = {"problem": str, "size_bytes": int, "free_bytes": int}
_GPU: dict[str, Any] = {  # a number that the GPU does not give is -1
    "index": int,
    "problem": str,
    "name": str,
    "memory_bytes": int,
    "ecc_errors": int,
    "throttling": int,
    "pcie_generation": int,
    "max_pcie_generation": int,
    "pcie_width": int,
    "max_pcie_width": int,
    "num_nvlinks": int,
    "num_nvlinks_up": int,
}
# A type, `list` for a list of texts, or the shape of each record of a list.
SHAPES: dict[str, dict[str, Any]] = {
    "clock": {"time": float},
    "system": {
        "hostname": str,
        "boot_id": str,
        "kernel": str,
        "machine": str,
        "num_cpus": int,
        "numactl": str,
        "memlock": int,
        "nofile": int,
        "memory_bytes": int,
        "memory_free_bytes": int,
    },
    "shm": _DISK,
    "tmp": _DISK,
    "cwd": _DISK,
    "python": {"version": str, "problem": str},
    "torch": {"version": str, "platform": str, "nccl": str, "problem": str},
    "gpu": {"driver": str, "names": list, "num": int},
    "nvml": {"problem": str, "cuda": int, "gpus": _GPU},
    "link": {"fastest_mbit": int, "names": list, "faults": list},
    "port_owner": {"owner": str},
}
MAX_TEXT = 300  # letters per value; the rest is cut
MAX_ITEMS = 64  # items per list; the rest is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """One host. `problem` says why there is no agent on it, or how it was lost; answers that it gave before
    count.
    """

    name: str
    node_rank: int
    num_slots: int | None  # None with slots=auto
    devices: tuple[str, ...]
    python: str
    cwd: str
    problem: str = ""
    answers: Mapping[str, Mapping[str, Any]]  # by question, each in the form of SHAPES
    wrong: tuple[tuple[str, str], ...] = ()  # question, and the fault of the answer
    unanswered: tuple[str, ...] = ()
    clock_offset_s: float | None = None  # the host's clock minus this machine's
    clock_error_s: float = 0.0  # the greatest error of clock_offset_s: half of the shortest round trip
    reach: tuple[str, ...] | None = None  # for each candidate: empty, or why it was not reached


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """All hosts, and the addresses at which rank 0 could be reached. `candidates` is empty if no address was
    tried.
    """

    hosts: tuple[HostFacts, ...]
    port: int
    is_port_fixed: bool
    candidates: tuple[str, ...]
    listening_problem: str
    timeout_s: float
    took_s: float
    timeout_option: str = "--timeout"  # the option that gives a host more time

    @property
    def reach(self) -> dict[int, tuple[str, ...]]:
        """Return for each node that was asked, and each candidate: empty, or why it was not reached."""
        return {host.node_rank: host.reach for host in self.hosts if host.reach is not None}

    def name_of(self, node_rank: int) -> str:
        return next(host.name for host in self.hosts if host.node_rank == node_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sentence about some hosts. A problem keeps a host from being used, a warning does not."""

    hosts: tuple[str, ...]
    text: str
    is_problem: bool = False


def read_answer(question: str, facts: object) -> tuple[dict[str, Any] | None, str]:
    """Return the answer in the form of SHAPES and "", or None and what is wrong with it."""
    shape = SHAPES.get(question)
    if shape is None:
        return None, f"{clean(repr(facts))} is no answer"
    if isinstance(facts, dict) and "error" in facts:
        return None, clean(str(facts["error"])) or "it failed"
    return _read(shape, facts)


def _read(shape: dict[str, Any], facts: object) -> tuple[dict[str, Any] | None, str]:
    if not isinstance(facts, dict):
        return None, f"{clean(repr(facts))} is no answer"
    found: dict[str, Any] = {}
    for name, kind in shape.items():
        value = facts.get(name)
        if isinstance(kind, dict) and isinstance(value, list):
            records = [_read(kind, one) for one in value[:MAX_ITEMS]]
            wrong = [why for record, why in records if record is None]
            if wrong:
                return None, f"one of {name}: {wrong[0]}"
            found[name] = [record for record, _ in records]
            continue
        if kind is float and isinstance(value, int | float) and math.isfinite(value):
            found[name] = float(value)
        elif kind is list and isinstance(value, list):
            found[name] = [clean(str(one)) for one in value[:MAX_ITEMS]]
        elif kind is str and isinstance(value, str):
            found[name] = clean(value)
        elif kind is int and isinstance(value, int):
            found[name] = value
        else:
            return None, f"{name} is {clean(repr(value))}"
    return found, ""


def clean(text: str) -> str:
    """Return a fact without control characters, cut to MAX_TEXT."""
    return cleaned(text, MAX_TEXT)
