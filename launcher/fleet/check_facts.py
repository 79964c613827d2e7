"""What a look at hosts found, as data.

What comes from a host is checked here: a wrong answer is one that says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..wording import cleaned

_DISK = {"problem": str, "size_bytes": int, "free_bytes": int}
SHAPES: dict[str, dict[str, type]] = {
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
    "torch": {"version": str, "platform": str, "problem": str},
    "gpu": {"driver": str, "names": list, "num": int},
    "port_owner": {"owner": str},
}
MAX_TEXT = 300  # of one value; more is cut


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """One host. `problem` says why there is no agent on it, or how it was lost;
    what it answered before counts.
    """

    name: str
    node_rank: int
    num_slots: int | None  # None if the hostfile leaves it to the host
    devices: tuple[str, ...]
    python: str
    cwd: str
    problem: str = ""
    answers: Mapping[str, Mapping[str, Any]]  # by question, each of the form that SHAPES says
    wrong: tuple[tuple[str, str], ...] = ()  # question, and what is wrong with the answer
    unanswered: tuple[str, ...] = ()
    clock_offset_s: float | None = None  # the host's clock minus this machine's
    clock_error_s: float = 0.0  # half of the shortest round trip
    reach: tuple[str, ...] | None = None  # for each candidate: empty, or why it was not reached


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """All hosts, and where rank 0 could be reached. Not tried: `candidates` is empty."""

    hosts: tuple[HostFacts, ...]
    port: int
    is_port_fixed: bool
    candidates: tuple[str, ...]
    listening_problem: str
    timeout_s: float
    took_s: float

    @property
    def reach(self) -> dict[int, tuple[str, ...]]:
        """For each node that was asked, and each candidate: empty, or why it was not reached."""
        return {host.node_rank: host.reach for host in self.hosts if host.reach is not None}

    def name_of(self, node_rank: int) -> str:
        return next(host.name for host in self.hosts if host.node_rank == node_rank)


def read_answer(question: str, facts: object) -> tuple[dict[str, Any] | None, str]:
    """The answer in its form, or None and what is wrong with it."""
    shape = SHAPES.get(question)
    if not isinstance(facts, dict) or shape is None:
        return None, f"{clean(repr(facts))} is no answer"
    if "error" in facts:
        return None, clean(str(facts["error"])) or "it failed"
    found: dict[str, Any] = {}
    for name, kind in shape.items():
        value = facts.get(name)
        if kind is float and isinstance(value, int | float) and math.isfinite(value):
            found[name] = float(value)
        elif kind is list and isinstance(value, list):
            found[name] = [clean(str(one)) for one in value[:64]]
        elif kind is str and isinstance(value, str):
            found[name] = clean(value)
        elif kind is int and isinstance(value, int):
            found[name] = value
        else:
            return None, f"{name} is {clean(repr(value))}"
    return found, ""


def clean(text: str) -> str:
    """A fact, which is short."""
    return cleaned(text, MAX_TEXT)
