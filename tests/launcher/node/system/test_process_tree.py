from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from dslaunch.launcher.node.system import process_tree
from dslaunch.launcher.node.system.process_tree import descendants, kill_descendants

pytestmark = pytest.mark.slow
TIMEOUT_S = 20.0
PRELUDE = """
import os, signal, sys, threading, time
from dslaunch.launcher.node.system.process_tree import become_subreaper, descendants, die_with_parent
from dslaunch.launcher.node.system.process_tree import kill_descendants, reap

def wait_until(is_so):
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)
"""


def poll(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def is_alive(pid: int) -> bool:
    """Whether it runs: one that ended and was not collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Child:
    """A Python program below this process; it says what it has to say on stdout, line by line."""

    def __init__(self, program: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(program)], stdout=subprocess.PIPE, text=True
        )
        self.pid = self.process.pid

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        for _ in range(1000):
            if not kill_descendants(self.pid):
                break
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def start() -> Iterator[Callable[[str], Child]]:
    started: list[Child] = []

    def start_one(program: str) -> Child:
        started.append(Child(program))
        return started[-1]

    yield start_one
    for child in started:
        child.end()


Start = Callable[[str], Child]

DOUBLE_FORK = """
def escape():
    '''A process with its own session whose parents are gone, deaf to everything but SIGKILL.'''
    read, write = os.pipe()
    first = os.fork()
    if first:
        os.waitpid(first, 0)
        os.read(read, 1)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.write(f'{os.getpid()}\\n'); sys.stdout.flush()
    os.write(write, b'.')
    while True: time.sleep(100)
"""


def test_children_and_their_children_are_below_parents_first(start: Start) -> None:
    child = start("""
        if not os.fork():
            if not os.fork():
                time.sleep(100)
            time.sleep(100)
        time.sleep(100)
        """)
    poll(lambda: len(descendants(child.pid)) == 2)
    first, second = descendants(child.pid)
    assert descendants(first) == [second]
    assert descendants(second) == []
    assert child.pid in descendants(os.getpid())


def test_a_zombie_is_not_there_any_more(start: Start) -> None:
    child = start("""
        pid = os.fork()
        if not pid: os._exit(0)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        print('ended', flush=True)
        time.sleep(100)
        """)
    assert child.line() == "ended"
    assert descendants(child.pid) == []


def test_a_process_whose_first_thread_ended_is_still_there(start: Start) -> None:
    """The kernel shows it as a zombie, but its other threads run on."""
    child = start("""
        import ctypes
        pid = os.fork()
        if not pid:
            threading.Thread(target=time.sleep, args=(100,)).start()
            ctypes.CDLL(None).pthread_exit(None)
        print(pid, flush=True)
        time.sleep(100)
        """)
    pid = int(child.line())
    poll(lambda: not is_alive(pid))  # or so it seems
    assert descendants(child.pid) == [pid]


def test_a_name_with_brackets_and_spaces_does_not_confuse(start: Start) -> None:
    child = start("""
        pid = os.fork()
        if not pid:
            with open('/proc/self/comm', 'w') as file: file.write('a) Z 1 (b')
            print('named', flush=True)
            time.sleep(100)
        time.sleep(100)
        """)
    assert child.line() == "named"
    assert len(descendants(child.pid)) == 1


def test_a_subreaper_keeps_those_who_try_to_escape(start: Start) -> None:
    child = start(
        DOUBLE_FORK
        + textwrap.dedent("""
        become_subreaper()
        escape()
        time.sleep(100)
        """)
    )
    escaped = int(child.line())
    poll(lambda: descendants(child.pid) == [escaped])
    assert os.getsid(escaped) != os.getsid(child.pid)


def test_nothing_is_left_after_killing(start: Start) -> None:
    child = start(
        DOUBLE_FORK
        + textwrap.dedent("""
        become_subreaper()
        for _ in range(5): escape()
        assert len(descendants(os.getpid())) == 5
        assert kill_descendants(os.getpid(), signal.SIGTERM) == descendants(os.getpid())
        while kill_descendants(os.getpid()): reap()
        assert not descendants(os.getpid())
        print('none', flush=True)
        """)
    )
    escaped = [int(child.line()) for _ in range(5)]
    assert child.line() == "none"
    assert not any(is_alive(pid) for pid in escaped)


def test_a_process_that_may_not_be_signalled_does_not_save_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[int] = []

    def kill(pid: int, signum: int) -> None:
        sent.append(pid)
        raise PermissionError if pid == 11 else ProcessLookupError

    place = "dslaunch.launcher.node.system.process_tree"
    monkeypatch.setattr(f"{place}.descendants", lambda root, besides: [11, 12])
    monkeypatch.setattr("dslaunch.launcher.node.system.process_tree.os.kill", kill)
    assert kill_descendants(1) == [11, 12]
    assert sent == [11, 12]


def test_processes_that_take_long_to_end_are_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.getpid()
    looks = [[here], [here], [here] * 5, [here], []]
    said: list[str] = []
    clock = count()
    monkeypatch.setattr(process_tree, "kill_descendants", lambda root: looks.pop(0))
    monkeypatch.setattr(process_tree, "descendants", lambda root: [])
    monkeypatch.setattr(process_tree, "reap", list)
    fake = SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None)
    monkeypatch.setattr(process_tree, "time", fake)
    process_tree.end_descendants(said.append)
    name = Path("/proc/self/comm").read_text().strip()
    named = ", ".join([f"{name} (process {here})"] * 3)
    assert said == [f"waiting for the end of {named} and 2 others, to which SIGKILL was sent"]
    assert looks == []


def test_reaping_gives_each_end_once(start: Start) -> None:
    child = start("""
        pids = [os.fork() or os._exit(code) for code in (0, 3)]
        ended = []
        wait_until(lambda: ended.extend(reap()) or len(ended) == 2)
        assert sorted(os.WEXITSTATUS(status) for _, status in ended) == [0, 3]
        assert {pid for pid, _ in ended} == set(pids)
        assert reap() == []
        print('good', flush=True)
        """)
    assert child.line() == "good"


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_can_die_with_its_parent(signum: int, start: Start) -> None:
    child = start(f"""
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            die_with_parent(parent, {int(signum)})
            print(os.getpid(), flush=True)
            time.sleep(100)
        time.sleep(100)
        """)
    pid = int(child.line())
    child.process.kill()
    child.process.wait()
    poll(lambda: not is_alive(pid))


def test_a_process_whose_parent_died_before_it_asked_dies_at_once(start: Start) -> None:
    child = start("""
        become_subreaper()
        read, write = os.pipe()
        if not os.fork():
            parent = os.getpid()
            if not os.fork():
                wait_until(lambda: os.getppid() != parent)
                die_with_parent(parent, signal.SIGKILL)
                os.write(write, b'alive')
            os._exit(0)
        os.close(write)
        print(os.read(read, 10), flush=True)
        """)
    assert child.line() == "b''"
