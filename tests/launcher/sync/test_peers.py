"""Contents from host to host: who serves whom, and what if one lies, is silent or goes away."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dslaunch.launcher.node.files import sync_peer
from dslaunch.launcher.node.files.sync_contents import SyncContents
from dslaunch.launcher.node.files.sync_folder import Folder
from dslaunch.launcher.node.files.sync_peer import PeerServer, PeerTimes
from dslaunch.launcher.sync.sender import Tree
from dslaunch.launcher.wire.frames import Frame, Synced, SyncFrom, SyncWant
from dslaunch.launcher.wire.manifest import FILE, Entry, new_digest
from tests.exhaustive import few
from tests.launcher.sync.pair import HostHere, sync, tree_of

ALWAYS = Tree(above_hosts=0, above_bytes=0)
SIZE = 3_000_000


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    here = tmp_path / "here"
    here.mkdir()
    for name in "abc":
        (here / name).write_bytes(random.Random(name).randbytes(SIZE // 3))
    (here / "zero").write_bytes(b"")
    return here


@pytest.fixture
def many(tmp_path: Path) -> list[Path]:
    return [tmp_path / f"there{number}" for number in range(7)]


def assert_all_there(hosts: list[HostHere], here: Path, many: list[Path]) -> None:
    for host, there in zip(hosts, many, strict=True):
        assert isinstance(host.end, Synced), host.end
        assert tree_of(there) == tree_of(here)


def wants(host: HostHere) -> list[SyncWant]:
    return [frame for frame in host.frames if isinstance(frame, SyncWant)]


def test_the_launcher_sends_to_one_of_many(here: Path, many: list[Path]) -> None:
    hosts = sync(here, *many, tree=ALWAYS)
    assert_all_there(hosts, here, many)
    large = [host for host in hosts if host.num_bytes > SIZE]
    assert len(large) == 1
    assert sum(host.num_bytes for host in hosts) < 1.1 * SIZE
    assert all(len(wants(host)) == 1 for host in hosts)
    assert sum(isinstance(frame, SyncFrom) for host in hosts for frame in host.frames) == 6


def test_few_hosts_and_few_bytes_come_from_the_launcher(here: Path, many: list[Path]) -> None:
    for tree in (Tree(), Tree(above_hosts=0), Tree(above_hosts=7, above_bytes=0)):
        hosts = sync(here, *many, tree=tree)
        assert not any(isinstance(frame, SyncFrom) for host in hosts for frame in host.frames)
        for there in many:
            (there / "a").unlink()


def test_hosts_that_have_everything_serve_the_others(here: Path, many: list[Path]) -> None:
    """Unless the others ask before it is known."""
    sync(here, many[0])
    hosts = sync(here, *many, tree=ALWAYS)
    assert_all_there(hosts, here, many)
    assert hosts[0].num_bytes < SIZE / 10
    assert sum(host.num_bytes for host in hosts) < 1.1 * SIZE


class Liar:
    """In place of the host that others are told to take from."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._serve = serve
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            connection, _ = self._server.accept()
            with connection:
                connection.settimeout(10)
                try:
                    self._serve(connection)
                except OSError:
                    continue

    def instead(self) -> type[HostHere]:
        port = self._server.getsockname()[1]

        class Misled(HostHere):
            def send(self, *frames: Frame) -> None:
                super().send(
                    *(one._replace(port=port) if isinstance(one, SyncFrom) else one for one in frames)
                )

        return Misled


