"""The protocol between launcher and agent: length-prefixed JSON frames over one byte stream.

Text in frames. Arguments, environment values and output are arbitrary bytes. They travel as `str` in which
every byte that is not UTF-8 stands as a lone surrogate (`surrogateescape`), and the JSON text keeps those
surrogates (`surrogatepass`): the bytes that arrive are equal to those that were sent.
"""

from __future__ import annotations

from . import fast_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NamedTuple, TypeAlias, Union

    Table: TypeAlias = dict[str, tuple[Callable[..., Any], tuple[Callable[[Any], bool], ...]]]
else:
    from .fast_tuple import Record as NamedTuple

MAGIC = b"\0dslaunch agent 1\n"  # the agent's first bytes; the output of a login script may stand before it
MAX_FRAME_BYTES = 64 << 20
_LENGTH_BYTES = 4
_OF_CHUNK = b"\0"  # JSON never begins with this byte
_MAX_FLOAT = 1.7976931348623157e308


class ProtocolError(Exception):
    """The peer sent something that is not a frame of this protocol."""


# Launcher to agent.


class Prepare(NamedTuple):
    """Check that the job can run here, and read its files, but start nothing."""

    job: dict[str, Any]  # a NodeJob: job.py, `as_json` and `read_job`


class Start(NamedTuple):
    """Start the prepared workers, with these variables besides the prepared ones. An empty `master_addr`
    means that they do not form a job.
    """

    master_addr: str
    master_port: int
    env: dict[str, Any] = {}  # noqa: RUF012 - never changed


class MemoryHosts(NamedTuple):
    """The agents that hold snapshots of the job: each as its name, addresses and port. This one is `name`;
    `partner` gets copies of what it holds, none if empty. A connection begins with the token.
    """

    name: str
    peers: list[Any]
    partner: str
    token: str


class StartAgain(NamedTuple):
    """End what the server that has ended left running, then start it again, after `after_s` seconds."""

    after_s: float


class Listen(NamedTuple):
    """Answer connections with the token until the job starts. Port 0 means the one that Prepare chooses."""

    port: int
    token: str


class Reach(NamedTuple):
    """Try to connect to the listening host, at all these addresses."""

    addresses: list[str]
    port: int
    token: str
    timeout_s: float


class Inspect(NamedTuple):
    """Look at the host. The questions are those of launcher/node/observe/inspection.py."""

    question: str
    given: dict[str, Any]


class SyncOffer(NamedTuple):
    """The files that the folder `root` must have: the list follows in Chunks, `num_bytes` in all
    (manifest.py).

    `marker` is a file there if the folder is the launcher's own. With a `peer_token` the host serves others.
    `sender` is the same for two offers only if one sender makes both; `sent_from` says it in words. A host
    that gives no sign for `within_s` seconds is given up.
    """

    root: str
    marker: str
    is_forced: bool
    num_bytes: int
    peer_token: str
    sender: str
    sent_from: str
    within_s: float


class SyncFrom(NamedTuple):
    """Take the contents from the host that listens there. If that does not work, ask again."""

    addresses: list[str]
    port: int


class Collect(NamedTuple):
    """Send the files that match a pattern in the job's folder, but none below the folder `besides`; with
    `is_own`, in the agent's own folder.
    """

    patterns: list[str]
    besides: str
    is_own: bool


class Signal(NamedTuple):
    """Pass a signal on to every worker, but not to its children."""

    number: int


class Hold(NamedTuple):
    """The launcher is about to be stopped (Ctrl-Z): allow `for_s` seconds of silence. 0 takes that back."""

    for_s: float


class AskStacks(NamedTuple):
    """Report what each running worker does."""


class Resize(NamedTuple):
    """The job goes on with other hosts: tell the workers, which save and end with code 75.

    Only for a job that is elastic. `by_disk`: with these hosts, some of what they hold in memory goes.
    """

    why: str
    by_disk: bool = False


class ImportAhead(NamedTuple):
    """Have the imports done that the workers of the prepared job share, for an attempt that may come."""


class Renew(NamedTuple):
    """Be as after Hello: the job is over on this host, and another attempt of it follows."""


class Stop(NamedTuple):
    """End all workers: SIGTERM now, SIGKILL after `grace_s` seconds."""

    grace_s: float


class Ping(NamedTuple):
    """The launcher lives. An agent that hears nothing for its heartbeat time ends the job."""

    number: int


# Both ways.


class Chunk(NamedTuple):
    """A piece of the data that the frame before announced: the only frame that is not JSON (see `encode`)."""

    data: bytes


