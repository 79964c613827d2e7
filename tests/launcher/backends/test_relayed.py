"""A relay and what it carries, with real processes on this machine:
commands of Python in the place of `ssh`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from dslaunch.launcher.backends.bootstrap import ANNOUNCED, READ_LOADER
from dslaunch.launcher.backends.channel import WayLost
from dslaunch.launcher.backends.local import LocalChannel
from dslaunch.launcher.backends.relayed import RelayedChannel, RelayStreams
from dslaunch.launcher.controller.link import Link
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.job.plan import NodePlan
from dslaunch.launcher.wire.mux import WINDOW_BYTES

pytestmark = pytest.mark.slow

TIMEOUT_S = 30.0
HERE = f"import os, sys, time; os.write(1, {ANNOUNCED!r}); "
ECHO = HERE + "\nwhile data := os.read(0, 1 << 16): os.write(1, data)"
FLOOD = HERE + "\nwhile True: os.write(1, bytes(1 << 16))"
DEAF = HERE + "time.sleep(600)"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


@pytest.fixture
def relay() -> Iterator[RelayStreams]:
    stream = LocalChannel(end_within_s=10.0)
    made = RelayStreams(stream, gateway="gate")
    yield made
    made.close()
    stream._out.close()


def read(channel: RelayedChannel, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = channel.read()
        assert more, "the stream ended"
        data += more
    return data


def relay_process() -> psutil.Process:
    """The relay: what this process started that runs a bootstrap. Other tests' children may be there too."""
    (found,) = (
        one
        for one in psutil.Process().children()
        if one.status() != psutil.STATUS_ZOMBIE and one.cmdline()[-1:] == [READ_LOADER]
    )
    return found


def eventually(what: object, is_so: object) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_streams_carry_all_bytes_both_ways(relay: RelayStreams) -> None:
    channels = [relay.open(python(ECHO), timeout_s=TIMEOUT_S) for _ in range(3)]
    texts = [bytes([number]) * (3 * WINDOW_BYTES) + bytes(range(256)) for number in range(3)]
    writers = [
        threading.Thread(target=one.write, args=(text,)) for one, text in zip(channels, texts, strict=True)
    ]
    for writer in writers:
        writer.start()
    for channel, text in zip(channels, texts, strict=True):
        assert read(channel, len(text)) == text
    for writer in writers:
        writer.join()


def test_one_that_floods_and_is_not_read_holds_up_nobody_and_takes_no_memory(relay: RelayStreams) -> None:
    flood = relay.open(python(FLOOD), timeout_s=TIMEOUT_S)
    echo = relay.open(python(ECHO), timeout_s=TIMEOUT_S)
    eventually("a full window", lambda: len(flood._received) + len(ANNOUNCED) >= WINDOW_BYTES)
    for number in range(100):
        echo.write(b"%03d" % number)
        assert read(echo, 3) == b"%03d" % number
    assert len(flood._received) <= WINDOW_BYTES
    assert relay_process().memory_info().rss < 64 << 20
    assert len(read(flood, 4 * WINDOW_BYTES)) >= 4 * WINDOW_BYTES, "it goes on when it is read"


def test_one_that_does_not_read_holds_up_its_writer_only(relay: RelayStreams) -> None:
    deaf = relay.open(python(DEAF), timeout_s=TIMEOUT_S)
    echo = relay.open(python(ECHO), timeout_s=TIMEOUT_S)
    problems: list[OSError] = []

    def write() -> None:
        try:
            deaf.write(bytes(8 * WINDOW_BYTES))
        except OSError as error:
            problems.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    eventually("the window to be full", lambda: deaf._credit == 0)
    echo.write(b"hello")
    assert read(echo, 5) == b"hello"
    assert writer.is_alive()
    deaf.close()
    writer.join(TIMEOUT_S)
    assert len(problems) == 1


