"""The memory of a rank over a run, on its device and in host memory: which storage is alive when, by kind."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from .storages import StorageRecord

BLOCK = 512  # bytes: torch's allocator on a GPU gives out multiples of it
DEVICE, HOST, PINNED = "device", "host", "pinned"
ALL_HOST = "all host"  # host memory, pinned and not, at the same moment
PLACES = (DEVICE, HOST, PINNED, ALL_HOST)
PARAMETERS, GATHERED = "parameters", "gathered parameters"
GRADIENTS, STATES, COMMUNICATION = "gradients", "masters and optimizer states", "communication"
STEP, ACTIVATIONS, PROGRAM = "temporaries of the step", "activations", "of the program"
KEPT = "kept for the next use"  # pinned pages
CHECKPOINT = "of a checkpoint, on its way"
KINDS = (PARAMETERS, GATHERED, GRADIENTS, STATES, COMMUNICATION, STEP, ACTIVATIONS, PROGRAM, CHECKPOINT, KEPT)

_RUNTIME = str(Path(__file__).parents[1]) + "/"
_TORCH = str(Path(torch.__file__).parent)
# Part of a file's name below runtime/ -> what it allocates. Those with None do so for their callers.
_SITES: tuple[tuple[str, str | None], ...] = (
    ("plan/", None),
    ("zero/parameters/flat_buffer.py", None),
    ("offload/", None),
    ("zero/parameters/param_shard.py:take_over", PARAMETERS),
    ("zero/parameters/param_shard.py", GATHERED),
    ("zero/units/optimizer_shard.py", STATES),
    ("zero/gradients/", GRADIENTS),
    ("zero/access/", GATHERED),
    ("zero/units/", PARAMETERS),
    ("zero/", PARAMETERS),
    ("optimizers/", STATES),
    ("step/torch_optimizer_rule.py", STATES),
    ("step/stand_in.py", STATES),
    ("step/device_turn.py:_send", STATES),
    ("comm/", COMMUNICATION),
    ("checkpoint/", CHECKPOINT),
    ("step/", STEP),
    ("engine/optimizer_step.py", STEP),
    ("engine/components.py", PARAMETERS),
    ("engine/make_engine.py", PARAMETERS),
)


@dataclass(slots=True, eq=False)
class Life:
    """One storage from its allocation to its end."""

    place: str  # DEVICE, HOST or PINNED
    kind: str
    nbytes: int
    phase: int
    born: int  # clock of the allocation: operations so far
    died: int | None = None


@dataclass(slots=True)
class Moment:
    """The largest amount of memory in a phase, and what it consists of."""

    nbytes: int = 0
    clock: int = 0
    module: Any = None  # that ran then


@dataclass(slots=True)
class RehearsedPhase:
    """A stretch of the run; its name is what a table says."""

    name: str
    begin: int
    peaks: dict[str, Moment] = field(default_factory=dict)


class RunMemory:
    """All storages of one run."""

    def __init__(self) -> None:
        self.clock = 0
        self.lives: list[Life] = []
        self.now: Counter[str] = Counter()
        self.phases = [RehearsedPhase("start", 0)]
        self._alive: dict[StorageRecord, Life] = {}
        self._gpu_peak = 0
        self.is_training = False  # an engine has been used

    def begin(self, name: str) -> None:
        """Begin a phase, or go on with the one that has this name."""
        if self.phases[-1].name == name:
            return
        phase = RehearsedPhase(name, self.clock)
        self.phases.append(phase)
        for place in PLACES:
            phase.peaks[place] = Moment(self.now[place], self.clock)

    def born(self, record: StorageRecord) -> None:
        """Note an allocation."""
        place = _place_of(record)
        if place is None or not record.nbytes:
            return
        nbytes = _taken(record, place)
        kind = kind_of(sys._getframe(2))
        if kind == ACTIVATIONS and not self.is_training:
            kind = PROGRAM
        life = Life(place, kind, nbytes, len(self.phases) - 1, self.clock)
        self._alive[record] = life
        self.lives.append(life)
        for counted in _counted_in(place):
            self.now[counted] += nbytes
            moment = self.phases[-1].peaks.setdefault(counted, Moment())
            if self.now[counted] > moment.nbytes:
                moment.nbytes, moment.clock = self.now[counted], self.clock
                moment.module = _running_module(sys._getframe(2))
        self._gpu_peak = max(self._gpu_peak, self.now[DEVICE])

    def name_modules(self, names: dict[int, str]) -> None:
        """Replace the modules that ran at the peaks by their names, by id."""
        for phase in self.phases:
            for moment in phase.peaks.values():
                if moment.module is not None and not isinstance(moment.module, str):
                    moment.module = names.get(id(moment.module), type(moment.module).__name__)

    def died(self, record: StorageRecord) -> None:
        """Note its end."""
        life = self._alive.pop(record, None)
        if life is not None:
            life.died = self.clock
            for counted in _counted_in(life.place):
                self.now[counted] -= life.nbytes

    def tell(self, record: StorageRecord, kind: str) -> None:
        """Say what a storage that is alive is for."""
        life = self._alive.get(record)
        if life is not None:
            life.kind = kind

    def tick(self) -> None:
        """Note that an operation was done."""
        self.clock += 1

    def allocated(self) -> int:
        """Return the bytes on the device now."""
        return self.now[DEVICE]

    def peak(self) -> int:
        """Return the most bytes on the device since the last reset."""
        return self._gpu_peak

    def reset_peak(self) -> None:
        """Begin the peak anew."""
        self._gpu_peak = self.now[DEVICE]

    def at(self, clock: int, place: str) -> Counter[str]:
        """Return the bytes by kind that are alive just after the operations up to `clock`."""
        found: Counter[str] = Counter()
        for life in self.lives:
            is_alive = life.born <= clock and (life.died is None or life.died > clock)
            if is_alive and place in _counted_in(life.place):
                found[life.kind] += life.nbytes
        return found

    def curve(self, place: str, *, num_points: int) -> list[tuple[int, dict[str, int]]]:
        """Return the bytes by kind over the run, at the largest moment of each of so many stretches."""
        changes: list[tuple[int, int, str]] = []
        for life in self.lives:
            if place in _counted_in(life.place):
                changes.append((life.born, life.nbytes, life.kind))
                if life.died is not None:
                    changes.append((life.died, -life.nbytes, life.kind))
        changes.sort(key=lambda one: (one[0], -one[1]))
        now: Counter[str] = Counter()
        points: list[tuple[int, dict[str, int]]] = []
        width, total, best = max(1, -(-self.clock // num_points)), 0, -1
        stretch = 0
        for clock, nbytes, kind in changes:
            if clock // width != stretch:
                stretch, best = clock // width, -1
            now[kind] += nbytes
            total += nbytes
            if total > best:
                point = (clock, {name: value for name, value in now.items() if value})
                if best < 0:
                    points.append(point)
                points[-1], best = point, total
        return points


def _taken(record: StorageRecord, place: str) -> int:
    """Return what the allocator takes: on a GPU whole blocks, of pinned memory a power of two."""
    if record.taken_bytes is not None:
        return record.taken_bytes
    if place == DEVICE:
        return -(-record.nbytes // BLOCK) * BLOCK
    return 1 << (record.nbytes - 1).bit_length() if place == PINNED else record.nbytes


def _place_of(record: StorageRecord) -> str | None:
    if record.device.type == "meta":
        return None
    if record.device.type == "cpu":
        return PINNED if record.is_pinned else HOST
    return DEVICE


def _counted_in(place: str) -> tuple[str, ...]:
    """Return the places whose bytes a storage in one place adds to."""
    return (place,) if place == DEVICE else (place, ALL_HOST)


def kind_of(frame: FrameType | None) -> str:
    """Return what is allocated, by the innermost file of the runtime that is known to allocate something."""
    while frame is not None:
        code = frame.f_code
        kind = _kind_in(code.co_filename, code.co_name)
        if kind is not None:
            return kind
        frame = frame.f_back
    return ACTIVATIONS


@functools.cache  # asked for each frame below each allocation
def _kind_in(file: str, name: str) -> str | None:
    """Return what a function of this file allocates; None where it does so for its caller."""
    if not file.startswith(_RUNTIME):
        return None if file.startswith((_TORCH, "<")) else ACTIVATIONS
    below = file[len(_RUNTIME) :]
    for part, kind in _SITES:
        path, _, function = part.partition(":")
        if below.startswith(path) and function in ("", name):
            return kind
    return ACTIVATIONS


def _running_module(frame: FrameType | None) -> Any:
    """Return the innermost module whose forward runs, None outside of all."""
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None