class Took(NamedTuple):
    """So many bytes of Chunks were dealt with, and as many more may be sent."""

    num_bytes: int


# Agent to launcher.


class Hello(NamedTuple):
    """The agent runs. `reached_at` is this host's address on the connection it was started through, or empty.

    `machine` is the same for two hosts only if they are one under two names; empty where that is not known.
    """

    hostname: str
    python: str
    reached_at: str
    num_devices: int
    pid: int
    machine: str = ""


class Ready(NamedTuple):
    """The job can start here. `master_port` is a port that was free just now (node 0 only, else 0). Other
    agents reach the snapshots that this one holds at `memory_port`; 0: it holds none.
    """

    master_port: int
    notes: list[str]
    memory_port: int = 0
    memory_addresses: list[str] = []  # noqa: RUF012 - never changed


class Listening(NamedTuple):
    """The host listens, or `problem` says why not. `addresses` are its own ones, without loopback."""

    port: int
    addresses: list[str]
    problem: str


class Reached(NamedTuple):
    """The result for each address: empty if the listening host answered, else the reason."""

    problems: list[str]


class SyncWant(NamedTuple):
    """Send these contents, by their numbers in the list, one after the other.

    It comes again after a `problem` with a peer.

    The others may take them from this host at that port; 0: it does not listen.
    """

    contents: list[int]
    num_bytes: int
    port: int
    addresses: list[str]
    problem: str


class Synced(NamedTuple):
    """The folder is as it was offered. `is_shared`: it is the launcher's own, and nothing was done."""

    is_shared: bool
    num_written: int
    num_removed: int
    notes: list[str]


class Found(NamedTuple):
    """A file that matches; its content follows in Chunks, up to the next frame of another kind."""

    name: str
    mode: int
    mtime_ns: int


class Collected(NamedTuple):
    """The end of the files. `problems` are those that could not be read."""

    num_of_pattern: list[int]
    problems: list[str]


class Facts(NamedTuple):
    """The answer to one question."""

    question: str
    facts: dict[str, Any]


class Problem(NamedTuple):
    """The job cannot run here."""

    message: str
    exit_code: int


class Started(NamedTuple):
    rank: int
    pid: int


class Output(NamedTuple):
    """Whole lines of one worker. `stream` is 1 for stdout and 2 for stderr."""

    rank: int
    stream: int
    text: str


class Exited(NamedTuple):
    """A worker ended and all its output was sent. `signal` is 0 unless a signal ended it."""

    rank: int
    code: int
    signal: int
    at: float  # the node's monotonic clock, seconds
    evidence: dict[str, Any] = {}  # noqa: RUF012 - never changed; of a failure, made by evidence.py, `evidence_of`


class Healthy(NamedTuple):
    """The server answers, or `problem` says how it does not. `note` is for the user."""

    rank: int
    problem: str
    note: str


class Stacks(NamedTuple):
    """The state of a worker: a word of the kernel's, and its stacks, or why there are none.

    `place` is its place along the job's axes, by the worker's runtime; empty if unknown.
    """

    rank: int
    state: str
    text: str
    problem: str
    place: str = ""


class Milestone(NamedTuple):
    """A worker has reached a milestone; `at` is on the node's monotonic clock, seconds.

    Sent only if the job asks for it.
    """

    rank: int
    name: str
    at: float


class Metrics(NamedTuple):
    """Numbers of the ranks and the host since the last time; `at` as in Milestone.

    `ranks`: names and values by rank, or of all together (`*`): docs/design/events.md.
    """

    at: float
    ranks: dict[str, Any]
    host: dict[str, Any]


class Told(NamedTuple):
    """A long record of a worker, as JSON, and its kind."""

    rank: int
    name: str
    text: str


class Pong(NamedTuple):
    number: int
    at: float


class Leaving(NamedTuple):
    """The host was told to go: by a signal to its agent, a file, or a command."""

    why: str


class Note(NamedTuple):
    """A note for the user about a host whose job runs."""

    text: str


class Done(NamedTuple):
    """Nothing of the job is left on this host; `left_over` counts processes that outlived their worker."""

    left_over: int


if TYPE_CHECKING:
    Frame = Union[  # noqa: UP007 - one name
        Prepare,
        Start,
        MemoryHosts,
        StartAgain,
        Listen,
        Reach,
        Inspect,
        SyncOffer,
        SyncFrom,
        Collect,
        Chunk,
        Took,
        Signal,
        Hold,
        AskStacks,
        Resize,
        ImportAhead,
        Renew,
        Stop,
        Ping,
        Hello,
        Ready,
        Listening,
        Reached,
        SyncWant,
        Synced,
        Found,
        Collected,
        Facts,
        Problem,
        Started,
        Output,
        Exited,
        Healthy,
        Stacks,
        Milestone,
        Metrics,
        Told,
        Pong,
        Leaving,
        Note,
        Done,
    ]
