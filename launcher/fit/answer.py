"""The answer of a rehearsal: what a rank holds, computes and sends, read from the JSON of runtime/plan.

Units: bytes; `clock` counts operations of the run
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..job.mesh import HostSlots, JobMesh

DEVICE, HOST, PINNED = "device", "host", "pinned"
ALL_HOST = "all host"  # host memory, pinned and not, at the same moment
PLACES = (DEVICE, HOST, PINNED, ALL_HOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most memory of one place in one phase, by kind."""

    num_bytes: int = 0
    kinds: tuple[tuple[str, int], ...] = ()
    module: str = ""  # the module that ran then; empty outside of all


NO_PEAK = Peak()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPhase:
    """A phase of the run, such as "step 1: backward"."""

    name: str
    clock: int
    peaks: tuple[tuple[str, Peak], ...]  # a peak for each place

    def peak(self, place: str) -> Peak:
        """Return the peak in one of PLACES."""
        return dict(self.peaks).get(place, NO_PEAK)

    @property
    def host_bytes(self) -> int:
        """Return the most host memory, pinned and not, at one moment of the phase."""
        return self.peak(ALL_HOST).num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SentBytes:
    """Bytes that a rank sends in one step along one axis."""

    axis: str
    ranks: tuple[int, ...]  # those of the group; empty for all ranks of the job
    kinds: tuple[tuple[str, int], ...]  # bytes for each collective
    number: tuple[tuple[str, int], ...] = ()  # number of messages, by collective
    update_kinds: tuple[tuple[str, int], ...] = ()  # bytes of the optimizer step alone, by collective

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all collectives."""
        return sum(num_bytes for _, num_bytes in self.kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """Operations of one dtype with about as many flops for each byte that they move."""

    dtype: str
    flops: int  # multiplications and additions
    moved_bytes: int
    num_kernels: int
    is_update: bool = False  # in the optimizer step, and not in forward and backward


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Work of a rank from one optimizer step to the next."""

    on_device: tuple[DeviceWork, ...]
    host_bytes: int
    copied_bytes: tuple[tuple[str, int], ...]
    sent: tuple[SentBytes, ...]
    update_copied_bytes: tuple[tuple[str, int], ...] = ()  # copies that are part of the optimizer step


class RehearsalProblem(NamedTuple):
    """A line of the program that cannot be rehearsed; `is_in_runs`: a run with values comes to it, too.

    `exit_code`: that of a program that ends by itself with another one than 0
    """

    line: str
    why: str
    is_in_runs: bool = False
    exit_code: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The result of the rehearsal of one rank."""

    problem: RehearsalProblem | None
    guesses: tuple[tuple[str, str], ...]  # the program's line, and what was guessed there
    num_steps: int
    stretches: tuple[RunPhase, ...]
    curve: tuple[tuple[int, tuple[tuple[str, int], ...]], ...]  # clock, and bytes on the device by kind
    steps: tuple[StepWork, ...]
    file_bytes: tuple[tuple[str, int], ...]  # "offloaded", and "checkpoint": of one save
    model: tuple[tuple[str, int], ...]
    writes_files: str = ""  # why the program's files were written; empty if they were not
    mesh: JobMesh | None = None  # along which the program divides its ranks; None: it ended before
    # What this rank's stages of a pipeline tell those of others, by runtime/plan/stages.py, in any form
    told: Mapping[str, Any] = field(default_factory=dict)
    waits_for: str = ""  # the key of what another rank has to tell first, where it has ended for that

    def worst(self, place: str) -> RunPhase | None:
        """Return the phase with the highest peak in one place, None if nothing was ever there."""
        found = max(self.stretches, key=lambda one: one.peak(place).num_bytes, default=None)
        return found if found is not None and found.peak(place).num_bytes else None

    @property
    def host_bytes(self) -> int:
        """Return the most host memory of the rank's tensors, pinned and not."""
        return max((one.host_bytes for one in self.stretches), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """A kind of rank with its answer."""

    rank: int  # the one that was rehearsed
    place: str  # along --mesh; empty where all ranks are alike
    alike: tuple[int, ...]  # the ranks that it stands for, itself among them
    answer: Answer

    @property
    def name(self) -> str:
        """Return the rank for messages: "rank 2 (stage 1 of 2)"."""
        return f"rank {self.rank}" + (f" ({self.place})" if self.place else "")


def crosses(ranks: Sequence[int], hosts: Sequence[HostSlots]) -> bool:
    """Tell whether ranks of a group, or with no ranks named all of the job, are on several hosts."""
    if not ranks:
        return len(hosts) > 1
    host_of = [place for place, host in enumerate(hosts) for _ in range(host.num_ranks)]
    return len({host_of[rank] for rank in ranks}) > 1


def read_answer(given: Mapping[str, Any]) -> Answer:
    """Return the answer as records."""
    problem = given["problem"]
    return Answer(
        problem=None if problem is None else RehearsalProblem(**problem),
        guesses=tuple((one["line"], one["what"]) for one in given["guesses"]),
        num_steps=given["num_steps"],
        stretches=tuple(_stretch(one) for one in given["phases"]),
        curve=tuple((one["clock"], _pairs(one["bytes"])) for one in given["curve"]),
        steps=tuple(_work(one) for one in given["steps"]),
        file_bytes=_pairs(given["file_bytes"]),
        model=_pairs(given["model"]),
        writes_files=given.get("writes_files", ""),
        mesh=_mesh(given["mesh"]) if given.get("mesh") else None,
        told=given.get("told", {}),
        waits_for=given.get("waits_for", ""),
    )


def _mesh(given: Mapping[str, Any]) -> JobMesh:
    return JobMesh(**{**given, "order": tuple(given["order"])})


def _stretch(given: Mapping[str, Any]) -> RunPhase:
    peaks = tuple(
        (place, Peak(num_bytes=one["bytes"], kinds=_pairs(one["kinds"]), module=one["module"]))
        for place, one in given["peaks"].items()
    )
    return RunPhase(name=given["name"], clock=given["clock"], peaks=peaks)


def _work(given: Mapping[str, Any]) -> StepWork:
    return StepWork(
        on_device=tuple(
            DeviceWork(
                dtype=one["dtype"],
                flops=one["flops"],
                moved_bytes=one["moved_bytes"],
                num_kernels=one["number"],
                is_update=one["is_update"],
            )
            for one in given["on_device"]
        ),
        host_bytes=given["host_bytes"],
        copied_bytes=_pairs(given["copied_bytes"]),
        update_copied_bytes=_pairs(given["update_copied_bytes"]),
        sent=tuple(
            SentBytes(
                axis=one["axis"],
                ranks=tuple(one["ranks"]),
                kinds=_pairs(one["bytes"]),
                number=_pairs(one["number"]),
                update_kinds=_pairs(one["update_bytes"]),
            )
            for one in given["sent"]
        ),
    )


def _pairs(given: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    return tuple(given.items())
