"""Numbers of the workers of a host, and of the host itself, once in an interval.

It is loaded some time after the start, so that it does not slow it down. The numbers: docs/design/events.md
"""

from __future__ import annotations

import os

from ...wire import fast_json
from ...wire.frames import Metrics, Note, Told
from ..system.lean_stdlib import suppress
from .evidence import read_place
from .host_sample import HostSample
from .links import Links

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Any, Union

    from ...wire.frames import Frame
    from .gpu_sample import GpuSample

    Value = Union[int, float, str]  # noqa: UP007 - for Python 3.8

READ_BYTES = 1 << 16  # size of a pipe
MAX_READS = 16  # reads in one call
MAX_REST_BYTES = 1 << 13  # bytes of an unfinished line; a worker writes at most half of it at once
MAX_NAMES = 100  # names per rank
MAX_NAME_LENGTH = 60
MAX_TEXT_LENGTH = 200
MAX_FILE_BYTES = 1 << 20
PAUSES = ("evaluating", "generating", "saving", "loading")  # what a rank may do instead of training
PAUSE = "pause"  # the place of that in PAUSES, from 1, where ranks are folded; 0: it trains
FOLDED = "*"
_FILES = ("config", "hang", "trial")
_INFINITE = 1.7976931348623157e308
_MOST = 1 << 64  # a float holds every whole number up to it


class MetricsReader:
    """Reads the pipe that the workers of this host write to.

    `is_folding`: only the least, mean and greatest of each number over the ranks go to the launcher.
    """

    def __init__(
        self,
        path: str,
        *,
        ranks: Collection[int],
        interval_s: float,
        is_folding: bool,
        send: Callable[[Frame], None],
        pids: Callable[[], Sequence[int]] = tuple,
        gpus: GpuSample | None = None,
    ) -> None:
        """Make the pipe. `pids` returns those of the running workers. Errors: OSError"""
        self._gpus = gpus
        self._path, self._ranks, self._is_folding = path, ranks, is_folding
        self._send = send
        self._every_s = interval_s
        os.mkfifo(path, 0o600)
        # For writing too, so that it never comes to an end.
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW)
        self._rest = b""
        self._told: dict[int, dict[str, Value]] = {}  # numbers by rank, since the last time
        self._host = HostSample()
        self._links = Links(pids)
        self._placeless = set(ranks)  # ranks whose place along the job's axes is unknown
        self._next_at = 0.0

    def look(self, now: float, *, is_behind: bool) -> None:
        """Take the new numbers, and send them if it is time.

        `is_behind`: the launcher does not read now, so sending can wait.
        """
        self._read()
        if now >= self._next_at and not is_behind:
            self._next_at = now + self._every_s
            self.send(now)

    def send(self, now: float) -> None:
        """Send the numbers since the last time."""
        self._read()
        told, self._told = self._told, {}
        host = self._host.look()
        links = self._links.look(now)
        host.update({"links": links, "places": self._places(told)})
        if links is not None:
            host["net_wait"] = max(one["wait"] for one in links["to"].values())
        if self._is_folding:
            add_own_time(told)
            add_pauses(told)
        folded = {FOLDED: fold(told)} if self._is_folding and told else told
        ranks = {str(rank): {name: _sent(one) for name, one in row.items()} for rank, row in folded.items()}
        gpus = self._gpus.last(now) if self._gpus is not None else []
        host["gpus"] = gpus or None
        self._send(Metrics(now, ranks, {name: one for name, one in host.items() if one is not None}))

    def _places(self, told: Collection[int]) -> dict[str, str] | None:
        """Return the places of ranks with numbers, once: a rank knows its place before it reports a step."""
        found = {}
        for rank in self._placeless.intersection(told):
            self._placeless.discard(rank)
            place = read_place(os.path.join(os.path.dirname(self._path), f"place-{rank}"))
            if place:
                found[str(rank)] = place
        return found or None

    def close(self) -> None:
        """Read no more, and remove the pipe: a server that is started again gets another one."""
        if self._gpus is not None:
            self._gpus.close()
        os.close(self._fd)
        with suppress(OSError):
            os.unlink(self._path)

    def _read(self) -> None:
        """Take what is in the pipe, within a limit: a worker may write without a pause."""
        for _ in range(MAX_READS):
            try:
                data = os.read(self._fd, READ_BYTES)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._rest = self._rest[-MAX_REST_BYTES:]  # the end of a line in another form
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        """Take one line; a line in another form is left out."""
        word, _, text = line.partition(b" ")
        try:
            rank, row = int(word), fast_json.read(text.decode("utf-8"))
        except (ValueError, RecursionError):
            return
        if rank not in self._ranks or not isinstance(row, dict):
            return
        file = row.pop("file", None)
        if file in _FILES:
            self._send_file(rank, file)
        merge(self._told.setdefault(rank, {}), row)
        if not self._told[rank]:
            del self._told[rank]

    def _send_file(self, rank: int, name: str) -> None:
        """Send a long record, which the rank has written beside the pipe."""
        path = os.path.join(os.path.dirname(self._path), f"{name}-{rank}.json")
        with suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                data = os.read(fd, MAX_FILE_BYTES + 1)
            finally:
                os.close(fd)
            if len(data) > MAX_FILE_BYTES:
                size = MAX_FILE_BYTES >> 20
                self._send(
                    Note(f"the {name} that rank {rank} tells is longer than {size} MiB, and is left out")
                )
            else:
                self._send(Told(rank, name, data.decode("utf-8", "replace")))


