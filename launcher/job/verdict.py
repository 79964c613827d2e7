"""The end of a job: the rank or host that failed first, the reason, and the exit code that follows."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from ..errors import EXIT_CHANGE, EXIT_HOST
from ..inputs.host_list import folded
from ..inputs.rank_set import format_ranks
from ..wire.frames import Exited
from ..wording import cleaned

MAX_SENTENCE = 500  # characters
EXIT_HANG = 124  # that of timeout(1)
EXIT_TOO_EARLY = 1  # a job ends with it whose server ended with 0 before the trainers did


class RankFailure(NamedTuple):
    """A worker that did not exit with 0, or a server that ended before the trainers did. `at_s` is on the
    launcher's monotonic clock.

    The fields with defaults are its agent's findings, but for `role`, which is empty for a rank. Their names
    are keys of the report: docs/launch/failures.md.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    code: int  # 128 + n if signal n ended it
    signal: int
    at_s: float
    # The rank's place along the axes of the job, e.g. "stage 1 of 2, tp 0"; empty without axes
    place: str = ""
    core_dumped: bool = False
    is_out_of_memory: bool = False
    evidence: tuple[str, ...] = ()  # sentences on why it ended
    message: str = ""  # the message of the exception that torch's @record noted
    traceback: tuple[str, ...] = ()
    last_lines: tuple[str, ...] = ()
    last_lines_of: str = "stderr"  # "stdout" if the rank wrote nothing to stderr
    role: str = ""

    @property
    def worker(self) -> str:
        return self.role or f"rank {self.rank}"

    @property
    def name(self) -> str:
        return f"{self.worker} on {self.host}"

    def describe(self) -> str:
        how = f"was killed by {signal_name(self.signal)}" if self.signal else f"exited with code {self.code}"
        if self.role:
            too_early = "" if self.code else ", before the trainers did"
            return f"{self.name} (pid {self.pid}) {how}{too_early}"
        place = f"{self.place}; " if self.place else ""
        return f"{self.name} ({place}local rank {self.local_rank}, pid {self.pid}) {how}"

    @property
    def reason(self) -> str:
        """Return the reason that the rank wrote, the error of its traceback; empty if it wrote none."""
        if self.is_out_of_memory:
            return "out of memory"
        lines = (line.strip() for line in reversed(self.traceback or tuple(self.message.split("\n")[:1])))
        return next(filter(None, lines), "")


class HostFailure(NamedTuple):
    """A host that could not be used, or was lost. `at_s` is when the host was last heard of.

    `is_way_lost`: lost with the host through which it was reached, without a known fault of its own.
    """

    host: str
    message: str
    at_s: float
    exit_code: int = EXIT_HOST
    is_way_lost: bool = False

    @property
    def is_host_at_fault(self) -> bool:
        """Tell whether another host might do better; a missing script is missing everywhere."""
        return self.exit_code == EXIT_HOST and not self.is_way_lost

    @property
    def name(self) -> str:
        return self.host

    def describe(self) -> str:
        return f"{self.host}: {self.message}"


class HangFailure(NamedTuple):
    """A job that stood still for longer than --hang_limit allows. `at_s` is when it was given up.

    `rank` and its host are what the others wait for; None and empty if that is not known.
    """

    message: str
    at_s: float
    rank: int | None = None
    host: str = ""
    exit_code: int = EXIT_HANG

    @property
    def name(self) -> str:
        return "the job" if self.rank is None else f"rank {self.rank} on {self.host}"

    def describe(self) -> str:
        return f"{self.name} hangs: {self.message}"


class OutputFailure(NamedTuple):
    """Failure to write to our own stdout or stderr."""

    message: str
    at_s: float
    exit_code: int

    @property
    def name(self) -> str:
        return "the output"

    def describe(self) -> str:
        return self.message


class LauncherFailure(NamedTuple):
    """Failure of this machine, which stood still or lost its network: no host has a known fault."""

    message: str
    at_s: float
    exit_code: int = EXIT_HOST

    @property
    def name(self) -> str:
        return "this machine"

    def describe(self) -> str:
        return self.message


Failure = RankFailure | HostFailure | HangFailure | OutputFailure | LauncherFailure


class ServerEnd(NamedTuple):
    """One server of a job with roles, and how often it was started again."""

    role: str
    host: str
    restarts: int


