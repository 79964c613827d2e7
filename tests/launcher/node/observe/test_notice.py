"""Whether a host is told to go: by a file, or by a command, which may be missing or hang."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from dslaunch.launcher.node.observe import notice
from dslaunch.launcher.node.observe.notice import NoticeWatch, notice_of
from dslaunch.launcher.node.system.process_tree import descendants, reap

WITHIN_S = 20.0


class Watched:
    """A watch, and what it has said."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, file: str | None = None, command: str | None = None
    ):
        monkeypatch.setattr(notice, "LOOK_EVERY_S", 0.01)
        self.left: list[str] = []
        self.noted: list[str] = []
        self._watch = NoticeWatch(
            file=file,
            command=command,
            env=dict(os.environb),
            leave=self.left.append,
            note=self.noted.append,
        )
        self.close = self._watch.close

    def look_until(self, is_there: str) -> None:
        """Until `left` or `noted` has something; children are collected meanwhile, as an agent does it."""
        deadline = time.monotonic() + WITHIN_S
        while not getattr(self, is_there) and time.monotonic() < deadline:
            reap()
            self._watch.look(time.monotonic())
            time.sleep(0.002)
        assert getattr(self, is_there)

    def look_for(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            reap()
            self._watch.look(time.monotonic())
            time.sleep(0.002)


def test_a_file_that_appears(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watched = Watched(monkeypatch, file=f"{tmp_path}/going")
    watched.look_for(0.1)
    assert watched.left == []
    (tmp_path / "going").symlink_to("nowhere")
    watched.look_until("left")
    watched.look_for(0.1)
    assert watched.left == [f"there is {tmp_path}/going"], "said once"


def test_a_command_that_ends_with_0_though_another_collects_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    watched = Watched(monkeypatch, command=f"echo noise; echo more >&2; test -e '{tmp_path}/going'")
    watched.look_for(0.2)
    assert (watched.left, watched.noted) == ([], [])
    (tmp_path / "going").touch()
    watched.look_until("left")
    assert watched.left == ["--notice_command ended with 0"]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("/no/such/program", "there is no such command"),
        ("/etc", "it cannot be run"),
        ("kill -9 $$", "it was killed"),
    ],
)
def test_a_command_that_says_nothing_is_noted_once(
    monkeypatch: pytest.MonkeyPatch, command: str, why: str
) -> None:
    watched = Watched(monkeypatch, command=command)
    watched.look_until("noted")
    watched.look_for(0.1)
    watched.close()
    assert watched.noted == [f"--notice_command: {why}; nothing is known of a notice by it"]
    assert watched.left == []


def test_a_command_that_hangs_is_ended_with_what_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notice, "COMMAND_TIMEOUT_S", 0.2)
    watched = Watched(monkeypatch, command="sleep 600 & sleep 600")
    watched.look_until("noted")
    assert "it did not end within 0.2 s" in watched.noted[0]
    watched.close()
    deadline = time.monotonic() + WITHIN_S
    while "sleep" in _below() and time.monotonic() < deadline:
        reap()
    assert "sleep" not in _below()


def _below() -> list[str]:
    names = []
    for pid in descendants(os.getpid()):
        try:
            names.append(Path(f"/proc/{pid}/comm").read_text().strip())
        except OSError:
            continue
    return names


def test_a_look_at_a_host_that_may_join(tmp_path: Path) -> None:
    (tmp_path / "going").touch()
    assert notice_of(f"{tmp_path}/going", None) == f"there is {tmp_path}/going"
    assert notice_of(f"{tmp_path}/not", "exit 1") == ""
    assert notice_of(f"{tmp_path}/not", "exit 0") == "--notice_command ended with 0"
    assert notice_of(None, None) == ""