else:
    Frame = tuple


FITS: dict[str, Callable[[Any], bool]] = {
    "Any": lambda value: True,
    "bool": lambda value: type(value) is bool,
    "int": lambda value: type(value) is int,
    "float": lambda value: type(value) in (int, float) and abs(value) <= _MAX_FLOAT,
    "str": lambda value: isinstance(value, str),
    "bytes": lambda value: isinstance(value, bytes),
    "dict[str, Any]": lambda value: isinstance(value, dict),
}


def fits_of(declared: str, base: dict[str, Callable[[Any], bool]] = FITS) -> Callable[[Any], bool]:
    """Return the check of a value of JSON for a declared type: one of `base`, a list of them, or None."""
    if declared.endswith(" | None"):
        fits = fits_of(declared[:-7], base)
        return lambda value: value is None or fits(value)
    if declared.startswith("list["):
        fits = fits_of(declared[5:-1], base)
        return lambda value: isinstance(value, list) and all(map(fits, value))
    return base[declared]


def table_of(module: str, base: dict[str, Callable[[Any], bool]] = FITS) -> Table:
    """The messages that this module declares, by name: each with the checks of its fields."""
    kinds = [kind for kind in NamedTuple.__subclasses__() if kind.__module__ == module]
    return {
        kind.__name__: (kind, tuple(fits_of(kind.__annotations__[field], base) for field in kind._fields))
        for kind in kinds
    }


_FRAMES = table_of(__name__)


def encode(frame: Frame) -> bytes:
    """Return one frame as bytes: four bytes of length (big endian), then JSON `[kind, field, ...]`; for a
    Chunk a zero byte, then its data unchanged.
    """
    if isinstance(frame, Chunk):
        return (len(frame.data) + 1).to_bytes(_LENGTH_BYTES, "big") + _OF_CHUNK + frame.data
    return pack(frame)


def _decode(body: bytes) -> Frame:
    return Chunk(body[1:]) if body[:1] == _OF_CHUNK else unpack(body, _FRAMES)


def pack(frame: tuple[Any, ...]) -> bytes:
    """Pack any named tuple in the form of a frame."""
    return with_length(body_of(frame))


def body_of(frame: tuple[Any, ...]) -> bytes:
    """Return the body of a frame, which stands behind its length."""
    text = fast_json.write([type(frame).__name__, *frame])
    return text.encode("utf-8", "surrogatepass")


def with_length(body: bytes) -> bytes:
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


def cut(pending: bytearray, *, max_bytes: int) -> list[bytes]:
    """Return the bodies of the complete frames; the rest stays in `pending`.

    Errors: ProtocolError if a frame is longer than `max_bytes`.
    """
    bodies: list[bytes] = []
    start = 0
    while len(pending) - start >= _LENGTH_BYTES:
        length = int.from_bytes(pending[start : start + _LENGTH_BYTES], "big")
        if length > max_bytes:
            said = bytes(pending[start : start + 80])
            raise ProtocolError(
                f"not a frame: {said!r} would have {length} bytes; at most {max_bytes} are allowed"
            )
        end = start + _LENGTH_BYTES + length
        if len(pending) < end:
            break
        bodies.append(bytes(pending[start + _LENGTH_BYTES : end]))
        start = end
    del pending[:start]
    return bodies


def unpack(body: bytes, table: Table) -> Any:
    """Return the message of this table that a body holds. Errors: ProtocolError"""
    try:
        name, *values = fast_json.read(body.decode("utf-8", "surrogatepass"))
        kind, checks = table[name]
        message = kind(*values)
        for fits, value in zip(checks, message):  # noqa: B905 - equally long; `strict` needs Python 3.10
            if not fits(value):
                raise ValueError("a field of another type")
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not a frame: {body[:80]!r}") from error
    return message


class Decoder:
    """Cuts a byte stream into frames. Feed it the bytes that arrive; it returns the complete frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Errors: ProtocolError if the stream cannot be this protocol; the stream is then useless."""
        self._pending += data
        return [_decode(body) for body in cut(self._pending, max_bytes=MAX_FRAME_BYTES)]


def text_of(data: bytes) -> str:
    """Return bytes as frame text."""
    return data.decode("utf-8", "surrogateescape")


def bytes_of(text: str) -> bytes:
    """Return the bytes that frame text stands for."""
    return text.encode("utf-8", "surrogateescape")