class Verdict(NamedTuple):
    """The end of a job. `culprit` failed first; the other ranks failed before this was known, or were
    stopped.

    `likely_cause`: ranks that ended with 0 before the culprit failed, which most likely made it fail.
    `announced`: the failure that was named when the job was stopped; the culprit may have become known only
    later.
    """

    culprit: Failure | None
    others: tuple[Failure, ...]
    interrupted_by: int | None
    phases_s: tuple[tuple[str, float], ...]
    # Seconds from the start of all workers to the first failure; None if not all workers started.
    ran_s: float | None = None
    likely_cause: str = ""
    announced: str = ""
    change: str = ""  # why all workers were asked to end for a change of hosts, and did; empty otherwise
    leaving: Mapping[str, str] = MappingProxyType({})  # hosts that were told to go, each with the reason
    servers: tuple[ServerEnd, ...] = ()
    end_s: tuple[tuple[str, float], ...] = ()  # as phases_s, of the moments of an end by a failure
    has_trained: bool = False  # a rank has told of a step

    @property
    def correction(self) -> str:
        """Return a sentence that corrects the announced culprit; empty if it was right. In a job without SSH
        a host has two names.
        """
        if self.culprit is None or not self.announced:
            return ""
        name = self.culprit.name
        if self.announced in name or name in self.announced:
            return ""
        return f"{self.announced} was named when the job was stopped, but {name} had failed before"

    @property
    def text(self) -> str:
        """Describe the end of the attempt, in a sentence."""
        if self.culprit is not None:
            return sentence_on(self.culprit)
        if self.interrupted_by is not None:
            return f"interrupted by {signal_name(self.interrupted_by)}"
        return self.change or f"exit code {self.exit_code}"

    @property
    def exit_code(self) -> int:
        if self.interrupted_by is not None:
            return 128 + self.interrupted_by
        if isinstance(self.culprit, RankFailure):
            return self.culprit.code or EXIT_TOO_EARLY
        if self.culprit is None:
            return EXIT_CHANGE if self.change else 0
        return self.culprit.exit_code

    def to_dict(self) -> dict[str, Any]:
        servers = [one._asdict() for one in self.servers]
        return {
            "exit_code": self.exit_code,
            "text": self.text,
            "culprit": _to_dict(self.culprit) if self.culprit else None,
            "others": [_to_dict(one) for one in self.others],
            "interrupted_by": signal_name(self.interrupted_by) if self.interrupted_by else None,
            "phases_s": dict(self.phases_s),
            "end_s": dict(self.end_s),
            "change": self.change or None,
            **({"servers": servers} if servers else {}),
        }


def sentence_on(failure: Failure) -> str:
    """Describe who failed, how, and why as far as that is known, for events and reports."""
    reason = failure.reason if isinstance(failure, RankFailure) else ""
    return cleaned(f"{failure.describe()}{': ' if reason else ''}{reason}", MAX_SENTENCE)


def describe_all(failures: Sequence[Failure]) -> list[str]:
    """Return a sentence for each failure, in this order; hosts that failed for the same reason are in one
    sentence.

    Reasons are the same if they differ only in the host's name and in numbers; the sentence then has the
    first reason, with {host} for the name and a note on whose numbers are shown.
    """
    groups: dict[object, list[Failure]] = {}
    for place, one in enumerate(failures):
        key: object = place
        if isinstance(one, HostFailure):
            key = re.sub("[0-9]+", "0", _of_any_host(one.message, one.host)), one.exit_code
        groups.setdefault(key, []).append(one)
    return [_describe_group(group) for group in groups.values()]


def _describe_group(group: list[Failure]) -> str:
    first = group[0]
    if len(group) == 1 or not isinstance(first, HostFailure):
        return first.describe()
    reason = first.message.removeprefix(f"{first.host} ")  # the sentence begins with the host's name already
    reasons = {_of_any_host(one.message, one.host) for one in group if isinstance(one, HostFailure)}
    whose = "" if len(reasons) == 1 else f"; the numbers are those of {first.name}"
    return (
        f"{folded(one.name for one in group)}: {_of_any_host(reason, first.host)} ({len(group)} hosts{whose})"
    )


def _of_any_host(words: str, host: str) -> str:
    return re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "{host}", words) if host else words


def verdict_of(
    failures: list[Failure],
    *,
    stopped_at: float | None,
    interrupted_by: int | None,
    phases_s: dict[str, float],
    started_at: float | None = None,
    ended_well: Mapping[int, float] = MappingProxyType({}),
    announced: str = "",
) -> Verdict:
    """Return the verdict: the culprit is the earliest of the failures before all workers were told to stop.

    A host counts from when it was last heard of: a lost host makes ranks elsewhere fail long before it is
    known lost. `ended_well`: the time of the end of each rank that ended with 0. A rank that waits in vain
    for a rank that has ended fails; the verdict names the ended rank.
    """
    before_stop = [one for one in failures if stopped_at is None or one.at_s <= stopped_at]
    culprit = min(before_stop, key=lambda one: one.at_s, default=None)
    # A rank that fails after the order to stop was ended by it; a host that fails after the order is kept,
    # because processes may still run there.
    others = tuple(
        one for one in failures if one is not culprit and (one in before_stop or isinstance(one, HostFailure))
    )
    ended_at = culprit.at_s if culprit is not None else stopped_at
    verdict = Verdict(
        culprit=culprit,
        others=others,
        interrupted_by=interrupted_by,
        phases_s=tuple(phases_s.items()),
        ran_s=None if started_at is None or ended_at is None else max(0.0, ended_at - started_at),
        announced=announced,
    )
    return with_early_ends(verdict, ended_well, stopped_at=stopped_at)


