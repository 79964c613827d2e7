"""The hosts beside those of a running job: which the hostfile names now, and which of them could be used.

A thread of its own reads the hostfile when it changes and tries hosts now and then; its results can be read
at any time, without waiting.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..backends.choose import direct_connect
from ..backends.refused_before import RefusedBefore
from ..errors import LaunchError
from ..fleet.trial import ANSWER_TIMEOUT_S, Trial, try_hosts
from ..inputs.host import MAX_SLOTS, Host
from ..inputs.hostfile import read_hostfile
from ..inputs.selection import Selected
from ..job.resize import HostsNow, ResizeRules, resize
from ..job.restart import Attempt
from ..job.verdict import Verdict
from ..options import Options
from ..output.console import Console
from .host_pool import hostfile_path, nodes_of, select_hosts

LOOK_EVERY_S = 1.0
TRY_AGAIN_S = 2.0  # after the first failure; each further one doubles it
LONGEST_S = 60.0
_NEW = "is new in the hostfile"


@dataclass(slots=True)
class _Candidate:
    """A host that might take part. Times are on the monotonic clock."""

    word: str  # the word for it once it can be used
    is_good: bool = False  # it was tried, and can be used
    is_spare: bool = False  # it was not tried, and no fault of it is known
    must_go_first: bool = False  # it counts again only after it was away, or when it has started anew
    is_said: bool = False  # the reason against it was reported
    machine: str = ""
    try_at: float = 0.0
    wait_s: float = 0.0  # pause before the last try


class Hosts:
    """The hosts of one job with all its attempts."""

    def __init__(
        self,
        options: Options,
        first: Attempt,
        console: Console,
        refused: RefusedBefore | None = None,
    ) -> None:
        """`refused`: as for backends.choose.choose_access."""
        self._options, self._console, self._refused = options, console, refused
        wanted = options.num_nodes if options.num_nodes > 0 else options.restart.max_nodes
        self.rules = ResizeRules(options.restart, options.mesh, wanted or len(first.hosts))
        self._path = hostfile_path(options)
        self._pool = first.hosts + first.spares
        self._candidates = {one.host.name: _Candidate("is a spare", is_spare=True) for one in first.spares}
        self._attempt = first
        self._signature: object = None
        self._seen: object = None  # at the last look
        self._problem = ""
        self._leaving: dict[str, str] = {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        if self._path is not None:
            self._signature = self._seen = _signature_of(self._path)
            self._read(self._path, word="is there", are_spares=False)

    def begin(self, attempt: Attempt) -> None:
        """Begin an attempt with these hosts and spares."""
        with self._lock:
            self._attempt = attempt
            self._leaving = {}
            taking_part = {one.host.name for one in attempt.hosts}
            for one in self._pool:
                name = one.host.name
                if name in taking_part:
                    self._candidates.pop(name, None)
                else:
                    self._candidates.setdefault(name, _Candidate("is back"))
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(self._is_over,), name="hosts", daemon=True)
        self._thread.start()

    def leave_out(self, unfit: Iterable[str]) -> None:
        """Leave out hosts that a look before the start found unfit: they count again after they were away."""
        with self._lock:
            for name in unfit:
                self._candidates[name] = _Candidate("is back", must_go_first=True)

    def end(self, verdict: Verdict | None) -> None:
        """End the attempt: take note of its hosts, and try no host any more."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(LONGEST_S)
        if verdict is None:
            return
        with self._lock:
            self._leaving = dict(verdict.leaving)
            for name, why in verdict.leaving.items():
                is_signal = why.startswith("its agent got")
                self._candidates[name] = _Candidate("is back", must_go_first=is_signal)
            # a host that had joined and made the attempt fail would do so again
            if verdict.culprit is not None:
                for name in self._attempt.joined:
                    self._candidates[name] = _Candidate("is back", must_go_first=True)

    def known(self) -> HostsNow:
        """Return what is known now, also between attempts."""
        with self._lock:
            return self._known(self._leaving)

    def why_change(self, leaving: Mapping[str, str]) -> str:
        """Return why the job should have other hosts: see controller/resizing.py."""
        with self._lock:
            self._leaving = dict(leaving)
            decision = resize(self._attempt, self._known(leaving), self.rules)
            return "" if decision is None else decision.why

    def _known(self, leaving: Mapping[str, str]) -> HostsNow:
        names = {one.host.name for one in self._pool}
        taking_part = {one.host.name for one in self._attempt.hosts}
        going = {
            one.host.name: "is no longer in the hostfile"
            for one in self._attempt.hosts
            if one.host.name not in names
        } | {name: f"was told to go ({why})" for name, why in leaving.items() if name in taking_part}
        others = [one for one in self._pool if one.host.name not in taking_part and one.devices]
        coming = tuple(one for one in others if self._is_good(one.host.name))
        spares = tuple(one for one in others if self._is_spare(one.host.name))
        return HostsNow(going, coming, spares, {name: one.word for name, one in self._candidates.items()})

    def _is_good(self, name: str) -> bool:
        candidate = self._candidates.get(name)
        return candidate is not None and candidate.is_good

    def _is_spare(self, name: str) -> bool:
        candidate = self._candidates.get(name)
        return candidate is not None and candidate.is_spare and not candidate.is_good

    # The thread.

    def _run(self, is_over: threading.Event) -> None:
        while not is_over.wait(LOOK_EVERY_S):
            self._look_at_hostfile()
            due = self._due()
            if due:
                self._try(due, is_over)

    def _look_at_hostfile(self) -> None:
        """Read it if it has changed and stayed the same for two looks: an editor may be writing it."""
        if self._path is None:
            return
        signature = _signature_of(self._path)
        is_still, self._seen = signature == self._seen, signature
        if not is_still or signature == self._signature:
            return
        self._signature = signature
        self._read(self._path, word=_NEW, are_spares=True)

    def _read(self, path: Path, *, word: str, are_spares: bool) -> None:
        """Take the hosts that the file names now; new ones are reported with `word`."""
        try:
            hosts = read_hostfile(path)
            selected = self._select(hosts)
        except LaunchError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                self._console.warn(f"the hostfile has changed, and is not used as it is now: {error}")
            return
        self._problem = ""
        with self._lock:
            old = {one.host.name: one for one in self._pool}
            for one in selected:
                if one.host.name not in old:
                    self._candidates[one.host.name] = _Candidate(word, is_spare=are_spares)
            self._pool = tuple(
                old.get(one.host.name, one) if one.host.slots is None else one for one in selected
            )

    def _select(self, hosts: tuple[Host, ...]) -> tuple[Selected, ...]:
        """Select as for the first attempt; a host that counts its slots itself has none before a try."""
        counted = tuple(host if host.slots is not None else host._replace(slots=MAX_SLOTS) for host in hosts)
        own = {host.name: host for host in hosts}
        chosen = select_hosts(counted, self._options._replace(num_nodes=-1))
        return tuple(
            one if own[one.host.name].slots is not None else Selected(own[one.host.name], ())
            for one in chosen
        )

    def _due(self) -> tuple[Selected, ...]:
        """Return the hosts to be tried now, only such as would be used."""
        now = time.monotonic()
        with self._lock:
            taking_part = {one.host.name for one in self._attempt.hosts}
            num_left = sum(name not in self._leaving for name in taking_part)
            others = [one for one in self._pool if one.host.name not in taking_part]
            num_good = sum(self._is_good(one.host.name) for one in others)
            if num_left + num_good >= self.rules.wanted:
                return ()
            return tuple(
                one
                for one in others
                if not self._is_good(one.host.name) and self._candidates[one.host.name].try_at <= now
            )

    def _try(self, due: tuple[Selected, ...], is_over: threading.Event) -> None:
        try:
            nodes = nodes_of(tuple((one, len(one.devices)) for one in due), self._options)
            connect = direct_connect(self._options, nodes, say=lambda line: None, refused=self._refused)
            trials = try_hosts(
                nodes,
                connect,
                self._options.elastic,
                is_over=is_over.is_set,
                timeout_s=self._options.ssh.all_steps_s(ANSWER_TIMEOUT_S),
            )
        except LaunchError as error:
            trials = {place: Trial(None, str(error)) for place in range(len(due))}
        now = time.monotonic()
        with self._lock:
            for place, trial in trials.items():
                self._take(due[place], trial, now)

    def _take(self, one: Selected, trial: Trial, now: float) -> None:
        name = one.host.name
        candidate = self._candidates.get(name)
        if candidate is None:
            return
        machine = trial.hello.machine if trial.hello is not None else ""
        if trial.hello is None or (candidate.machine and machine != candidate.machine):
            candidate.must_go_first = False  # the host was away, or is another machine now
        candidate.machine = machine or candidate.machine
        candidate.is_spare = False
        candidate.is_good = trial.is_good and not candidate.must_go_first
        if trial.why_not and candidate.word == _NEW and not candidate.is_said:  # perhaps it is misspelt
            candidate.is_said = True
            why = trial.why_not
            self._console.warn(
                f"{name} is new in the hostfile, and cannot be used yet: {why}; it is tried again"
            )
        candidate.wait_s = min(LONGEST_S, max(TRY_AGAIN_S, 2 * candidate.wait_s))
        candidate.try_at = now + candidate.wait_s
        if candidate.is_good and one.host.slots is None and trial.hello is not None:
            slots = min(trial.hello.num_devices or max(1, self._options.num_gpus), MAX_SLOTS)
            (counted,) = select_hosts(
                (one.host._replace(slots=slots),),
                self._options._replace(include="", exclude="", num_nodes=-1),
            )
            self._pool = tuple(counted if other.host.name == name else other for other in self._pool)


def watch_hosts(options: Options, first: Attempt, console: Console, refused: RefusedBefore) -> Hosts | None:
    """Watch the hosts of an elastic job; None for another one."""
    return Hosts(options, first, console, refused) if options.elastic.is_on else None


def _signature_of(path: Path) -> object:
    try:
        found = path.stat()
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_size, found.st_ino
