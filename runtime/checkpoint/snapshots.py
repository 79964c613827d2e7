"""Snapshots of a training: checkpoints in the memory of the hosts, for a job that starts again.

A snapshot is written from where values lie straight into the memory that the hosts' agents hold, without a
copy in between. What the program may change at any time is written at once, the rest while the next forward
and backward run; code that is about to change values waits for what is left of that. Then the agents send the
copies for other hosts. One snapshot is under way at most: one that is due meanwhile begins when that has
ended.

Nothing is sent to agree on a snapshot in a step in which none begins: steps are counted, and what ranks must
tell each other goes with the norm of the gradients.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..comm.captures import ignore_captures
from ..comm.process_group import group_device
from ..comm.rank_group import Job
from ..environment import SnapshotSettings
from ..errors import CheckpointError
from .background import yield_to_training
from .storage.agent_memory import AgentMemory, Surroundings
from .storage.memory_store import MemoryStore

if TYPE_CHECKING:  # see runtime/engine/checkpoints.py
    from .files.writer import Written
    from .save import PreparedSave
    from .training_state import Training

_FREE, _DUE = 1, 2  # bits of a vote
_log = logging.getLogger("dslaunch")


@dataclass(slots=True)
class _UnderWay:
    """A snapshot that is being written."""

    prepared: PreparedSave
    step: int
    thread: threading.Thread = field(default_factory=threading.Thread)
    is_copied: threading.Event = field(default_factory=threading.Event)
    waited_s: float = 0.0  # time that training has waited for it
    problem: str = ""


class _Trainings:
    """Names of the trainings of this process: engines that train are made in the same order on all ranks."""

    def __init__(self) -> None:
        self._number = 0

    @property
    def following(self) -> str:
        """Return the name of the next one."""
        return f"t{self._number}"

    def take(self) -> str:
        """Return the name of a new one."""
        name = self.following
        self._number += 1
        return name


_TRAININGS = _Trainings()


class FoundSnapshot(NamedTuple):
    """A whole snapshot in memory, and what it keeps beside the training."""

    tag: str
    step: int
    kept: Mapping[str, Any]


def find_snapshots(memory: MemoryStore, folder: str) -> list[FoundSnapshot]:
    """Return the snapshots of the training that has to do with this folder, the newest first; empty: of that
    which has this one's number.

    A program that leaves out a training that it has done gives its number to the next one, so a snapshot that
    names other folders is another training's. `memory` shows what it has seen.
    """
    own: list[FoundSnapshot] = []
    others: list[FoundSnapshot] = []
    refused: list[Sequence[str]] = []
    for tag in reversed(memory.tags_of_all()):
        is_own = tag.startswith(f"{memory.training}-")
        if not (is_own or folder):
            continue
        try:
            found = _read(memory, tag)
        except (CheckpointError, OSError) as error:
            if is_own and not own:  # else nothing is lost by it
                hosts = "".join(f"; {name}: {why}" for name, why in memory.unreachable.items())
                _log.warning("a snapshot is not whole: %s%s", error, hosts)
            continue
        folders = found.kept.get("folders") or ()
        if folder in folders or (is_own and not (folder and folders)):
            (own if is_own else others).append(found)
        elif is_own:
            refused.append(folders)
    if refused and not own and not others:
        _log.warning(
            "the snapshots in memory are not taken: they are of a training in %s, and this one is in %s",
            ", ".join(refused[0]),
            folder,
        )
    return own or others


def _read(memory: MemoryStore, tag: str) -> FoundSnapshot:
    from .files.reader import CheckpointReader  # at need: see runtime/engine/checkpoints.py

    reader = CheckpointReader(memory, tag)
    return FoundSnapshot(tag, reader.manifest.global_steps, reader.training()["client_state"])


def name_of_folder(folder: str | os.PathLike[str]) -> str:
    """Return the name by which snapshots know a folder, or a URL."""
    text = os.fspath(folder)
    return text if "://" in text else os.path.abspath(text)


def newest_state(settings: SnapshotSettings, folder: str) -> tuple[str, dict[str, Any]] | None:
    """Return the tag of the newest snapshot of the training that this process begins next, and the program's
    own part of it; None if there is none. `folder` is where that training saves.

    Errors: OSError, CheckpointError
    """
    memory = AgentMemory(settings.memory)
    try:
        store = MemoryStore(memory, _TRAININGS.following)
        store.look()
        found = find_snapshots(store, name_of_folder(folder))
        return (found[0].tag, dict(found[0].kept.get("program") or {})) if found else None
    finally:
        memory.close()


class Snapshots:
    """Snapshots of one engine."""

    def __init__(self, job: Job, settings: SnapshotSettings) -> None:
        self._job, self._settings = job, settings
        self.store = MemoryStore(AgentMemory(settings.memory), _TRAININGS.take())
        self._current: _UnderWay | None = None
        self._count = 0
        self._is_free, self._is_due = True, False  # as the ranks have agreed in this step
        self._is_late = False  # one was due while another was under way
        self._last_at = time.monotonic()
        self._has_room: bool | None = None  # None: not known yet
        self._told_of_copy = ""
        self._superseded: list[str] = []  # snapshots under an earlier number of this training
        self.state: Callable[[], Mapping[str, Any]] | None = None  # returns the program's own part
        self.folders: set[str] = set()  # names of the folders that the program loads from and saves in
        self.has_given_state = False  # the program gave a client_state to a save, or gets one from a load
        self.is_held_back = False  # a trainer says itself when its step has ended
        self.is_resumed_from = False  # the program calls resume()
        self.may_be_loaded = False  # it calls load_checkpoint() so that a snapshot may take its place
        self._is_leaving_refused = False  # a snapshot of all could not be copied: the disk is waited for
        self._has_copy = False  # the last snapshot is on another host, too
        self.num_taken = 0
        self.waited_s = 0.0  # time that training has waited for all of them
        self.last_step: int | None = None  # step of the last one that is whole

    @property
    def attempt(self) -> int:
        """Return how often the job has been started before."""
        return self._settings.attempt

    @property
    def is_counted_on(self) -> bool:
        """Tell whether the program would go on from a snapshot, if the job started again."""
        if self._is_leaving_refused or self._has_room is False:
            return False
        is_loaded = self.may_be_loaded and not self.has_given_state
        return self.is_held_back or self.is_resumed_from or is_loaded

    # ---- what ranks agree on in a step

    @property
    def vote(self) -> float:
        """Return this rank's number for a step: whether the last snapshot has ended, and whether one is
        due.
        """
        current = self._current
        is_free = current is None or not current.thread.is_alive()
        seconds = self._settings.seconds
        is_due = seconds is not None and time.monotonic() - self._last_at >= seconds
        return float(_FREE * is_free + _DUE * is_due)

    def settle(self, votes: Sequence[float]) -> None:
        """Take the votes of all ranks; rank 0's clock counts."""
        self._is_free = all(int(vote) & _FREE for vote in votes)
        self._is_due = bool(int(votes[0]) & _DUE)

    def is_due(self, step: int) -> bool:
        """Tell whether a snapshot begins after this step; one that has to wait is due after the next, too."""
        every = self._settings.steps
        is_due = self._is_due if every is None else step % every == 0 or self._is_late
        self._is_late = is_due and not self._is_free
        return is_due and self._is_free and self._has_room is not False

    # ---- one snapshot

    def take(self, training: Training) -> None:
        """Begin a snapshot of the step that has ended.

        Order:  a collective
        Errors: CheckpointError, on every rank, if the hosts have no room for snapshots, or for what no
                checkpoint can hold
        """
        from .save import SaveOptions, prepare  # at need: see runtime/engine/checkpoints.py

        begun_at = time.perf_counter()
        self.wait()
        self._last_at, self._is_late = time.monotonic(), False
        step = training.progress.global_steps
        self._count += 1
        tag = f"{self.store.training}-{self._settings.attempt:05d}-{self._count:07d}-step{step}"
        given = {} if self.state is None else self.state()
        if not isinstance(given, Mapping):
            raise CheckpointError(
                f"the client_state function of resume() returned {given!r:.80}; it must return a dict of "
                "what a snapshot is to keep of the program"
            )
        kept = {
            "program": dict(given),
            "is_alone": not self.has_given_state,
            "folders": sorted(self.folders),
        }
        prepared = prepare(training, self.store, tag, kept, SaveOptions(save_latest=False))
        prepared = replace(prepared, keep_last=None)
        if self._has_room is None and not self._find_room(prepared):
            return
        current = self._current = _UnderWay(prepared, step)
        at_once, later = split(prepared)
        written, problem = prepared.told(self._write, at_once, 1)
        here = _beside_device(training)
        # No daemon: an interpreter that ends waits for it.
        current.thread = threading.Thread(
            target=self._run, args=(current, later, written or [], problem, here), name="dslaunch-snapshot"
        )
        current.thread.start()
        current.waited_s = time.perf_counter() - begun_at

    def _write(self, prepared: PreparedSave, part: int) -> list[Written]:
        from .files.writer import write_runs  # at need: see runtime/engine/checkpoints.py

        prepared.store.begin(prepared.tag)
        return write_runs(prepared.store, prepared.tag, prepared.all_runs, rank=prepared.rank, part=part)

    def _run(
        self,
        current: _UnderWay,
        later: PreparedSave,
        written: list[Written],
        problem: str | None,
        here: AbstractContextManager[object],
    ) -> None:
        ignore_captures()
        prepared, memory = current.prepared, self.store.memory
        try:
            with prepared.notes:
                if problem is None:
                    with here:
                        more, problem = prepared.told(self._write, later, 0)
                    written += more or []
                current.is_copied.set()
                yield_to_training()
                if problem is None:
                    why_not, problem = prepared.told(memory.copied, prepared.tag)
                    self._has_copy = problem is None and not why_not
                    self._tell_of_copy(why_not or "")
                problem = prepared.finish(written, problem)
            if problem is None:
                self.store.keep(prepared.tag)
                for tag in self._superseded:
                    self.store.abandon(tag)
                self._superseded = []
                memory.copied(prepared.tag)  # rank 0 has written the manifest
            else:
                self.store.abandon(prepared.tag)
                current.problem = problem
        except (OSError, CheckpointError) as error:
            current.problem = f": {error}"
        finally:
            current.is_copied.set()

    def _tell_of_copy(self, why_not: str) -> None:
        if why_not and why_not != self._told_of_copy:
            _log.warning("snapshots of this host have no copy on another: %s", why_not)
            self._told_of_copy = why_not

    def note_load(self, tag: str, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Take note that training goes on from a snapshot; return the program's own part of it."""
        if tag.startswith(f"{self.store.training}-"):
            with suppress(OSError):
                self.store.keep(tag)
        else:
            training = tag.partition("-")[0]
            self._superseded = [one for one in self.store.tags_of_all() if one.startswith(f"{training}-")]
        return dict(kept.get("program") or {})

    def before_change(self) -> None:
        """Values are about to change: wait until a snapshot has them."""
        current = self._current
        if current is not None and not current.is_copied.is_set():
            begun_at = time.perf_counter()
            current.is_copied.wait()
            current.waited_s += time.perf_counter() - begun_at

    def wait(self) -> None:
        """Wait for the snapshot that is under way, if there is one; one that has failed is told of."""
        current, self._current = self._current, None
        if current is None:
            return
        begun_at = time.perf_counter()
        current.thread.join()
        self.waited_s += current.waited_s + time.perf_counter() - begun_at
        if not current.problem:
            self.num_taken += 1
            self.last_step = current.step
        elif self._job.is_first:
            last = "" if self.last_step is None else f"; that of step {self.last_step} is still there"
            _log.warning("the snapshot of step %d was not made%s%s", current.step, current.problem, last)

    def is_copied_everywhere(self) -> bool:
        """Wait for the snapshot that is under way; tell whether all ranks' parts of it are on two hosts.

        Order: a collective
        """
        step = None if self._current is None else self._current.step
        self.wait()
        is_safe = self._has_copy and step is not None and self.last_step == step and self._has_partner()
        everywhere = self._job.all_gather_numbers(
            [is_safe], device=group_device(), what="whether a snapshot is on two hosts"
        )
        is_safe = all(one for (one,) in everywhere)
        self._is_leaving_refused = not is_safe
        if not is_safe and self._job.is_first:
            _log.warning(
                "the hosts are to change, and a snapshot for that could not be put on two hosts; they change "
                "when the program has saved its next checkpoint"
            )
        return is_safe

    def _has_partner(self) -> bool:
        try:
            return bool(self.store.memory.surroundings().partner)
        except OSError:
            return False

    def close(self) -> None:
        """Wait for the snapshot that is under way, and hang up."""
        self.wait()
        self.store.memory.close()

    # ---- room

    def _find_room(self, prepared: PreparedSave) -> bool:
        """Check, before the first snapshot, that all hosts have memory for two generations, of their own and
        of copies.

        Order:  a collective
        Errors: CheckpointError, on every rank
        """
        from .files.writer import AROUND_BOX, box_bytes  # at need: see runtime/engine/checkpoints.py

        num_bytes = sum(one + AROUND_BOX for one in box_bytes(prepared.all_runs))
        around, problem = prepared.told(self.store.memory.surroundings)
        answers = self._job.all_gather_objects((around, num_bytes, problem), what="room for snapshots")
        why_not = next((theirs for _, _, theirs in answers if theirs is not None), None)
        if why_not is None:
            why_not = why_no_room([(place, count) for place, count, _ in answers])
        self._has_room = why_not is None
        if why_not is None:
            return True
        text = (
            f"no snapshots can be kept in memory{why_not}; leave out --snapshot_every, or give the hosts "
            "more memory"
        )
        if not self._settings.attempt:
            raise CheckpointError(text)
        if self._job.is_first:
            _log.warning("%s; the job goes on without them", text)
        return False


def why_no_room(places: Sequence[tuple[Surroundings, int]]) -> str | None:
    """Return which host has too little memory, from each rank's place and bytes; None if none has."""
    own: dict[str, int] = {}
    around = {place.name: place for place, _ in places}
    for place, num_bytes in places:
        own[place.name] = own.get(place.name, 0) + num_bytes
    for name, place in around.items():
        copied = [one.name for one in around.values() if one.partner == name and one.name != name]
        needed = 2 * (own[name] + sum(own[one] for one in copied))
        if place.free is not None and needed > place.free + place.held:
            copies = f" and of copies for {', '.join(copied)}" if copied else ""
            return (
                f": two generations of its own ranks{copies} are {_size(needed)}, and {name} has "
                f"{_size(place.free + place.held)} to give"
            )
    return None


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"


def split(prepared: PreparedSave) -> tuple[PreparedSave, PreparedSave]:
    """Part what is written: values that the program may change at any time, and the others."""
    parts = []
    for is_exposed in (True, False):
        all_runs = tuple(
            replace(one, runs=tuple(run for run in one.runs if (run.flat in one.exposed) is is_exposed))
            for one in prepared.all_runs
        )
        parts.append(replace(prepared, all_runs=all_runs))
    return parts[0], parts[1]


class _Beside:
    """On a GPU the values are copied as they are after all that was begun so far, in a stream beside the
    program's.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moment = torch.cuda.current_stream(device).record_event()
        self._stream: Any = None

    def __enter__(self) -> None:
        torch.cuda.set_device(self._device)  # a thread begins with the first GPU
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_event(self._moment)
        self._stream = torch.cuda.stream(stream)
        self._stream.__enter__()

    def __exit__(self, *of_error: Any) -> None:
        self._stream.__exit__(*of_error)


def _beside_device(training: Training) -> AbstractContextManager[object]:
    device = training.model.device
    return _Beside(device) if device.type == "cuda" else nullcontext()
