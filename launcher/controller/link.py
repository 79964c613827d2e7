"""The connection to one agent: a thread that connects and reads, and a way to write."""

from __future__ import annotations

import contextlib
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ..backends.bootstrap import (
    ANNOUNCED,
    ENTERING,
    NO_AGENT_RUNS_WITH,
    OLDEST_PYTHON,
    USUAL,
    WANTS_TEXT,
    AgentParts,
    agent_source,
    agent_text,
)
from ..backends.channel import Channel, RelayedStream, WayLost
from ..errors import LaunchError
from ..job.plan import NodePlan
from ..wire.frames import MAGIC, Decoder, Frame, Output, Problem, ProtocolError

MAX_NOISE_BYTES = 1 << 20  # output of login scripts before the agent's first bytes
# Time to close the stream to a host that may be dead; the kernel closes the connection anyway
CLOSE_TIMEOUT_S = 5.0
MAX_SHOWN = 300  # characters of a prefix's output
MAX_OUTPUTS_IN_FLIGHT = 64  # beyond this the host waits: the console cannot keep up

# Held by the one thread that decodes bytes. When thousands of hosts answer at the same moment, as they do at
# the start, as many threads wake up. If they waited for the interpreter itself, each would wake again every 5
# ms, and the machine would do nothing else. Threads that wait for a lock sleep.
_TURN = threading.Lock()


class LinkEnd(NamedTuple):
    """The connection could not be made, or ended; `message` says why.

    `is_way_lost`: it ended because another host, on the way, is lost.
    """

    message: str
    is_way_lost: bool = False


