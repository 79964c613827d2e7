"""Checkpoints at a URL: fsspec's file systems in memory and on the disk.

What is said here was tried with S3's protocol, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest

import dslaunch
from dslaunch import CheckpointError
from dslaunch.runtime.checkpoint.files.reader import CheckpointReader
from dslaunch.runtime.checkpoint.preemption import last_words
from dslaunch.runtime.checkpoint.storage.folder_store import FolderStore
from dslaunch.runtime.checkpoint.storage.store import LATEST, MANIFEST, Store
from dslaunch.runtime.checkpoint.storage.url_store import UrlStore, open_store
from dslaunch.runtime.errors import without_credentials
from tests.runtime.models import assert_same_bits, make_config, make_model, snapshot, train_engine
from tests.runtime.ranks import Ranks


def _round_trip(rank: int, url: str) -> None:
    config = make_config(stage=2, steps_per_print=0, checkpoint={"keep_last": 2})
    engine, *_ = dslaunch.initialize(model=make_model(), config=config)
    states = []
    for step, tag in enumerate(("a", "b", "b", "c")):
        train_engine(engine, steps=1, first=step)
        assert engine.save_checkpoint(url, tag)
        states.append(snapshot(engine.state_dict()))
    store = open_store(url)
    assert (store.tags(), store.latest()) == (["b", "c"], "c")
    other, *_ = dslaunch.initialize(model=make_model(seed=5), config=config)
    path, _ = other.load_checkpoint(url, "b")
    assert path == f"{store.where}/b"
    assert_same_bits(snapshot(other.state_dict()), states[2])
    other.load_checkpoint(url)
    assert_same_bits(snapshot(other.state_dict()), states[3])
    assert other.global_steps == 4


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_checkpoint_at_a_url_is_read_back(ranks: Ranks, tmp_path: Path, scheme: str) -> None:
    ranks(_round_trip, f"{scheme}://{tmp_path}/run", world_size=1)


URL = "memory://key:se@cret@bucket/run?signature=secret"


def test_what_may_be_a_secret_in_a_url_is_in_no_message() -> None:
    store = open_store(URL)
    assert (store.place, store.where) == (URL, "memory://***@bucket/run?***")
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(store, "a")
    assert "memory://***@bucket/run?***/a is no checkpoint" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"^nosuch://\*\*\*@bucket/x: "):
        open_store("nosuch://key:secret@bucket/x")
    assert "secret" not in last_words(URL, 143)
    plain = "give a path, or s3://bucket/run@2, see https://a.b/c#d; what?"
    assert without_credentials(plain) == plain


def test_a_url_of_files_is_the_folder(tmp_path: Path) -> None:
    store = open_store(f"file://{tmp_path}/run")
    assert isinstance(store, FolderStore)
    assert store.root == tmp_path / "run"


def test_a_url_that_nobody_opens_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"nosuch://bucket.*a URL whose fsspec package is installed"):
        open_store("nosuch://bucket")


# ---- a save that is killed


class Killed(BaseException):
    """In place of a signal: what is in memory must stay."""


class Mortal:
    """A file system that dies before its n-th change."""

    _CHANGES = ("open", "pipe_file", "cp_file", "rm_file", "rm", "makedirs")

    def __init__(self, fs: Any, at: int) -> None:
        self._fs, self._at = fs, at
        self.seen = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._fs, name)
        if name not in self._CHANGES:
            return value

        def counted(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or "wb" in args:
                self.seen += 1
                if self.seen == self._at:
                    raise Killed
            return value(*args, **kwargs)

        return counted


def _save(store: Store, tag: str, content: bytes) -> None:
    folder = store.partial_of(tag)
    store.begin(tag)
    with store.stream(f"{folder}/shard", capacity=len(content)) as stream:
        stream.write(content)
    store.put(f"{folder}/{MANIFEST}", content)
    store.publish(folder, tag, is_latest=False)
    store.put(LATEST, tag.encode())


def _content(store: Store, tag: str) -> bytes:
    """What is in the checkpoint, whose files must all be of one save."""
    folder = store.folder_of(tag)
    manifest, shard = store.get(f"{folder}/{MANIFEST}"), store.get(f"{folder}/shard")
    assert manifest == shard
    return manifest


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A folder in the memory of this process."""
    yield f"memory://{tmp_path}"
    fsspec.filesystem("memory").rm(str(tmp_path), recursive=True)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_save_at_a_url_that_is_killed_at_any_point_leaves_what_was_there(url: str, is_new: bool) -> None:
    tag = "b" if is_new else "a"
    outcomes = []
    for at in range(1, 100):
        store = open_store(f"{url}/{at}")
        assert isinstance(store, UrlStore)
        _save(store, "a", b"old")
        mortal = store._fs = Mortal(store._fs, at)
        with suppress(Killed):
            _save(store, tag, b"new")
        is_done = mortal.seen < at
        after = open_store(f"{url}/{at}")
        latest = str(after.latest())
        assert latest in after.tags()
        assert set(after.tags()) <= {"a", tag}
        for one in after.tags():
            assert _content(after, one) == b"old" if one != tag else b"new"
        outcomes.append(_content(after, latest))
        _save(after, tag, b"newer")  # what was left does not disturb
        assert _content(after, tag) == b"newer"
        assert after.files(f".{tag}.partial") == []
        if is_done:
            break
    assert outcomes[0] == b"old"
    assert outcomes[-1] == b"new"
    assert outcomes == sorted(outcomes, reverse=True)  # old until it is new


def test_a_tag_at_a_url_can_be_removed(url: str) -> None:
    store = open_store(url)
    _save(store, "a", b"x")
    store.remove("a")
    store.remove("a")
    assert store.tags() == []
