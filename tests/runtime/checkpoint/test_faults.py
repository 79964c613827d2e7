"""Disks that are full, gone or damaged: one line that names the file on every rank, and nothing is lost."""

from __future__ import annotations

import io
import logging
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import CheckpointError
from dslaunch.runtime.checkpoint.files.format import TRAINING_FILE
from dslaunch.runtime.checkpoint.files.manifest import FileSpan, Manifest, digest
from dslaunch.runtime.checkpoint.files.reader import CheckpointReader
from dslaunch.runtime.checkpoint.files.writer import METADATA, make_metadata
from dslaunch.runtime.checkpoint.storage.folder_store import FolderStore
from dslaunch.runtime.checkpoint.storage.store import MANIFEST
from dslaunch.runtime.checkpoint.storage.url_store import open_store
from tests.runtime.models import assert_same_bits, make_config, make_model, train_engine
from tests.runtime.ranks import Ranks, process_group
from tests.small_disk import small_disk_at

TMPFS_BYTES = 3 << 20
SHARE = 1 << 20  # more than what a rank writes of Wide


class Wide(nn.Module):
    """86 thousand parameters: 0.6 MB of a checkpoint on each of two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 290), nn.Linear(290, 290), nn.Linear(290, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y


def _make(**changes: Any) -> Any:
    config = make_config(stage=2, bf16={"enabled": True}, steps_per_print=0, **changes)
    return dslaunch.initialize(model=make_model(Wide), config=config)[0]


def _train(engine: Any, *, first: int) -> None:
    train_engine(engine, steps=1, first=first, dtype=torch.bfloat16)


def _state(engine: Any) -> dict[str, Tensor]:
    state = {name: value.clone() for name, value in engine.state_dict().items()}
    for sub_buffer, states in zip(engine.optimizer.sub_buffers, engine.optimizer.states, strict=True):
        state |= {f"{sub_buffer.label} {kind}": shard.clone() for kind, shard in states.items()}
    return state


def _tensors(folder: Path, tag: str) -> dict[str, Tensor]:
    reader = CheckpointReader(open_store(folder), tag)
    reader.verify()
    return {name: reader.tensor(name) for name in reader.tensors()}


def _hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


# ---- saves that cannot be written


def _fill(folder: Path, *, left: int) -> Path:
    """Leave so many bytes of the file system free."""
    filler = folder / "filler"
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free - left))
    return filler


Undo = Callable[[], object]
Fault = Callable[[int, Path], Undo]  # of a rank and the folder of checkpoints; returns what ends it


def _full(rank: int, root: Path) -> Undo:
    """No space from the beginning."""
    return _fill(root.parent, left=0).unlink if rank == 0 else _nothing


def _full_for_one(rank: int, root: Path) -> Undo:
    """Space for the shard of one rank."""
    return _fill(root.parent, left=SHARE).unlink if rank == 0 else _nothing


def _full_later(rank: int, root: Path) -> Undo:
    """When the shards are there, there is no space for the rest."""
    put = FolderStore.put
    fillers: list[Path] = []

    def late(self: FolderStore, name: str, data: bytes) -> None:
        if not fillers:
            fillers.append(_fill(root.parent, left=0))
        put(self, name, data)

    FolderStore.put = late  # type: ignore[method-assign]

    def undo() -> None:
        FolderStore.put = put  # type: ignore[method-assign]
        for filler in fillers:
            filler.unlink()

    return undo


def _vanishing(rank: int, root: Path) -> Undo:
    """The folder is gone when the shards are there."""
    publish, elsewhere = FolderStore.publish, root.with_name("elsewhere")

    def late(self: FolderStore, folder: str, tag: str, *, is_latest: bool) -> None:
        root.rename(elsewhere)
        publish(self, folder, tag, is_latest=is_latest)

    FolderStore.publish = late  # type: ignore[method-assign]

    def undo() -> None:
        FolderStore.publish = publish  # type: ignore[method-assign]
        if rank == 0:
            elsewhere.rename(root)

    return undo


def _read_only(rank: int, root: Path) -> Undo:
    if rank != 0:
        return _nothing
    _remount(root, "ro")
    return lambda: _remount(root, "rw")


def _remount(root: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(root.parent)], check=True)


def _nothing() -> None:
    pass


FAULTS: tuple[Fault, ...] = (_full, _full_for_one, _full_later, _vanishing, _read_only)


def _one_fault(engine: Any, root: Path, fault: Fault) -> str:
    torch.distributed.barrier()
    undo = fault(engine.global_rank, root)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(root)
    torch.distributed.barrier()
    undo()
    torch.distributed.barrier()
    return str(caught.value)


def _faulty_saves(rank: int, folder: str) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    """Return what each says, the state at the end, and that of an undisturbed run."""
    root = Path(folder) / "disk" / "checkpoints"
    plain, engine = _make(), _make()
    said = []
    _train(engine, first=0)
    engine.save_checkpoint(root, "good")
    for step, fault in enumerate(FAULTS, start=1):
        said.append(_one_fault(engine, root, fault))
        _train(engine, first=step)
        if rank == 0:
            assert FolderStore(root).latest() == "good"
            assert _tensors(root, "good")
    for step in range(len(FAULTS) + 1):
        _train(plain, first=step)
    engine.save_checkpoint(root, "last")
    return said, _state(engine), _state(plain)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of TMPFS_BYTES."""
    with small_disk_at(tmp_path / "disk", f"size={TMPFS_BYTES}") as folder:
        yield folder