def is_sum(name: str) -> bool:
    """Tell whether numbers of this name are added up, and not replaced by later ones."""
    return name == "steps" or name.endswith("_s")


def merge(known: dict[str, Value], row: dict[str, Any]) -> None:
    """Add later numbers to earlier ones; values of other kinds are left out."""
    for name, value in row.items():
        if len(name) > MAX_NAME_LENGTH or (name not in known and len(known) >= MAX_NAMES):
            continue
        if isinstance(value, str):
            known[name] = value[:MAX_TEXT_LENGTH]
        elif type(value) is float or (type(value) is int and abs(value) <= _MOST):
            before = known.get(name, 0)
            known[name] = value + before if is_sum(name) and not isinstance(before, str) else value


def add_own_time(told: dict[int, dict[str, Value]]) -> None:
    """Add each rank's own time for its steps, without pauses and waiting; folding would lose it."""
    for row in told.values():
        step_s, comm_s, paused_s = row.get("step_s"), row.get("comm_s"), row.get("paused_s", 0.0)
        if step_s is None or comm_s is None:
            continue
        if not (isinstance(step_s, str) or isinstance(comm_s, str) or isinstance(paused_s, str)):
            row["own_s"] = step_s - comm_s - paused_s


def add_pauses(told: dict[int, dict[str, Value]]) -> None:
    """Add what a rank does instead of training as a number; folding would lose the word."""
    for row in told.values():
        state = row.get("state")
        if isinstance(state, str) and state in PAUSES:
            row[PAUSE] = PAUSES.index(state) + 1


def fold(told: dict[int, dict[str, Value]]) -> dict[str, list[float]]:
    """Return for each number least, mean, greatest, and the ranks of the first and of the last."""
    columns: dict[str, list[tuple[float, int]]] = {}
    for rank, row in told.items():
        for name, value in row.items():
            if not isinstance(value, str) and value == value:
                columns.setdefault(name, []).append((value, rank))
    return {
        name: [
            *(min(column)[0], sum(value for value, _ in column) / len(column), max(column)[0]),
            *(min(column)[1], max(column)[1]),
        ]
        for name, column in columns.items()
    }


def _sent(value: Any) -> Any:
    """Return the value as JSON has it, which knows no infinity: a word in its place."""
    if isinstance(value, list):
        return [_sent(one) for one in value]
    if isinstance(value, float) and not abs(value) <= _INFINITE:
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    return value