def lie(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    for _ in range(3):
        connection.sendall(b"\1" + bytes(SIZE // 3))


def stop_in_the_middle(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.sendall(b"\1" + bytes(1000))


def have_nothing(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.sendall(b"\0")


def hang_up(connection: socket.socket) -> None:
    pass


def be_silent(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    while connection.recv(1 << 16):
        pass


@pytest.mark.parametrize("serve", [lie, stop_in_the_middle, have_nothing, hang_up, be_silent])
def test_what_a_peer_does_not_give_comes_from_the_launcher(
    here: Path, many: list[Path], serve: Callable[[socket.socket], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_peer, "SILENT_S", 0.5)
    hosts = sync(here, *many[:3], tree=ALWAYS, hosts=Liar(serve).instead())
    assert_all_there(hosts, here, many[:3])
    problems = [one.problem for host in hosts for one in wants(host) if one.problem]
    assert len(problems) == 2
    assert len(set(problems)) == 1, problems


def test_a_peer_that_cannot_be_reached_is_given_up(
    here: Path, many: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unreachable(HostHere):
        def send(self, *frames: Frame) -> None:
            super().send(*(one._replace(port=1) if isinstance(one, SyncFrom) else one for one in frames))

    hosts = sync(here, *many[:3], tree=ALWAYS, hosts=Unreachable)
    assert_all_there(hosts, here, many[:3])
    assert any("cannot be reached at 127.0.0.1" in one.problem for host in hosts for one in wants(host))


def test_who_does_not_know_the_token_gets_nothing(here: Path, many: list[Path]) -> None:
    answers: list[bytes] = []

    class Asking(HostHere):
        def _post(self, frame: Frame) -> None:
            if isinstance(frame, SyncWant) and frame.port:
                with socket.create_connection(("127.0.0.1", frame.port)) as stranger:
                    stranger.settimeout(10)
                    stranger.sendall(b"0" * 32 + (1).to_bytes(4, "big") + bytes(20))
                    try:
                        answers.append(stranger.recv(100))
                    except ConnectionResetError:
                        answers.append(b"")
            super()._post(frame)

    assert_all_there(sync(here, *many[:2], tree=ALWAYS, hosts=Asking), here, many[:2])
    assert answers == [b"", b""]


def test_a_host_that_cannot_listen_is_no_peer(
    here: Path, many: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(port: int) -> socket.socket:
        raise OSError(1, "not permitted")

    monkeypatch.setattr(sync_peer, "listen_on_all", refused)
    hosts = sync(here, *many[:3], tree=ALWAYS)
    assert_all_there(hosts, here, many[:3])
    assert all(host.num_bytes > SIZE for host in hosts)


def test_two_hosts_with_one_folder_do_not_disturb_each_other(here: Path, many: list[Path]) -> None:
    """The second waits for the first, and finds everything there."""
    hosts = sync(here, many[0], many[0], many[0], tree=ALWAYS)
    assert_all_there(hosts, here, [many[0]] * 3)
    assert sorted(host.end.num_written for host in hosts if isinstance(host.end, Synced)) == [0, 0, 4]


def test_the_launchers_own_folder_is_left_alone(here: Path) -> None:
    before = tree_of(here)
    (host,) = sync(here, here)
    assert host.end == Synced(True, 0, 0, [])
    assert tree_of(here) == before
    assert not (here / ".dslaunch").exists()


class Serving:
    """One connection that is served, from contents that this test writes."""

    def __init__(self, there: Path, size: int, silent_s: float) -> None:
        self.data = random.Random(1).randbytes(size)
        digest = new_digest()
        digest.update(self.data)
        self.entry = Entry(b"a", FILE, 0o644, size, 0, digest.digest())
        (there / ".dslaunch/coming").mkdir(parents=True)
        self.folder = Folder(bytes(there), os.open(there, os.O_RDONLY))
        self.contents = SyncContents(self.folder, {self.entry.digest: size})
        self.server = PeerServer("t" * 32, self.contents, PeerTimes(1.0, 5.0, silent_s))
        self.client = socket.create_connection(("127.0.0.1", self.server.port))
        self.client.settimeout(20)
        self.client.sendall(b"t" * 32 + (1).to_bytes(4, "big") + self.entry.digest)

    def take(self, num_bytes: int) -> bytes:
        taken = b""
        while len(taken) < num_bytes and (piece := self.client.recv(num_bytes - len(taken))):
            taken += piece
        return taken

    def close(self) -> None:
        self.client.close()
        self.server.close()
        self.contents.give_up_current()
        self.folder.close()


def test_a_content_that_is_begun_anew_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its own source was lost: the file that was sent from has no name any more and does not grow."""
    one = Serving(tmp_path, 1_000_000, silent_s=20)
    one.contents.begin(one.entry)
    one.contents.write(one.data[:300_000])
    assert one.take(300_001) == b"\1" + one.data[:300_000]
    one.contents.give_up_current()
    one.contents.begin(one.entry)
    one.contents.write(one.data[:300_000])
    one.contents.write(one.data[300_000:])
    assert one.contents.end()
    assert one.take(700_000) == one.data[300_000:]
    one.close()


@pytest.mark.slow
def test_a_content_that_is_gone_ends_the_connection(tmp_path: Path) -> None:
    """Whatever is said of it: without an end, two hosts computed for nothing until the job ended."""
    one = Serving(tmp_path, 1_000_000, silent_s=2)
    one.contents.begin(one.entry)
    one.contents.write(one.data[:300_000])
    assert one.take(300_001) == b"\1" + one.data[:300_000]
    (part,) = (tmp_path / ".dslaunch/coming").iterdir()
    part.unlink()
    one.contents.write(one.data[300_000:600_000])
    part.touch()  # empty
    assert one.take(700_000) in (b"", one.data[300_000:600_000])
    one.close()


@pytest.mark.parametrize("limit_s", [1.0, 10.0, 60.0, 600.0])
def test_what_a_host_waits_for_its_peer_ends_before_the_launcher_gives_it_up(limit_s: float) -> None:
    assert sum(PeerTimes.within(limit_s)) < limit_s


@pytest.mark.parametrize("serve", few([be_silent, stop_in_the_middle], lambda serve: serve is be_silent))
def test_a_silent_peer_is_given_up_within_the_limit_of_the_job(
    here: Path, many: list[Path], serve: Callable[[socket.socket], None]
) -> None:
    hosts = sync(here, *many[:3], tree=ALWAYS, hosts=Liar(serve).instead(), limit_s=2.0)
    assert_all_there(hosts, here, many[:3])


def test_a_server_without_descriptors_does_not_compute_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Serving(tmp_path, 10, silent_s=20)
    paused: list[float] = []

    class NoDescriptors:
        def _accept(self) -> tuple[int, object]:
            if len(paused) > 1:
                one.server._is_closed = True
            raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(sync_peer.time, "sleep", paused.append)
        patch.setattr(one.server, "_server", NoDescriptors())
        one.server._accept()
    assert paused == [sync_peer.ACCEPT_AGAIN_S] * 2
    one.close()
