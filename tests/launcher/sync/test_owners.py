"""Whose files are in a folder that is sent to: a sender's own, another sender's, the host's."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dslaunch.launcher.sync import origin
from dslaunch.launcher.sync.origin import SyncOrigin, origin_of
from dslaunch.launcher.wire.frames import Problem, Synced
from tests.launcher.sync.pair import HostHere, sync, tree_of


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return folder(tmp_path / "here", a=b"a", shared=b"of here")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return folder(tmp_path / "other", b=b"b")


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


def folder(path: Path, **files: bytes) -> Path:
    path.mkdir(exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


def brought(host: HostHere) -> Synced:
    assert isinstance(host.end, Synced), host.end
    return host.end


def refused(host: HostHere) -> str:
    assert isinstance(host.end, Problem), host.end
    return host.end.message


def test_what_another_sender_wrote_is_neither_changed_nor_removed(
    here: Path, other: Path, there: Path
) -> None:
    (here / "deep").mkdir()
    brought(*sync(here, there))
    before = tree_of(there)
    brought(*sync(other, there))
    assert tree_of(there) == {**before, b"b": ("file", 0o644, b"b")}
    folder(other, shared=b"of the other", a=b"a")
    message = refused(*sync(other, there))
    assert f"shared there was sent from {here} of " in message
    assert "give each sender a folder of its own, as with cwd= in the hostfile" in message
    assert (there / "shared").read_bytes() == b"of here"
    (other / "shared").unlink()
    brought(*sync(other, there))  # a is equal, and stays the first one's
    for name in ("a", "b"):
        (other / name).unlink()
    brought(*sync(other, there))
    assert tree_of(there) == before
    (here / "a").unlink()
    folder(here, shared=b"newer")
    (here / "deep").rmdir()
    assert brought(*sync(here, there)).num_removed == 2
    assert tree_of(there) == {b"shared": ("file", 0o644, b"newer")}


def test_what_was_taken_over_by_force_is_the_last_ones(here: Path, other: Path, there: Path) -> None:
    brought(*sync(here, there))
    folder(other, shared=b"of the other")
    brought(*sync(other, there, is_forced=True))
    folder(here, shared=b"newer", a=b"newer")
    assert f"shared there was sent from {other} of " in refused(*sync(here, there))
    assert (there / "shared").read_bytes() == b"of the other"
    assert (there / "a").read_bytes() == b"a"
    (here / "shared").unlink()
    brought(*sync(here, there))
    assert (there / "shared").read_bytes() == b"of the other"


@pytest.mark.parametrize("kind", ["file", "link", "folder"])
def test_what_was_found_there_is_the_hosts(here: Path, there: Path, kind: str) -> None:
    """Equal or not: times say nothing."""
    make: Callable[[Path], object] = {
        "file": lambda path: path.write_bytes(b"same"),
        "link": lambda path: path.symlink_to("same"),
        "folder": lambda path: path.mkdir(),
    }[kind]
    there.mkdir()
    for place in (here, there):
        make(place / "found")
        if kind != "link":
            (place / "found").chmod(0o755 if place == here else 0o700)
            os.utime(place / "found", (2e9, 2e9))
    before = os.lstat(there / "found")
    (end,) = (brought(*sync(here, there)),)
    assert end.notes == (
        [
            "the mode there stays another one than here: found, which was not sent from here "
            "(--sync_force sets it)"
        ]
        if kind == "file"
        else []
    )
    if kind == "folder":
        (here / "found").rmdir()
    else:
        (here / "found").unlink()
        (here / "found").symlink_to("changed")
        assert "found there was not sent from here, or changed there since" in refused(*sync(here, there))
        (here / "found").unlink()
    brought(*sync(here, there))
    assert os.lstat(there / "found").st_mode == before.st_mode
    assert os.lstat(there / "found").st_ino == before.st_ino


def test_a_users_edit_that_is_equal_to_the_next_version_stays_the_users(here: Path, there: Path) -> None:
    brought(*sync(here, there))
    for place in (here, there):
        folder(place, a=b"fixed on both")
    brought(*sync(here, there))
    (here / "a").unlink()
    brought(*sync(here, there))
    assert (there / "a").read_bytes() == b"fixed on both"


def record_of(there: Path) -> Path:
    return there / ".dslaunch/sent"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda old: [1, [row[:-1] for row in old[2]]],
            "of an older dslaunch, which did not keep who sent what",
        ),
        (lambda old: [3, *old[1:]], "of another version of dslaunch"),
        (lambda old: [2, old[1]], "cannot be read"),
        (lambda old: [2, old[1], [row[:3] for row in old[2]]], "cannot be read"),
        (lambda old: [2, [], old[2]], "cannot be read"),
        (lambda old: {"2": 1}, "of another version of dslaunch"),
        (lambda old: 2, "cannot be read"),
        (lambda old: [2, old[1], [["../outside", *row[1:]] for row in old[2]]], "cannot be read"),
    ],
)
def test_a_record_that_does_not_say_who_sent_what_is_said_to_be_so(
    here: Path, there: Path, change: Callable[[list[object]], object], words: str
) -> None:
    outside = there.parent / "outside"
    outside.write_bytes(b"a")
    brought(*sync(here, there))
    record_of(there).write_text(json.dumps(change(json.loads(record_of(there).read_text()))))
    before = tree_of(there)
    folder(here, shared=b"newer")
    (here / "a").unlink()
    message = refused(*sync(here, there))
    assert "(the record there " in message
    assert words in message
    assert tree_of(there) == before
    (note,) = brought(*sync(here, there, is_forced=True)).notes
    assert words in note
    assert (there / "a").read_bytes() == outside.read_bytes() == b"a"
    folder(here, shared=b"newest")
    brought(*sync(here, there))


def test_a_record_that_is_too_long_for_one_is_not_read(here: Path, there: Path) -> None:
    brought(*sync(here, there))
    with record_of(there).open("wb") as file:
        file.truncate(1 << 40)
    (here / "a").unlink()
    (note,) = brought(*sync(here, there)).notes
    assert note.startswith("the record there cannot be read: ")
    assert (there / "a").exists()
    assert record_of(there).stat().st_size < 10_000


@pytest.mark.parametrize(
    ("name", "words"),
    [(".dslaunch", "is no folder"), (".dslaunch/lock", "is no file"), (".dslaunch/coming", "is no folder")],
)
@pytest.mark.parametrize("kind", ["link", "pipe", "other"])
def test_what_stands_where_a_record_is_kept_is_named(
    here: Path, there: Path, tmp_path: Path, name: str, words: str, kind: str
) -> None:
    other = folder(tmp_path / "other", lock=b"theirs")
    brought(*sync(here, there))
    path = there / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if kind == "link":
        path.symlink_to(other / "lock" if path.name == "lock" else other)
    elif kind == "pipe":
        os.mkfifo(path)
    elif path.name == "lock":
        path.mkdir()
    else:
        path.touch()
    message = refused(*sync(here, there))
    assert f"{name} there {words}; remove it there" in message
    assert tree_of(other) == {b"lock": ("file", 0o644, b"theirs")}


def test_a_sender_is_a_folder_of_a_user_on_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = folder(tmp_path / "first")
    (tmp_path / "link").symlink_to("first")
    one = origin_of(bytes(first))
    assert origin_of(bytes(tmp_path / "link")) == one
    keys = [one.key, origin_of(bytes(folder(tmp_path / "second"))).key]
    for name, value in (
        ("getuid", lambda: 4711),
        ("uname", lambda: os.uname_result(["Linux", "n2", "", "", ""])),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, value)
            keys.append(origin_of(bytes(first)).key)
    monkeypatch.setattr(origin, "_machine_id", lambda: "reinstalled")
    keys.append(origin_of(bytes(first)).key)
    assert len(set(keys)) == 5
    assert one.words.startswith(f"{first} of ")
    assert one.words.endswith(f" on {os.uname().nodename}")


def mounted(tmp_path: Path, *lines: str) -> str:
    (tmp_path / "mountinfo").write_text(
        "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + "".join(f"{one}\n" for one in lines)
    )
    return str(tmp_path)


def test_a_folder_on_a_server_is_one_sender_on_every_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def at(path: str, hostname: str, *lines: str) -> SyncOrigin:
        with monkeypatch.context() as patch:
            patch.setattr(os, "uname", lambda: os.uname_result(["Linux", hostname, "", "", ""]))
            return origin_of(path.encode(), proc=mounted(tmp_path, *lines))

    whole = "30 22 0:50 / /home rw - nfs4 nas:/export/home rw"
    part = "30 22 0:50 / /mnt/a\\040b rw - nfs4 nas:/export/home/ada rw"
    bound = "31 22 0:50 /ada /mine rw - nfs4 nas:/export/home rw"
    keys = {
        at("/home/ada/job", "login1", whole).key,
        at("/home/ada/job", "login2", whole).key,
        at("/mnt/a b/job", "login3", part).key,
        at("/mine/job", "login4", whole, bound).key,
    }
    assert len(keys) == 1
    elsewhere = [
        at("/home/ada/job", "login1").key,
        at("/home/ada/job", "login2").key,
        at("/home/ada/job", "login1", whole, "32 30 8:2 / /home/ada rw - ext4 /dev/sdb1 rw").key,
        at("/home/bob/job", "login1", whole).key,
        at("/home/ada/job", "login1", whole.replace("nas", "nas2")).key,
    ]
    assert len({*keys, *elsewhere}) == 5  # the disk that is mounted over the server's folder is login1's own