@pytest.mark.slow
def test_a_save_that_cannot_be_written_names_the_file_everywhere_and_changes_nothing(
    ranks: Ranks, tmp_path: Path, small_disk: Path
) -> None:
    root = small_disk / "checkpoints"
    expected = (
        (f"checkpoint {root}/global_step1 cannot be written on rank 0: ", f"'{root}"),
        (f"checkpoint {root}/global_step2 cannot be written on rank ", ".distcp'"),
        (f"checkpoint {root}/global_step3 cannot be written on rank 0: ", ".metadata'"),
        (f"checkpoint {root}/global_step4 cannot be written on rank 0: ", "/.global_step4.partial'"),
        (f"checkpoint {root}/global_step5 cannot be written on rank 0: ", "Read-only file system: "),
    )
    both = ranks(_faulty_saves, str(tmp_path), world_size=2)
    for said, state, undisturbed in both:
        for message, (begin, sub_buffer) in zip(said, expected, strict=True):
            assert message.startswith(begin)
            assert sub_buffer in message
            assert message.endswith("; what was saved before is still there")
            assert "\n" not in message
        assert_same_bits(state, undisturbed)
    assert both[0][0] == both[1][0]
    assert _hidden(root) == []  # the space is free again
    assert set(_tensors(root, "good")) == set(_tensors(root, "last"))


# ---- machines that lose what is not on the disk