# Words with which gloo, NCCL, torch's store and sockets report a peer that is gone or does not answer.
_LOST_PEER = re.compile(
    r"connection (?:was )?(?:likely )?(?:reset|closed|aborted|lost)(?: by (?:remote )?peer)?|broken "
    r"pipe|failed to recv"
    r"|remote (?:worker|process) [a-z]+|(?:collective operation|socket|wait|read) time ?(?:d "
    r")?out|timed out waiting",
    re.IGNORECASE,
)


def lost_peer(failure: RankFailure) -> str:
    """Return the words in a rank's last output that say that another rank is gone; empty without any."""
    said = (failure.message, *failure.traceback[-1:], *(() if failure.traceback else failure.last_lines))
    return next(filter(None, map(lost_peer_words, said)), "")


def lost_peer_words(text: str) -> str:
    """Return the words in a text that say that another rank is gone; empty if there are none."""
    found = _LOST_PEER.search(text)
    return found[0] if found else ""


def with_early_ends(
    verdict: Verdict, ended_well: Mapping[int, float], *, stopped_at: float | None
) -> Verdict:
    """Return the verdict with `likely_cause`, if the culprit failed because of ranks that had ended with 0.

    An end may be known a moment after the failure that it caused, because a process closes its connections
    before it ends.
    """
    culprit = verdict.culprit
    if not isinstance(culprit, RankFailure):
        return verdict
    words = lost_peer(culprit)
    until = stopped_at if words and stopped_at is not None else culprit.at_s
    left = {rank: at_s for rank, at_s in ended_well.items() if at_s < until}
    if not left:
        return verdict
    ranks = f"rank{'s' if len(left) > 1 else ''} {format_ranks(left)}"
    for_s = culprit.at_s - max(left.values())
    ended = (
        f"had ended with 0 before, the last {for_s:.1f} s before"
        if for_s >= 0
        else "had ended with 0 at the same moment"
    )
    evidence = (
        f"{ranks} {ended}: if rank {culprit.rank} still waited for {'them' if len(left) > 1 else 'it'}, the "
        "ranks had unequal numbers of batches, or left a loop at different steps"
    )
    cause = (
        f"{ranks} ended with code 0 before the job was done, and rank {culprit.rank} then failed with "
        f"{words!r}: that early "
    )
    return verdict._replace(
        culprit=culprit._replace(evidence=(*culprit.evidence, evidence)),
        likely_cause=f"{cause}end is the likely cause" if words else "",
    )


def rank_failure(
    exited: Exited,
    *,
    local_rank: int,
    host: str,
    pid: int,
    at_s: float,
    place: str = "",
    role: str = "",
) -> RankFailure:
    """Return an agent's report of a worker that failed. `place` is the rank's place as far as the launcher
    knows it; a place that the worker reported is preferred.
    """
    found = {name: _read(value) for name, value in exited.evidence.items() if _is_evidence(name, value)}
    found["place"] = found.get("place") or place
    if exited.code == EXIT_CHANGE and not role:
        unasked = "code 75 says that it saved and ended for a change of hosts, and it was not asked to"
        found["evidence"] = (*found.get("evidence", ()), unasked)
    return RankFailure(
        rank=exited.rank,
        local_rank=local_rank,
        host=host,
        pid=pid,
        code=exited.code,
        signal=exited.signal,
        at_s=at_s,
        role=role,
        **found,
    )


_EVIDENCE: dict[str, type] = {
    "place": str,
    "core_dumped": bool,
    "is_out_of_memory": bool,
    "evidence": list,
    "message": str,
    "traceback": list,
    "last_lines": list,
    "last_lines_of": str,
}


def _is_evidence(name: str, value: object) -> bool:
    """Tell whether the value has the form that evidence.py writes; a value of another form is ignored."""
    is_text = not isinstance(value, list) or all(isinstance(one, str) for one in value)
    return name in _EVIDENCE and isinstance(value, _EVIDENCE[name]) and is_text


def _read(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _to_dict(failure: Failure) -> dict[str, Any]:
    kinds = {
        RankFailure: "rank",
        HostFailure: "host",
        HangFailure: "hang",
        OutputFailure: "output",
        LauncherFailure: "launcher",
    }
    kind = kinds[type(failure)]
    found = {"kind": kind, "text": sentence_on(failure), **failure._asdict()}
    if isinstance(failure, RankFailure):
        found["kind"] = "server" if failure.role else "rank"
        for name in ("rank", "local_rank", "place") if failure.role else ("role",):
            del found[name]
    if isinstance(failure, RankFailure) and failure.signal:
        found["signal_name"] = signal_name(failure.signal)
    return found


def signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} ({number})"
    except ValueError:
        return f"signal {number}"
