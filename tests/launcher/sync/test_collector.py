"""Files that come back: where they go, and that nothing is overwritten, or written elsewhere."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import time
from pathlib import Path

import pytest

from dslaunch.launcher.node.files.collecting import Collecting
from dslaunch.launcher.sync.collector import Collector
from dslaunch.launcher.sync.manifest import walk
from dslaunch.launcher.wire.frames import (
    Chunk,
    Collect,
    Collected,
    Decoder,
    Found,
    Frame,
    ProtocolError,
    encode,
)
from dslaunch.launcher.wire.manifest import pack_piece


class Host:
    name = "node1"
    is_over = False

    def __init__(self) -> None:
        self.asked: Collect | None = None

    def send(self, *frames: Frame) -> None:
        for frame in frames:
            assert isinstance(frame, Collect)
            self.asked = frame


def collect(collector: Collector, host: Host) -> Collected:
    """What is in the current folder, as another host sends it."""
    said: queue.SimpleQueue[Frame] = queue.SimpleQueue()
    collector.ask(host)
    assert host.asked is not None
    collecting = Collecting(host.asked, said.put)
    until = time.monotonic() + 30
    while True:
        frame = Decoder().feed(encode(said.get(timeout=max(0.0, until - time.monotonic()))))[0]
        if isinstance(frame, Found):
            collector.receive_name(host, frame)
        elif isinstance(frame, Chunk):
            collector.receive_piece(host, frame.data)
            collecting.grant(len(frame.data))
        else:
            assert isinstance(frame, Collected)
            collector.end(host, frame)
            return frame


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "job"
    path.mkdir()
    monkeypatch.chdir(path)
    return path


def names_in(place: Path) -> list[str]:
    """But for the mark that keeps them from being sent."""
    files = (one for one in place.rglob("*") if one.is_file() and one.name != ".dslaunchignore")
    return sorted(str(one.relative_to(place)) for one in files)


def test_files_come_back_with_names_modes_and_times(job: Path, tmp_path: Path) -> None:
    (job / "logs/inner").mkdir(parents=True)
    (job / "logs/inner/a.txt").write_text("a")
    (job / "run.sh").write_bytes(os.urandom(3_000_000))
    (job / "run.sh").chmod(0o750)
    (job / "empty.txt").touch()
    with open(os.path.join(bytes(job), b"\xff\n.txt"), "wb") as file:
        file.write(b"bytes")
    (job / "other.bin").touch()
    os.mkfifo(job / "pipe.txt")
    host = Host()
    collector = Collector(["**/*.txt", "run.sh", "*.none", "logs"], bytes(tmp_path / "back"))
    end = collect(collector, host)
    back = tmp_path / "back/node1"
    assert end.num_of_pattern == [3, 1, 0, 1]
    assert end.problems == ["pipe.txt is no file"]
    assert names_in(back) == sorted(["logs/inner/a.txt", "run.sh", "empty.txt", "\udcff\n.txt"])
    assert (back / "run.sh").read_bytes() == (job / "run.sh").read_bytes()
    assert (back / "run.sh").stat().st_mode & 0o777 == 0o750
    assert (back / "run.sh").stat().st_mtime_ns == (job / "run.sh").stat().st_mtime_ns
    assert collector.summary.startswith("collected 4 files, 2.9 MiB, of 1 host into ")
    assert collector.summary.endswith("; no file matches *.none on any host")


def test_nothing_from_before_is_overwritten(job: Path, tmp_path: Path) -> None:
    place = tmp_path / "back"
    for number, text in enumerate(("first", "first", "second", "third")):
        (job / "a.txt").write_text(text)
        collector = Collector(["a.txt"], bytes(place))
        collect(collector, Host())
        assert len(collector.renamed) == (number > 1)
    texts = {name: (place / "node1" / name).read_text() for name in names_in(place / "node1")}
    assert texts == {"a.txt": "first", "a.txt.1": "second", "a.txt.2": "third"}


def test_another_attempt_of_the_same_job_writes_its_own_files_again(job: Path, tmp_path: Path) -> None:
    collector = Collector(["a.txt"], bytes(tmp_path / "back"))
    for text in ("first", "second"):
        collector.begin()
        (job / "a.txt").write_text(text)
        collect(collector, Host())
    assert names_in(tmp_path / "back") == ["node1/a.txt"]
    assert (tmp_path / "back/node1/a.txt").read_text() == "second"


def test_what_was_collected_is_not_collected_again(job: Path) -> None:
    (job / "a.txt").write_text("a")
    for _ in range(2):
        collect(Collector(["**/*.txt"], bytes(job / "back")), Host())
    assert names_in(job) == ["a.txt", "back/node1/a.txt"]


@pytest.mark.parametrize("pattern", ["out/**", "out", "**", "**/*", "out/**/*.txt"])
def test_links_to_folders_are_not_followed(job: Path, tmp_path: Path, pattern: str) -> None:
    """Two that lead back up would be 2 ** 40 ways, and one may lead to all data of a site."""
    (job / "out/run").mkdir(parents=True)
    (job / "out/run/a.txt").write_text("a")
    for name in ("loop", "again"):
        (job / "out" / name).symlink_to(".")
    (job / "out/run/up").symlink_to("..")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/all.txt").touch()
    (job / "out/data").symlink_to(tmp_path / "data")
    (job / "out/file.txt").symlink_to("run/a.txt")
    end = collect(Collector([pattern], bytes(tmp_path / "back")), Host())
    assert names_in(tmp_path / "back/node1") == ["out/file.txt", "out/run/a.txt"]
    assert not end.problems


def test_a_link_in_a_pattern_is_followed(job: Path, tmp_path: Path) -> None:
    (job / "run").mkdir()
    (job / "run/a.txt").touch()
    (job / "latest").symlink_to("run")
    collect(Collector(["latest/**", "./run//*.txt"], bytes(tmp_path / "back")), Host())
    assert names_in(tmp_path / "back/node1") == ["latest/a.txt", "run/a.txt"]


@pytest.mark.parametrize("pattern", [".", "./", "./**", "./*", "**/", "**"])
def test_the_whole_folder_of_a_job(job: Path, tmp_path: Path, pattern: str) -> None:
    (job / "logs").mkdir()
    (job / "logs/a.txt").touch()
    end = collect(Collector([pattern], bytes(tmp_path / "back")), Host())
    assert names_in(tmp_path / "back/node1") == ["logs/a.txt"]
    assert not end.problems


@pytest.mark.parametrize("pattern", ["out", "out/**", "**/out/**", "out/*"])
def test_what_is_no_file_in_a_folder_that_comes_whole_is_named(
    job: Path, tmp_path: Path, pattern: str
) -> None:
    (job / "out").mkdir()
    os.mkfifo(job / "out/pipe")
    (job / "out/gone").symlink_to("nowhere")
    (job / "out/itself").symlink_to("itself")
    (job / "out/long").symlink_to("n" * 300)
    (job / "out/file").touch()
    end = collect(Collector([pattern], bytes(tmp_path / "back")), Host())
    assert end.problems == [f"out/{name} is no file" for name in ("gone", "itself", "long", "pipe")]
    assert names_in(tmp_path / "back/node1") == ["out/file"]


def test_files_may_come_into_the_folder_of_the_job(job: Path) -> None:
    (job / "a.txt").write_text("a")
    collect(Collector(["*.txt"], bytes(job)), Host())
    assert names_in(job) == ["a.txt", "node1/a.txt"]


@pytest.mark.parametrize(
    "name", ["../out", "a/../../out", "/", "", ".", "a//b", "a\0b", "/../etc/passwd", "a/" * 3000 + "a"]
)
def test_a_name_that_leads_out_of_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    collector, host = Collector(["*"], bytes(tmp_path / "back")), Host()
    collector.ask(host)
    with pytest.raises(ProtocolError, match="no name below a folder"):
        collector.receive_name(host, Found(name, 0o644, 0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("mode", "umask", "expected"),
    [
        (0o106777, 0o022, 0o755),
        (0o4755, 0o077, 0o700),
        (-1, 0o022, 0o755),
        (0o640, 0o027, 0o640),
        (1 << 70, 0, 0),
    ],
)
def test_a_mode_from_a_host_is_one_that_is_made_here(
    tmp_path: Path, mode: int, umask: int, expected: int
) -> None:
    """A host that lies leaves no file here that runs as its user, and none that others may write to."""
    collector, host = Collector(["*"], bytes(tmp_path / "back")), Host()
    collector.ask(host)
    before = os.umask(umask)
    try:
        collector.receive_name(host, Found("a", mode, 0))
        collector.end(host, Collected([1], []))
    finally:
        os.umask(before)
    assert (tmp_path / "back/node1/a").stat().st_mode & 0o7777 == expected
    assert collector.problems == []


@pytest.mark.parametrize("mtime_ns", [10**30, -(10**30), 1 << 62])
def test_a_time_that_no_file_can_have_is_left_out(tmp_path: Path, mtime_ns: int) -> None:
    collector, host = Collector(["*"], bytes(tmp_path / "back")), Host()
    collector.ask(host)
    collector.receive_name(host, Found("a", 0o644, mtime_ns))
    collector.receive_piece(host, pack_piece(b"data"))
    collector.end(host, Collected([1], []))
    assert (tmp_path / "back/node1/a").read_bytes() == b"data"
    assert collector.problems == []


def remove(folder: Path) -> None:
    """Also one that is too deep for Python."""
    subprocess.run(["rm", "-rf", str(folder)], check=True)


@pytest.mark.parametrize("name", ["a/" * 1900 + "a", "b" * 300, "c/" + "d" * 255])
def test_a_name_that_is_too_deep_or_too_long_here_ends_nothing(tmp_path: Path, name: str) -> None:
    collector, host = Collector(["*"], bytes(tmp_path / "back")), Host()
    collector.ask(host)
    for one in (name, "after"):
        collector.receive_name(host, Found(one, 0o644, 0))
        collector.receive_piece(host, pack_piece(b"data"))
    collector.end(host, Collected([2], []))
    assert (tmp_path / "back/node1/after").read_bytes() == b"data"
    if "b" not in name:
        assert (tmp_path / "back/node1" / name).read_bytes() == b"data"
    else:
        assert len(collector.problems) == 1
        assert "File name too long" in collector.problems[0]
    left = subprocess.run(["find", str(tmp_path), "-name", "*-part"], check=True, capture_output=True)
    assert left.stdout == b""
    remove(tmp_path / "back")


def test_what_lies_deep_in_a_host_comes_and_what_cannot_be_read_is_named(job: Path, tmp_path: Path) -> None:
    deep = "out/" + "d/" * 1050
    os.makedirs("out")
    os.chdir("out")
    for _ in range(1050):
        os.mkdir("d")
        os.chdir("d")
    Path("a.txt").write_text("deep")
    os.chdir(job)
    for patterns in (["out"], ["**/a.txt"]):
        place = tmp_path / f"back{len(patterns[0])}"
        end = collect(Collector(patterns, bytes(place)), Host())
        assert (place / "node1" / deep / "a.txt").read_text() == "deep", end
        remove(place)
    remove(job / "out/d/d")
    with contextlib.ExitStack() as stack:
        scandir = os.scandir

        def closed(path: object) -> object:
            if path == b"out/d":
                raise PermissionError(13, "Permission denied", path)
            return scandir(path)  # type: ignore[call-overload]

        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(os, "scandir", closed)
        end = collect(Collector(["out"], bytes(tmp_path / "closed")), Host())
    assert end.problems == ["what is in out/d: Permission denied"]


def test_a_disk_that_is_full_here_is_named(tmp_path: Path) -> None:
    (tmp_path / "back").write_text("no folder")
    collector, host = Collector(["*"], bytes(tmp_path / "back")), Host()
    collector.ask(host)
    collector.receive_name(host, Found("a", 0o644, 0))
    collector.receive_piece(host, pack_piece(b"data"))
    collector.end(host, Collected([1], []))
    assert len(collector.problems) == 1
    assert "cannot be written" in collector.problems[0]
    assert collector.num_files == 0


def test_a_file_that_is_cut_off_is_not_kept(tmp_path: Path) -> None:
    collector, host = Collector(["*"], bytes(tmp_path / "back")), Host()
    collector.ask(host)
    collector.receive_name(host, Found("a", 0o644, 0))
    collector.receive_piece(host, pack_piece(b"half"))
    collector.lose(host)
    assert names_in(tmp_path) == []


def test_what_was_brought_is_not_sent_with_a_later_job(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever --collect_to that one has. A folder that was there before may have files of the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (job / "loss.txt").write_text("1")
    here = tmp_path / "here"
    (here / "own").mkdir(parents=True)
    (here / "own" / "notes.txt").touch()
    for place in ("deep/brought", "own"):
        collect(Collector(["loss.txt"], bytes(here / place)), Host())
        assert (here / place / "node1" / "loss.txt").read_text() == "1"
    sent = {one.path.decode() for one in walk(bytes(here)).entries}
    assert sent == {"deep", "deep/brought", "own", "own/notes.txt", "own/node1", "own/node1/loss.txt"}
