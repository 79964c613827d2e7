"""What becomes of a folder that is synced: every kind of name and change, refusals, and what was cut off."""

from __future__ import annotations

import errno
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.node.files import sync_receiver
from dslaunch.launcher.node.files.sync_receiver import Receiver
from dslaunch.launcher.wire.frames import Frame, Problem, Synced, SyncOffer, SyncWant
from dslaunch.launcher.wire.manifest import Entry, WrongList, check, read_list, write_list
from tests.exhaustive import few
from tests.launcher.sync.pair import HostHere, sync, tree_of
from tests.small_disk import small_disk_at


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.fixture
def there(tmp_path: Path) -> Path:
    return tmp_path / "there"


def put(path: Path, data: bytes = b"x", mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def synced(*hosts: HostHere) -> Synced:
    for host in hosts:
        assert isinstance(host.end, Synced), host.end
    end = hosts[0].end
    assert isinstance(end, Synced)
    return end


def refused(host: HostHere) -> str:
    assert isinstance(host.end, Problem), host.end
    assert host.end.exit_code == 3
    return host.end.message


def num_wanted(host: HostHere) -> int:
    return sum(len(frame.contents) for frame in host.frames if type(frame).__name__ == "SyncWant")


def test_all_kinds_of_names_and_files_arrive_as_they_are(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        b"plain",
        b"\xff\xfe not utf-8",
        b"new\nline",
        b" blank ",
        b"-dash",
        "\u00e4\u00f6".encode(),
    ):
        with open(os.path.join(bytes(here), name), "wb") as file:
            file.write(name * 3)
    put(here / "empty", b"")
    put(here / "run.sh", b"#!/bin/sh\n", 0o755)
    put(here / "secret", b"secret", 0o600)
    put(here / "deep/er/still", b"deep")
    os.link(here / "deep/er/still", here / "second name")
    (here / "no files/in here").mkdir(parents=True)
    (here / "closed").mkdir()
    put(here / "closed/inside", b"inside", 0o400)
    (here / "closed").chmod(0o555)
    (here / "link").symlink_to("deep/er")
    (here / "dangling").symlink_to("/no/where")
    (here / "outwards").symlink_to("../..")
    with open(here / "sparse", "wb") as file:
        file.truncate(3 << 20)
        file.seek(1 << 20)
        file.write(b"in the middle")
    put(here / "random", random.Random(1).randbytes(700_001))
    os.mkfifo(here / "pipe")
    with socket.socket(socket.AF_UNIX) as one:
        monkeypatch.chdir(here)
        one.bind("socket")
        (host,) = sync(here, there)
    synced(host)
    expected = tree_of_regular(here)
    assert tree_of(there) == expected
    assert (there / "random").stat().st_mtime_ns == (here / "random").stat().st_mtime_ns
    assert (there / "sparse").stat().st_blocks * 512 < 3 << 20
    (again,) = sync(here, there)
    assert synced(again) == Synced(False, 0, 0, [])
    assert num_wanted(again) == 0


def tree_of_regular(root: Path) -> dict[bytes, tuple[str, int, bytes]]:
    skipped = [root / "pipe", root / "socket"]
    for path in skipped:
        path.unlink()
    return tree_of(root)


Change = Callable[[Path], object]


@pytest.mark.parametrize(
    "change",
    (
        [
            lambda here: put(here / "a/file", b"other"),
            lambda here: put(here / "a/file", b"xyz"),  # of the same size
            lambda here: (here / "a/file").chmod(0o700),
            lambda here: (here / "a/file").unlink(),
            lambda here: shutil.rmtree(here / "a"),
            lambda here: (here / "a").rename(here / "c"),
            lambda here: ((here / "a/file").unlink(), (here / "a/file").symlink_to("x")),
            lambda here: ((here / "a/file").unlink(), put(here / "a/file/below", b"below")),
            lambda here: (shutil.rmtree(here / "a"), put(here / "a", b"a file now")),
            lambda here: (shutil.rmtree(here / "a"), (here / "a").symlink_to("b")),
            lambda here: ((here / "link").unlink(), (here / "link").symlink_to("b/file")),
            lambda here: ((here / "link").unlink(), put(here / "link", b"no link")),
            lambda here: ((here / "link").unlink(), put(here / "link/below", b"no link")),
            lambda here: (here / "a").chmod(0o700),
            lambda here: [put(here / f"many/{one}", b"copy") for one in range(5)],
            lambda here: put(here / ".gitignore", b"a\n"),
        ]
    ),
)
def test_a_change_here_is_made_there(here: Path, there: Path, change: Change) -> None:
    for name in ("a", "b"):
        put(here / name / "file", b"abc")
        put(here / name / "inner/other", name.encode())
    (here / "link").symlink_to("a/file")
    put(there / "of others", b"stays")
    synced(*sync(here, there))
    change(here)
    synced(*sync(here, there))
    expected = tree_of(here)
    if (here / ".gitignore").exists():
        expected = {name: one for name, one in expected.items() if name.split(b"/")[0] != b"a"}
    assert tree_of(there) == {**expected, b"of others": ("file", 0o644, b"stays")}


def test_what_is_there_under_another_name_is_not_sent_again(here: Path, there: Path) -> None:
    put(here / "old", random.Random(1).randbytes(100_000))
    synced(*sync(here, there))
    (here / "old").rename(here / "new")
    (host,) = sync(here, there)
    synced(host)
    assert num_wanted(host) == 0
    assert sorted(tree_of(there)) == [b"new"]


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_file_that_was_changed_there_is_named(here: Path, there: Path, is_forced: bool) -> None:
    for name in ("one", "two", "three"):
        put(here / name, b"first")
    synced(*sync(here, there))
    put(there / "two", b"theirs")
    os.utime(there / "two", (1, 1))  # old, by a clock that is wrong
    for name in ("one", "two"):
        put(here / name, b"second")
    (host,) = sync(here, there, is_forced=is_forced)
    if is_forced:
        synced(host)
        assert (there / "two").read_bytes() == b"second"
    else:
        assert f"--sync to {there}: two there was not sent from here, or changed there since" in refused(host)
        assert {one.name: one.read_bytes() for one in there.iterdir() if one.is_file()} == {
            "one": b"first",
            "two": b"theirs",
            "three": b"first",
        }


@pytest.mark.parametrize("name", ["changed", "new", "gone", "gone from a folder/file"])
@pytest.mark.parametrize("is_forced", [False, True])
def test_what_is_written_there_while_contents_come_is_not_overwritten(
    here: Path, there: Path, name: str, is_forced: bool
) -> None:
    class Edited(HostHere):
        """Its user writes a file when the comparison is over."""

        def _post(self, frame: Frame) -> None:
            if isinstance(frame, SyncWant):
                put(there / name, b"theirs")
            super()._post(frame)

    for one in ("changed", "gone", "gone from a folder/file", "same"):
        put(here / one, b"first")
    synced(*sync(here, there))
    put(here / "changed", b"second")
    put(here / "new", b"second")
    (here / "gone").unlink()
    shutil.rmtree(here / "gone from a folder")
    before = tree_of(there)
    (host,) = sync(here, there, is_forced=is_forced, hosts=Edited)
    if is_forced:
        synced(host)
        assert tree_of(there) == tree_of(here)
        return
    message = refused(host)
    assert f"{name} there was changed while this sync went on; save what is needed, and start" in message
    assert message.endswith("; nothing there was changed")
    assert tree_of(there) == {**before, name.encode(): ("file", 0o644, b"theirs")}
    (host,) = sync(here, there)
    if "gone" in name:
        assert synced(host).notes == [f"stays, for it was changed there: {name}"]
    else:
        assert f"{name} there was not sent from here, or changed there since" in refused(host)
    assert (there / name).read_bytes() == b"theirs"


def test_hard_links_there_are_replaced_and_removed_one_by_one(here: Path, there: Path) -> None:
    for one in ("a", "b", "c"):
        put(here / one, b"first")
    synced(*sync(here, there))
    for one in ("b", "c"):
        (there / one).unlink()
        os.link(there / "a", there / one)
    put(here / "a", b"second")
    put(here / "b", b"third")
    (here / "c").unlink()
    synced(*sync(here, there))
    assert tree_of(there) == tree_of(here)


def test_a_file_that_was_there_before_and_differs_is_named(here: Path, there: Path) -> None:
    put(here / "mine", b"ours")
    put(there / "mine", b"theirs")
    assert "mine there was not sent" in refused(sync(here, there)[0])
    assert (there / "mine").read_bytes() == b"theirs"


def test_what_was_removed_here_stays_there_if_it_was_changed_there(here: Path, there: Path) -> None:
    put(here / "a/kept")
    put(here / "a/gone")
    synced(*sync(here, there))
    put(there / "a/kept", b"results")
    shutil.rmtree(here / "a")
    end = synced(*sync(here, there))
    assert end.notes == ["stays, for it was changed there: a/kept"]
    assert sorted(tree_of(there)) == [b"a", b"a/kept"]
    assert synced(*sync(here, there)).notes == []  # it is theirs now


def test_a_folder_that_something_is_mounted_on_there_stays(here: Path, there: Path) -> None:
    put(here / "data/file")
    put(here / "other")
    synced(*sync(here, there))
    (there / "data/file").unlink()
    with small_disk_at(there / "data", "size=256k,mode=755"):
        shutil.rmtree(here / "data")
        (here / "other").unlink()
        assert synced(*sync(here, there)).num_removed == 2
        assert sorted(tree_of(there)) == [b"data"]
        synced(*sync(here, there))


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_folder_with_files_of_others_is_never_replaced(here: Path, there: Path, is_forced: bool) -> None:
    put(here / "name", b"a file")
    put(there / "name/data", b"data")
    message = refused(sync(here, there, is_forced=is_forced)[0])
    assert "name there was not sent" in message
    assert ("--sync_force" in message) == (not is_forced)
    assert (there / "name/data").read_bytes() == b"data"


@pytest.mark.parametrize("is_forced", [False, True])
def test_a_link_there_is_not_followed(here: Path, there: Path, tmp_path: Path, is_forced: bool) -> None:
    """Neither one that stands for a folder, nor one for a file."""
    put(here / "folder/file", b"ours")
    put(here / "file", b"ours")
    put(tmp_path / "outside/file", b"outside")
    there.mkdir()
    (there / "folder").symlink_to(tmp_path / "outside")
    (there / "file").symlink_to(tmp_path / "outside/file")
    (host,) = sync(here, there, is_forced=is_forced)
    assert tree_of(tmp_path / "outside") == {b"file": ("file", 0o644, b"outside")}
    if is_forced:
        synced(host)
        assert tree_of(there) == tree_of(here)
    else:
        assert "file, folder there were not sent" in refused(host)


def entry(path: str, kind: str = "f", **more: Any) -> Entry:
    digest = {"f": bytes(20), "d": b"", "l": b"x"}[kind]
    return Entry(os.fsencode(path), kind, 0o644, 1, 0, digest)._replace(**more)


@pytest.mark.parametrize(
    "entries",
    [
        [entry("../out")],
        [entry("/etc/passwd")],
        [entry("a", "d"), entry("a/../../out")],
        [entry("a", "d"), entry("a//b")],
        [entry("a", "l", digest=b"/etc"), entry("a/passwd")],  # through a link of the list itself
        [entry("a/b")],
        [entry("a"), entry("a")],
        [entry(".dslaunch", "d"), entry(".dslaunch/sent")],
        [entry("")],
        [entry(".")],
        [entry("a\0b")],
        [entry("a", mode=0o4755)],
        [entry("a", size=-1)],
        [entry("a", digest=b"short")],
        [entry("a", "l", digest=b"")],
        [entry("a")._replace(kind="x")],
    ],
)
def test_a_list_that_leads_out_of_the_folder_is_refused(entries: list[Entry], there: Path) -> None:
    with pytest.raises(WrongList):
        check(entries)
    said: list[Frame] = []
    data = write_list(entries)
    receiver = Receiver(
        SyncOffer(str(there), "no marker", False, len(data), "", "me", "here", 60.0), said.append
    )
    receiver.take(data)
    wait_for(lambda: any(isinstance(one, Problem) for one in said))
    receiver.end()
    assert not there.exists()


@pytest.mark.parametrize("data", [b"", b"no zlib", write_list([entry("a")])[:-3]])
def test_a_list_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(WrongList):
        read_list(data)


def wait_for(is_there: Callable[[], bool], timeout_s: float = 20.0) -> None:
    import time

    until = time.monotonic() + timeout_s
    while not is_there():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("root", ["/", "~/", "~/.", "relative"])
def test_no_root_and_no_home_is_written_to(here: Path, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(here.parent / "home"))
    (here.parent / "home").mkdir()
    put(here / "file")
    (host,) = sync(here, Path("/x"), hosts=at_place(root))
    assert "must be the absolute path of a folder, and neither / nor a home" in refused(host)


def at_place(root: str) -> type[HostHere]:
    class There(HostHere):
        def send(self, *frames: Frame) -> None:
            super().send(*(one._replace(root=root) if isinstance(one, SyncOffer) else one for one in frames))

    return There


class Full:
    """A file system on which the change of this number, and each behind it, finds no space."""

    TAKES_SPACE = ("write", "mkdir", "symlink", "rename", "open")

    def __init__(self, there: Path, number: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._there, self.left, self._code = str(there), number, code
        for name in self.TAKES_SPACE:
            monkeypatch.setattr(os, name, self._limited(name, getattr(os, name)))

    def _limited(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def work(*given: Any, **named: Any) -> Any:
            fd = given[0] if name == "write" else named.get("dir_fd", named.get("dst_dir_fd"))
            is_new = name != "open" or given[1] & os.O_CREAT
            if fd is not None and is_new and os.readlink(f"/proc/self/fd/{fd}").startswith(self._there):
                self.left -= 1
                if self.left <= 0 and name != "rename":
                    raise OSError(self._code, os.strerror(self._code))
            return act(*given, **named)

        return work


@pytest.mark.slow
@pytest.mark.parametrize("code", few([errno.ENOSPC, errno.EDQUOT], lambda code: code == errno.ENOSPC))
def test_a_full_disk_leaves_everything_as_it_was_and_is_not_kept_full(
    here: Path, there: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it is noticed: the state is the one before or the one after, and the next sync needs no space
    that this one has taken for nothing.
    """

    def build() -> None:
        for root in (here, there):
            shutil.rmtree(root, ignore_errors=True)
        put(here / "a", b"first")
        put(here / "gone/file", b"first")
        synced(*sync(here, there))
        put(here / "a", b"second")
        shutil.rmtree(here / "gone")
        for name in ("b", "new/deep/c", "new/copy of c"):
            put(here / name, random.Random(name[-1]).randbytes(300_000))
        (here / "new/link").symlink_to("c")
        put(here / "new/empty", b"")

    number = 1
    while True:
        build()
        before = tree_of(there)
        with monkeypatch.context() as patch:
            full = Full(there, number, code, patch)
            (host,) = sync(here, there)
        if isinstance(host.end, Synced) and full.left > 0:
            break
        if isinstance(host.end, Problem):
            assert os.strerror(code) in host.end.message, number
            if "nothing there was changed" in host.end.message:
                assert tree_of(there) == before, number
            else:
                assert tree_of(there) == tree_of(here), number
            assert not [one for one in os.listdir(there / ".dslaunch/coming") if "." in one], number
        synced(*sync(here, there))
        assert tree_of(there) == tree_of(here), number
        number += 1
    assert number > 20


def test_what_a_full_disk_has_left_does_not_stop_a_smaller_sync(here: Path, there: Path) -> None:
    with small_disk_at(there, "size=1m,mode=755"):
        for name in "abc":
            put(here / name, random.Random(name).randbytes(500_000))
        assert "No space left on device; nothing there was changed" in refused(sync(here, there)[0])
        (there / ".dslaunch/coming/0123.part").write_bytes(bytes(600_000))  # as an older dslaunch has left it
        for name in "ab":
            (here / name).unlink()
        put(here / "d", random.Random("d").randbytes(300_000))
        synced(*sync(here, there))
        assert tree_of(there) == tree_of(here)


def test_a_disk_without_room_for_another_name_is_left_as_it_was(here: Path, there: Path) -> None:
    with small_disk_at(there, "nr_inodes=30,mode=755"):
        put(here / "first")
        synced(*sync(here, there))
        before = tree_of(there)
        put(here / "first", b"newer")
        for number in range(20):
            put(here / f"folder{number}/deep/empty", b"")
        assert "No space left on device; nothing there was changed" in refused(sync(here, there)[0])
        assert tree_of(there) == before
        shutil.rmtree(here / "folder0")
        for number in range(4, 20):
            shutil.rmtree(here / f"folder{number}")
        synced(*sync(here, there))
        assert tree_of(there) == tree_of(here)


def test_a_folder_that_cannot_be_written_is_named(
    here: Path, there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As root there is none, so the kernel's answer is put in its mouth."""
    put(here / "a")
    there.mkdir()
    mkdir = os.mkdir

    def no(path: Any, *more: Any, **named: Any) -> None:
        if path == b".dslaunch":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        mkdir(path, *more, **named)

    monkeypatch.setattr(os, "mkdir", no)
    assert "Read-only file system; nothing there was changed" in refused(sync(here, there)[0])
    put(there / "a")
    monkeypatch.setattr(sync_receiver, "SyncRecord", sync_receiver.SyncRecord)
    synced(*sync(here, there))  # all is there: nothing has to be written


# A kill at any moment. Each change of the file system is one; the process is gone right before it.

CHANGES = ("rename", "unlink", "rmdir", "mkdir", "symlink", "open", "fchmod", "utime", "ftruncate", "chmod")


def killed_after(number: int, here: Path, there: Path) -> bool:
    """Sync in a process that ends before its change of that number; whether it came so far."""
    pid = os.fork()
    if not pid:
        try:
            left = [number]

            def counted(change: Callable[..., Any]) -> Callable[..., Any]:
                def work(*given: Any, **named: Any) -> Any:
                    left[0] -= 1
                    if not left[0]:
                        os._exit(9)
                    return change(*given, **named)

                return work

            for name in CHANGES:
                setattr(os, name, counted(getattr(os, name)))
            sync(here, there)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.slow
@pytest.mark.parametrize("step", few((1, 3, 6, 9), lambda step: step in (1, 6)))
def test_a_kill_leaves_whole_files_and_the_next_sync_goes_on(here: Path, there: Path, step: int) -> None:
    """Every 11th moment, beginning with another one each time."""
    old, new = b"old" * 1000, b"new" * 100_000

    def build() -> None:
        for root in (here, there):
            shutil.rmtree(root, ignore_errors=True)
        here.mkdir()
        for name in ("changed", "gone/inside", "kind", "mode", "a/b/c", "same"):
            put(here / name, old)
        (here / "link").symlink_to("changed")
        synced(*sync(here, there))
        put(here / "changed", new)
        put(here / "new", new)
        put(here / "copy/of new", new)
        put(here / "a/b/c", b"third")
        (here / "mode").chmod(0o755)
        shutil.rmtree(here / "gone")
        (here / "kind").unlink()
        put(here / "kind/below", b"third")
        (here / "link").unlink()
        (here / "link").symlink_to("new")

    number = step
    while True:
        build()
        was_killed = killed_after(number, here, there)
        for name, (kind, _, content) in tree_of(there).items():
            if kind == "file":
                assert content in (old, new, b"third"), (number, name, content[:20])
        put(here / "changed", b"fourth")  # what is there is neither the last nor the next one
        (host,) = sync(here, there)
        assert isinstance(host.end, Synced), (number, host.end)
        assert tree_of(there) == tree_of(here), number
        assert sorted(os.listdir(there / ".dslaunch/coming")) == []
        if not was_killed:
            break
        number += 11
    assert number > 22
