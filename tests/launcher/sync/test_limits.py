"""Which host is given up, and when: the one that stands still, not one that waits for it or for us."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from dslaunch.launcher.node.files.sync_folder import Folder
from dslaunch.launcher.node.files.sync_place import Trust
from dslaunch.launcher.node.files.sync_record import LockedOut, SyncRecord
from dslaunch.launcher.sync import sender as module
from dslaunch.launcher.sync.manifest import walk
from dslaunch.launcher.sync.sender import Sender
from dslaunch.launcher.wire.frames import Chunk, Frame, SyncWant
from tests.launcher.local_job import poll
from tests.launcher.sync.test_owners import folder

LIMIT_S = 100.0


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def opened(path: Path) -> Folder:
    return Folder(bytes(path), os.open(path, os.O_RDONLY))


def test_the_lock_is_waited_for_as_long_as_its_owner_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large folder takes as long as it takes; who stands still is named."""
    from dslaunch.launcher.node.files import sync_record

    first, second = opened(tmp_path), opened(tmp_path)
    owner = SyncRecord(first, Trust(), silent_s=1.0)
    clock = Clock()
    works_until, beats = clock.now + 5000, []

    class Working(Clock):
        def sleep(self, seconds: float) -> None:
            self.now += 1.0
            if self.now < works_until:
                os.utime(owner._lock, (self.now, self.now))

    working = Working()
    monkeypatch.setattr(sync_record, "time", working)
    second.beat = lambda: beats.append(working.now)
    with pytest.raises(
        LockedOut, match=f"process {os.getpid()} on .* is writing there, and nothing has moved for 75 s"
    ):
        SyncRecord(second, Trust(), silent_s=75.0)
    assert works_until + 70 < working.now < works_until + 80
    assert len(beats) > 5000  # so the launcher does not take it for the one that stands still
    owner.unlock()
    SyncRecord(second, Trust(), silent_s=1.0).unlock()
    first.close()
    second.close()


class Quiet:
    """A host that is sent something, and says nothing by itself."""

    def __init__(self, name: str) -> None:
        self.name, self.is_over = name, False
        self.frames: list[Frame] = []

    def send(self, *frames: Frame) -> None:
        self.frames += frames


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_host_that_waits_for_its_turn_is_not_given_up(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_SENDING", 1)
    here = folder(tmp_path / "here", a=os.urandom(3 << 20))
    sender = Sender(walk(bytes(here)), num_hosts=2, limit_s=LIMIT_S, fail=pytest.fail)
    hosts = [Quiet("n1"), Quiet("n2")]
    for host in hosts:
        sender.offer(host, str(tmp_path), [])
        sender.grant(host, len(sender._list))
        sender.want(host, SyncWant([0], 3 << 20, 0, [], ""))

    def served() -> list[str]:
        return [host.name for host in hosts if sum(isinstance(one, Chunk) for one in host.frames) > 1]

    poll(served, "neither host was sent contents")  # a thread sends them
    later = clock.now + LIMIT_S + 1  # the clock stands: the thread may still be filling the window
    stuck = [host.name for host in hosts if sender.is_stuck(host, later)]
    assert stuck == served()
    assert len(stuck) == 1
    for host in hosts:
        host.is_over = True
    sender.close()


def test_a_file_here_that_cannot_be_read_is_our_fault(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = folder(tmp_path / "here", a=b"a")
    sender = Sender(walk(bytes(here)), num_hosts=1, limit_s=LIMIT_S, fail=pytest.fail)
    hangs, is_over = threading.Event(), threading.Event()
    open_now = os.open

    def hanging(path: object, *more: object, **named: object) -> int:
        if path == bytes(here / "a"):
            hangs.set()
            is_over.wait(20)
        return open_now(path, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", hanging)
    host = Quiet("n1")
    sender.offer(host, str(tmp_path), [])
    sender.grant(host, len(sender._list))
    sender.want(host, SyncWant([0], 1, 0, [], ""))
    assert hangs.wait(20)
    assert sender.stuck_file(clock.now) == ""
    clock.now += LIMIT_S + 1
    assert not sender.is_stuck(host, clock.now)
    assert sender.stuck_file(clock.now) == str(here / "a")
    is_over.set()
    sender.close()