def test_nothing_gets_its_name_before_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves the page cache alone, a power cut does not: then only the order of fsync
    and rename counts.
    """
    root, synced, named = tmp_path / "checkpoints", set[Path](), list[str]()
    fsync = os.fsync

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink())

    def noted(move: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def do(old: Path, new: Path) -> Path:
            inside = [old, *old.rglob("*")] if old.is_dir() else [old]
            assert {path for path in inside if path not in synced} == set(), f"to be called {new}"
            assert not named or (root / named[-1]).parent in synced  # what was named before, too
            synced.discard(Path(new).parent)
            named.append(str(Path(new).relative_to(root)))
            synced.update(Path(new) / path.relative_to(old) for path in inside)
            return move(old, new)

        return do

    with process_group(0, 1, str(tmp_path / "store")):
        engine = _make()
        monkeypatch.setattr(os, "fsync", noted_fsync)
        monkeypatch.setattr(Path, "rename", noted(Path.rename))
        monkeypatch.setattr(Path, "replace", noted(Path.replace))
        engine.save_checkpoint(root, "tag")
    assert root in synced
    assert [name for name in named if not name.startswith(".tag.partial/")][-2:] == ["tag", "latest"]
    assert named[-3] == ".tag.partial/manifest.json"


# ---- checkpoints that are damaged


def _flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 0x10
    path.write_bytes(data)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a byte of a shard": ("__1_0.distcp", lambda path: _flip(path, 0.5)),
    "the last byte of a shard": ("__0_0.distcp", lambda path: _flip(path, 0.999999)),
    "a byte of .metadata": (".metadata", lambda path: _flip(path, 0.3)),
    "a byte of training.pt": ("training.pt", lambda path: _flip(path, 0.6)),
    "a byte of the manifest": ("manifest.json", lambda path: _flip(path, 0.5)),
    "a digit in the manifest": ("manifest.json", lambda path: _count_up(path)),
    "a missing shard": ("__1_0.distcp", lambda path: path.unlink()),
    "a shard cut off": ("__0_0.distcp", _cut),
    "a manifest cut off": ("manifest.json", _cut),
    "an empty manifest": ("manifest.json", lambda path: path.write_bytes(b"")),
}


def _count_up(path: Path) -> None:
    """Still JSON, and not what was written."""
    text = path.read_text()
    assert '"global_steps":2' in text
    path.write_text(text.replace('"global_steps":2', '"global_steps":3'))


def _damaged_loads(rank: int, folder: str) -> list[tuple[str, list[str]]]:
    """Return for each damage what a load of its tag says, and the warnings of one without a tag."""
    root, engine = Path(folder) / "checkpoints", _make()
    whole = Path(folder) / "whole"
    _train(engine, first=0)
    engine.save_checkpoint(root)
    state = _state(engine)
    _train(engine, first=1)
    engine.save_checkpoint(root)
    found = []
    for name, damage in DAMAGES.values():
        if rank == 0:
            shutil.copytree(root / "global_step2", whole)
            damage(root / "global_step2" / name)
        torch.distributed.barrier()
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(root, "global_step2")
        with _warnings() as warnings:
            path, _ = engine.load_checkpoint(root)
        assert path == str(root / "global_step1")
        assert_same_bits(_state(engine), state)
        found.append((str(caught.value), warnings))
        torch.distributed.barrier()
        if rank == 0:
            shutil.rmtree(root / "global_step2")
            whole.rename(root / "global_step2")
        torch.distributed.barrier()
    for content in (b"\0\xff", b"", b"../elsewhere", b"global_step9"):
        if rank == 0:
            (root / "latest").write_bytes(content)
        torch.distributed.barrier()
        with _warnings() as warnings:
            path, _ = engine.load_checkpoint(root)
        assert path == str(root / "global_step2")
        found.append((str(root / "latest"), warnings))
        torch.distributed.barrier()
    return found


@contextmanager
def _warnings() -> Iterator[list[str]]:
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger("dslaunch").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("dslaunch").removeHandler(handler)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_an_error_with_its_tag_and_passed_over_without(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks(_damaged_loads, str(tmp_path), world_size=2)
    damages = list(DAMAGES.items())
    for (what, (name, _)), (error, warnings), (other, none) in zip(damages, first, second, strict=False):
        assert f"{tmp_path}/checkpoints/global_step2/{name} " in error, what
        assert "load another" in error or "cannot be read" in error, what
        assert other == error
        assert len(warnings) == 1, what
        assert warnings[0] == f"{error}; trying global_step1, the one before"
        assert none == []  # rank 0 tells it
    for _, warnings in first[len(damages) :]:
        assert len(warnings) == 1
        assert "; trying global_step" in warnings[0]


# ---- checkpoints that another program made


class Runs:
    """A pickle that runs a program when it is read by one that trusts it."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.parametrize("name", [METADATA, TRAINING_FILE])
def test_a_file_that_would_run_a_program_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    """Its digests are right: who can write a file can write those."""
    trace, saved = tmp_path / "trace", io.BytesIO()
    torch.save({"mine": Runs(f"touch {trace}")}, saved)
    files = {METADATA: make_metadata([]), TRAINING_FILE: saved.getvalue()}
    if name == METADATA:
        files[METADATA] = pickle.dumps(Runs(f"touch {trace}"))
    spans = {one: (FileSpan(0, len(data), digest(data)),) for one, data in files.items()}
    manifest = Manifest(
        tag="tag",
        version="",
        torch_version="",
        written_at="",
        world_size=1,
        zero_stage=0,
        global_steps=0,
        files=spans,
    )
    (tmp_path / "tag").mkdir()
    for one, data in {**files, MANIFEST: manifest.to_json()}.items():
        (tmp_path / "tag" / one).write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        CheckpointReader(open_store(tmp_path), "tag").training()
    said = str(caught.value)
    assert said.startswith(f"{tmp_path}/tag/{name} cannot be read: ")
    assert f"{os.system.__module__}.system" in said
    assert not trace.exists()


def test_a_manifest_that_is_nested_too_deep_is_a_damaged_one(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read: RecursionError"):
        CheckpointReader(open_store(tmp_path), "deep")