def test_what_login_scripts_print_is_skipped(relay: RelayStreams) -> None:
    noise = f"import os; os.write(1, b'welcome\\n' * {WINDOW_BYTES // 4}); " + ECHO
    channel = relay.open(python(noise), timeout_s=TIMEOUT_S)
    channel.write(b"hello")
    assert read(channel, 5) == b"hello"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (python("import sys; sys.exit('one\\ntwo: refused\\n')"), "two: refused"),
        (python("raise SystemExit(9)"), "ssh ended with 9"),
        (python("pass"), "ssh ended"),
        (("no-such-program",), "no no-such-program there"),
    ],
)
def test_a_command_that_ends_before_its_first_word_is_an_error_with_its_last_words(
    relay: RelayStreams, argv: tuple[str, ...], message: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        relay.open(argv, timeout_s=TIMEOUT_S)
    assert str(caught.value) == message


def test_a_command_that_says_nothing_is_given_up_and_ended(relay: RelayStreams) -> None:
    with pytest.raises(LaunchError, match=r"nothing came within 0\.5 s"):
        relay.open(python("import time; time.sleep(600)"), timeout_s=0.5)
    eventually("its end", lambda: not relay_process().children(recursive=True))


def test_the_end_of_a_command_is_the_end_of_its_stream_after_all_it_wrote(relay: RelayStreams) -> None:
    code = HERE + f"os.write(2, b'why\\n'); sys.stdout.write('x' * {WINDOW_BYTES + 5}); sys.stdout.flush()"
    channel = relay.open(python(code), timeout_s=TIMEOUT_S)
    assert read(channel, WINDOW_BYTES + 5) == b"x" * (WINDOW_BYTES + 5)
    assert channel.read() == b""
    assert channel.error_text() == "why\n"
    with pytest.raises(OSError, match="closed"):
        channel.write(b"more")


def test_closing_one_ends_its_command_and_no_other(relay: RelayStreams) -> None:
    first, second = (relay.open(python(ECHO), timeout_s=TIMEOUT_S) for _ in range(2))
    first.close()
    eventually("the end of one", lambda: len(relay_process().children(recursive=True)) == 1)
    assert first.read() == b""
    second.write(b"hello")
    assert read(second, 5) == b"hello"


def test_the_end_of_the_relay_ends_all_it_started(relay: RelayStreams) -> None:
    fork = (
        HERE
        + "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True); time.sleep(600)"
    )
    relay.open(python(fork), timeout_s=TIMEOUT_S)
    eventually("both", lambda: len(relay_process().children(recursive=True)) == 2)
    started = relay_process().children(recursive=True)
    relay.close()
    assert relay.has_ended
    _, alive = psutil.wait_procs(started, timeout=TIMEOUT_S)
    assert alive == []


def test_a_relay_that_is_killed_ends_what_it_started_and_is_told(relay: RelayStreams) -> None:
    told = threading.Event()
    relay._on_end = told.set
    channel = relay.open(python(DEAF), timeout_s=TIMEOUT_S)
    started = relay_process().children(recursive=True)
    relay_process().kill()
    assert told.wait(TIMEOUT_S)
    _, alive = psutil.wait_procs(started, timeout=TIMEOUT_S)
    assert alive == []
    relay.give_up()
    with pytest.raises(WayLost, match="lost together with gate, through which it was reached"):
        channel.read()
    with pytest.raises(LaunchError, match="the relay ended"):
        relay.open(python(ECHO), timeout_s=TIMEOUT_S)


def test_the_silence_of_a_relay_is_not_that_of_a_host_behind_it(relay: RelayStreams) -> None:
    """Else a gateway that falls silent would not be blamed before the hosts behind it."""
    node = NodePlan(node_rank=1, host=Host(name="a", slots=1), is_local=False, devices=(), ranks=())
    link = Link(
        node,
        connect=lambda node: relay.open(python(DEAF), timeout_s=TIMEOUT_S),
        window=threading.BoundedSemaphore(1),
    )
    link.start(lambda item, at_s: None)
    eventually("the link", lambda: link.is_open)
    eventually("silence of the host", lambda: link.silent_s() > 0.5)
    process = relay_process()
    process.suspend()
    eventually("silence of the relay", lambda: relay.silent_s() > 2.2)
    assert link.silent_s() < 2.0
    process.resume()
    eventually("silence of the host only", lambda: link.silent_s() > 2.2)
    link.close()


def test_the_end_of_a_relay_is_held_back_until_its_gateway_was_given_up(relay: RelayStreams) -> None:
    channel = relay.open(python(DEAF), timeout_s=TIMEOUT_S)
    ends: list[WayLost] = []

    def wait() -> None:
        try:
            channel.read()
        except WayLost as error:
            ends.append(error)

    reader = threading.Thread(target=wait)
    reader.start()
    relay_process().kill()
    eventually("the end of the relay", lambda: relay.has_ended)
    reader.join(0.5)
    assert not ends
    relay.give_up()
    reader.join(TIMEOUT_S)
    assert len(ends) == 1
