"""A sender and receivers that speak to each other in this process, through frames as bytes."""

from __future__ import annotations

import queue
import time
from pathlib import Path

from dslaunch.launcher.node.files.sync_receiver import Receiver
from dslaunch.launcher.sync.manifest import walk
from dslaunch.launcher.sync.sender import DEFAULT_TREE, Sender, Tree
from dslaunch.launcher.wire.frames import (
    Chunk,
    Decoder,
    Frame,
    Problem,
    Synced,
    SyncFrom,
    SyncOffer,
    SyncWant,
    Took,
    encode,
)

WITHIN_S = 60.0


class HostHere:
    """A host whose folder is one of this machine."""

    def __init__(self, name: str, said: queue.SimpleQueue[tuple[HostHere, Frame]]) -> None:
        self.name = name
        self.is_over = False
        self._said = said
        self._receiver: Receiver | None = None
        self._decoder = Decoder()
        self.num_bytes = 0  # that were sent to it
        self.frames: list[Frame] = []
        self.end: Frame | None = None

    def send(self, *frames: Frame) -> None:
        data = b"".join(map(encode, frames))
        self.num_bytes += len(data)
        for frame in self._decoder.feed(data):
            self.take(frame)

    def take(self, frame: Frame) -> None:
        self.frames.append(frame)
        if isinstance(frame, SyncOffer):
            self._receiver = Receiver(frame, self._post)
        elif self._receiver is not None:
            if isinstance(frame, Chunk):
                self._receiver.take(frame.data)
            elif isinstance(frame, SyncFrom):
                self._receiver.take(frame)

    def _post(self, frame: Frame) -> None:
        self._said.put((self, Decoder().feed(encode(frame))[0]))

    def close(self) -> None:
        self.is_over = True
        if self._receiver is not None:
            self._receiver.end()


def sync(
    source: Path,
    *targets: Path,
    is_forced: bool = False,
    tree: Tree = DEFAULT_TREE,
    hosts: type[HostHere] = HostHere,
    limit_s: float = WITHIN_S,
) -> list[HostHere]:
    """Bring a folder to others; what became of each host is its `end`: Synced or Problem."""
    said: queue.SimpleQueue[tuple[HostHere, Frame]] = queue.SimpleQueue()
    failures: list[str] = []
    sender = Sender(
        walk(bytes(source)),
        num_hosts=len(targets),
        limit_s=limit_s,
        fail=failures.append,
        is_forced=is_forced,
        tree=tree,
    )
    there = [hosts(f"n{number}", said) for number in range(len(targets))]
    try:
        for host, target in zip(there, targets, strict=True):
            sender.offer(host, str(target), ["127.0.0.1"])
        until = time.monotonic() + WITHIN_S
        while any(host.end is None for host in there) and not failures:
            host, frame = said.get(timeout=max(0.0, until - time.monotonic()))
            if isinstance(frame, Took):
                sender.grant(host, frame.num_bytes)
            elif isinstance(frame, SyncWant):
                assert sender.want(host, frame) == ""
                host.frames.append(frame)
            elif isinstance(frame, Synced):
                sender.end(host, frame)
                host.end = frame
            elif isinstance(frame, Problem):
                host.is_over = True
                host.end = frame
        if failures:
            raise AssertionError(failures[0])
    finally:
        sender.close()
        for host in there:
            host.close()
    return there


def tree_of(root: Path) -> dict[bytes, tuple[str, int, bytes]]:
    """Everything in a folder but our own: kind, mode and content by name."""
    import os

    found: dict[bytes, tuple[str, int, bytes]] = {}
    for folder, folders, files in os.walk(bytes(root)):
        if folder == bytes(root) and b".dslaunch" in folders:
            folders.remove(b".dslaunch")
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode & 0o777
            key = os.path.relpath(path, bytes(root))
            if os.path.islink(path):
                found[key] = "link", 0, os.readlink(path)
            elif os.path.isdir(path):
                found[key] = "folder", mode, b""
            else:
                with open(path, "rb") as file:
                    found[key] = "file", mode, file.read()
    return found