class Link:
    """One host's stream. `deliver(item, at_s)` gets every frame and, last, one LinkEnd; it must not block."""

    def __init__(
        self,
        plan: NodePlan,
        *,
        connect: Callable[[NodePlan], Channel],
        window: threading.BoundedSemaphore,
        parts: AgentParts = USUAL,
    ) -> None:
        self._plan = plan
        self._deliver: Callable[[Frame | LinkEnd, float], None] = lambda item, at_s: None
        self._end: LinkEnd | None = None  # the last item, once it was delivered
        self._handing_over = threading.Lock()
        self._parts = parts
        self._connect = connect
        self._window = window
        self._channel: Channel | None = None
        self._is_abandoned = False
        self._waits_for_source = False
        self._closing: threading.Thread | None = None
        self._write_lock = threading.Lock()
        self._outputs = threading.Semaphore(MAX_OUTPUTS_IN_FLIGHT)
        self._reading_since: float | None = None
        self.connecting_at: float | None = None  # when this host's turn came to be connected
        self.opened_at: float | None = None  # when the connection was made, on the monotonic clock
        self._way_silent_s: Callable[[], float] = lambda: 0.0

    def start(self, deliver: Callable[[Frame | LinkEnd, float], None]) -> None:
        """Connect and read, in a thread of its own."""
        self._deliver = deliver
        threading.Thread(target=self._run, name=f"link to {self._plan.host.name}", daemon=True).start()

    def hand_over(self, plan: NodePlan, deliver: Callable[[Frame | LinkEnd, float], None]) -> None:
        """Deliver to another one from now on, for the same host in another plan; a LinkEnd that was there
        before is delivered again.
        """
        with self._handing_over:
            self._plan, self._deliver = plan, deliver
            end = self._end
        self.connecting_at = self.opened_at = time.monotonic()
        if end is not None:
            deliver(end, time.monotonic())

    @property
    def is_open(self) -> bool:
        return self._channel is not None and not self._is_abandoned and self._end is None

    @property
    def local_address(self) -> str:
        return self._channel.local_address if self._channel is not None else ""

    def send(self, data: bytes) -> None:
        """Send the bytes; a broken stream is not an error here, because the thread that reads it reports
        that.
        """
        channel = self._channel
        if channel is not None:
            with self._write_lock, contextlib.suppress(OSError):
                channel.write(data)

    def grant(self) -> None:
        """Let the host send another Output frame, because one was written."""
        self._outputs.release()

    def silent_s(self) -> float:
        """Seconds that we have been waiting for bytes; 0 while we are the slow side."""
        since = self._reading_since
        return 0.0 if since is None else max(0.0, time.monotonic() - since - self._way_silent_s())

    def open_s(self) -> float:
        """Seconds that the connection has been open; 0 before."""
        return 0.0 if self.opened_at is None else time.monotonic() - self.opened_at

    def forgive_silence(self) -> None:
        """Count silence from now on: this process did not listen before."""
        if self._reading_since is not None:
            self._reading_since = time.monotonic()

    def abandon(self) -> None:
        """Give the link up without waiting: bytes that still arrive are dropped."""
        self._is_abandoned = True
        channel = self._channel
        if channel is not None and self._closing is None:
            closing = threading.Thread(target=channel.close, daemon=True)
            try:
                closing.start()
            # This machine allows no more threads: close in this one, and let others wait
            except RuntimeError:
                channel.close()
            else:
                self._closing = closing

    def close(self) -> None:
        """End the stream and wait until no process or file of it is left on this machine."""
        self.abandon()
        if self._closing is not None:
            self._closing.join(None if self._plan.is_local else CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        end = LinkEnd("the connection ended")
        try:
            with self._window:
                if self._is_abandoned:
                    return
                self.connecting_at = time.monotonic()
                channel = self._connect(self._plan)
                self.opened_at = time.monotonic()
            if self._is_abandoned:  # the job was given up while we connected
                channel.close()
                return
            if isinstance(channel, RelayedStream):
                self._way_silent_s = channel.way_silent_s
            # A prefix that gives its command a terminal would spoil the source, so after a prefix the source
            # is sent only when the bootstrap says that it reads.
            self._waits_for_source = bool(self._plan.host.exec_prefix)
            if not self._waits_for_source:
                self._send_source(channel)
            self._channel = channel
            end = LinkEnd(self._read(channel))
        except (LaunchError, ProtocolError) as error:
            end = LinkEnd(str(error), is_way_lost=isinstance(error, WayLost))
        except OSError as error:
            end = LinkEnd(f"the connection broke: {error.strerror or error}")
        finally:
            with self._handing_over:
                self._end, deliver = end, self._deliver
            deliver(end, time.monotonic())

    def _read(self, channel: Channel) -> str:
        """Read until the stream ends; return why it ended."""
        decoder = Decoder()
        noise = b""
        is_agent = is_asked = False
        prefix = self._plan.host.exec_prefix
        while True:
            self._reading_since = time.monotonic()
            data = channel.read()
            self._reading_since = None
            if not data:
                if prefix and (is_agent or self._plan.is_local or ENTERING in noise):
                    return why_prefix_ended(shlex.join(prefix), channel, noise=None if is_agent else noise)
                return _why_ended(channel) if is_agent else _why_no_agent(channel, noise)
            if not is_agent:
                noise += data
                if self._waits_for_source and ANNOUNCED in noise:
                    self._waits_for_source = False
                    self._send_source(channel)
                _, magic, data = noise.partition(MAGIC)
                if not magic:
                    if WANTS_TEXT in noise and not is_asked:
                        is_asked = True
                        channel.write(agent_text(self._parts))
                    if len(noise) > MAX_NOISE_BYTES:
                        raise ProtocolError(
                            f"not an agent: it printed {noise[:60]!r}...; let login scripts print "
                            "nothing there in shells that are not interactive, and python= in the "
                            "hostfile name a Python"
                        )
                    continue
                is_agent = True
            with _TURN:
                for frame in _together(_fed(decoder, data)):
                    if isinstance(frame, Output):
                        self._wait_for_place()
                    elif prefix and isinstance(frame, Problem):
                        frame = frame._replace(message=f"inside {shlex.join(prefix)}: {frame.message}")
                    self._deliver(frame, time.monotonic())

    def _send_source(self, channel: Channel) -> None:
        source = agent_source(self._parts)
        with contextlib.suppress(OSError):  # the stream has ended already, but its output can still be read
            channel.write(source)

    def _wait_for_place(self) -> None:
        """Wait until one more output may be in flight; the other hosts go on meanwhile."""
        if not self._outputs.acquire(blocking=False):
            _TURN.release()
            try:
                self._outputs.acquire()
            finally:
                _TURN.acquire()


def _fed(decoder: Decoder, data: bytes) -> list[Frame]:
    try:
        return decoder.feed(data)
    except ProtocolError as error:
        text = data[:80].decode("utf-8", "replace").strip()
        if not text or not text.isprintable() or text.startswith("\ufffd"):
            raise
        raise ProtocolError(f"{error}; does something that a login script started print there?") from error


def _together(frames: list[Frame]) -> Iterator[Frame]:
    """Join frames: consecutive pieces of one worker's output become one Output."""
    waiting: list[Output] = []
    for frame in frames:
        is_more = isinstance(frame, Output) and waiting and waiting[-1][:2] == frame[:2]
        if waiting and not (is_more and waiting[-1].text.endswith("\n")):
            yield _joined(waiting)
            waiting = []
        if isinstance(frame, Output):
            waiting.append(frame)
        else:
            yield frame
    if waiting:
        yield _joined(waiting)


def _joined(outputs: list[Output]) -> Output:
    first = outputs[0]
    return first if len(outputs) == 1 else first._replace(text="".join(one.text for one in outputs))


_PYTHON_2_SAYS = "Unknown option: -I"
_NAME_ANOTHER = (
    f"install Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer there, or name it with "
    "python= in the hostfile"
)


def _why_ended(channel: Channel) -> str:
    last = _last_line(channel.error_text())
    return f"the agent ended: {last}" if last else "the connection ended before the job did"


def _why_no_agent(channel: Channel, noise: bytes) -> str:
    """Return why no agent started: the output of a login script, forced command or login shell before its
    end.
    """
    status = channel.exit_status()
    errors = channel.error_text()
    said = _last_line(errors) or _last_line(noise.decode("utf-8", "replace"))
    if why := _why_python_is_old(errors, said):
        return why
    from ..node.system.limits import CANNOT_START

    if said.startswith(CANNOT_START):
        return said
    how = "the connection ended" if status is None else f"the login ended with status {status}"
    words = f", and its last words are {said!r}" if said else " and said nothing"
    return (
        f"no agent started there: {how}{words}; a command must run there and print nothing of its own: test "
        "with ssh HOST true; python= in the hostfile, if it is given, must name a Python"
    )


def why_prefix_ended(prefix: str, channel: Channel, *, noise: bytes | None) -> str:
    """Return why the stream of a prefix ended. Without an agent, `noise` is the prefix's own output."""
    status = channel.exit_status()
    how = f"{prefix} ended" + ("" if status is None else f" with status {status}")
    errors = channel.error_text()
    last = _last_line(errors)
    printed = (noise or b"").rpartition(ENTERING)[2].replace(ANNOUNCED, b"")
    last = last or _last_line(printed.decode("utf-8", "replace"))
    if why := _why_python_is_old(errors, last):
        return f"inside {prefix}: {why}"
    shown = last if len(last) <= MAX_SHOWN else f"{last[:MAX_SHOWN]}..."
    words = f", and its last words are {shown!r}" if last else " and said nothing"
    if noise is None:
        return f"{how} before the job did{words}; was the container stopped?"
    return (
        f"{how} before an agent ran behind it{words}; it must run a program inside and pass on its input and "
        "output: test with: echo date | PREFIX sh"
    )


def _why_python_is_old(errors: str, said: str) -> str:
    """Describe a host whose Python runs no agent; empty for others. `said` is its last line."""
    if said.startswith(NO_AGENT_RUNS_WITH):
        return f"{said}; {_NAME_ANOTHER}"
    if _PYTHON_2_SAYS in errors:
        old = f"a Python before 3.4, which the host has ({_PYTHON_2_SAYS})"
        return f"{NO_AGENT_RUNS_WITH}{old}; {_NAME_ANOTHER}"
    return ""


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
