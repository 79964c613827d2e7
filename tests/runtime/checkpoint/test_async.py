"""A save beside training holds what was there when save_checkpoint() was called,
whatever happens meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import CheckpointError, ConfigError
from dslaunch.runtime.checkpoint import rank_notes
from dslaunch.runtime.checkpoint.files.reader import CheckpointReader
from dslaunch.runtime.checkpoint.files.snapshot import Memory, Snapshot
from dslaunch.runtime.checkpoint.storage.folder_store import FolderStore
from dslaunch.runtime.checkpoint.storage.url_store import open_store
from tests.exhaustive import few
from tests.runtime.models import assert_same_bits, make_config, make_model, train_engine
from tests.runtime.ranks import Ranks


class Clock:
    """Ten seconds a look; what happens at some of them."""

    def __init__(self, happens: dict[int, Callable[[], object]]) -> None:
        self.now, self._happens = 0, happens

    def monotonic(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += 10
        self._happens.get(self.now, int)()


def test_who_gives_signs_of_life_is_waited_for_and_who_gives_none_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = torch.distributed.HashStore()
    others = torch.distributed.PrefixStore("dslaunch/save/1", store)
    clock = Clock({20: lambda: others.set("alive/1", "1"), 40: lambda: others.set("done/1", "7")})
    monkeypatch.setattr(rank_notes, "_get_default_store", lambda: store)
    monkeypatch.setattr(rank_notes, "time", clock)
    notes = rank_notes.RankNotes(1, rank=0, world_size=2)
    assert notes.hear("done", 1) == 7
    with pytest.raises(CheckpointError, match=r"rank 1 has ended, .*: no sign of it for 30 s"):
        notes.hear("done", 1)
    assert clock.now == 90  # 30 and a look after the first look, whose sign is new to it


class Normed(nn.Module):
    """A forward changes its buffers, as those of batch normalization do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 15), nn.Linear(15, 1)
        self.register_buffer("mean", torch.zeros(15))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        self.mean.lerp_(h.detach().mean(0).to(self.mean.dtype), 0.5)
        self.calls += 1
        y: Tensor = self.last(h)
        return y


def _make(stage: int, *, bf16: bool = False, is_async: bool = True, **changes: Any) -> Any:
    config = make_config(
        stage=stage, bf16={"enabled": bf16}, checkpoint={"async_save": is_async}, steps_per_print=0, **changes
    )
    return dslaunch.initialize(model=make_model(Normed), config=config)[0]


def _tensors(folder: str | Path, tag: str) -> dict[str, Tensor]:
    reader = CheckpointReader(open_store(folder), tag)
    return {name: reader.tensor(name) for name in reader.tensors()}


@contextmanager
def _held_back() -> Iterator[threading.Event]:
    """The background does nothing until the event is set, or a caller has to wait for it."""
    may_go = threading.Event()
    take_rest = Snapshot.take_rest

    def held(self: Snapshot) -> None:
        assert may_go.wait(30.0)
        take_rest(self)

    Snapshot.take_rest = held  # type: ignore[method-assign]
    try:
        yield may_go
    finally:
        may_go.set()
        Snapshot.take_rest = take_rest  # type: ignore[method-assign]


def _let_go_when_waited_for(engine: Any, may_go: threading.Event) -> list[int]:
    """Have the copy made at the last moment: when a caller says that values are about to change."""
    asked = [0]
    before_change = engine._saver.before_change

    def late() -> None:
        asked[0] += 1
        may_go.set()
        before_change()

    engine._saver.before_change = late
    return asked


def test_a_load_waits_for_the_save_before_it(tmp_path: Path) -> None:
    engine = _make(0)
    train_engine(engine, steps=1)
    engine.save_checkpoint(tmp_path, "first")
    engine._saver.wait()
    train_engine(engine, steps=1)
    with _held_back() as may_go:
        engine.save_checkpoint(tmp_path, "second")
        wait = engine._saver.wait

        def let_go_and_wait() -> None:
            may_go.set()
            wait()

        engine._saver.wait = let_go_and_wait
        path, _ = engine.load_checkpoint(tmp_path)
    assert Path(path).name == "second"
    engine.destroy()


# ---- every way to change what is being saved


def _forward_only(engine: Any) -> None:
    engine(torch.ones(4, 7, dtype=engine.module.last.weight.dtype))


def _step(engine: Any) -> None:
    train_engine(engine, steps=1, first=1, dtype=engine.module.last.weight.dtype)


def _in_place(engine: Any) -> None:
    if engine.zero_optimization_stage() < 3:  # there it is refused
        with torch.no_grad():
            engine.module.first.weight.fill_(7.0)


def _gathered(engine: Any) -> None:
    weight = engine.module.first.weight
    with dslaunch.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.fill_(7.0)


def _set_param(engine: Any) -> None:
    weight = engine.module.first.weight
    dslaunch.zero.safe_set_full_fp32_param(weight, torch.full(weight.shape, 7.0))


def _set_state(engine: Any) -> None:
    weight = engine.module.first.weight
    dslaunch.zero.safe_set_full_optimizer_state(weight, torch.full(weight.shape, 7.0), "exp_avg")


def _set_own(engine: Any) -> None:
    weight = engine.module.first.weight
    own = dslaunch.zero.safe_get_local_optimizer_state(weight, "exp_avg_sq")
    dslaunch.zero.safe_set_local_optimizer_state(
        weight, torch.zeros(0) if own is None else torch.full_like(own, 7.0), "exp_avg_sq"
    )


def _load_weights(engine: Any) -> None:
    engine.load_state_dict({name: torch.full_like(value, 7) for name, value in engine.state_dict().items()})


def _offload(engine: Any) -> None:
    engine.offload_states()
    engine.reload_states()


def _change_groups(engine: Any) -> None:
    engine.optimizer.param_groups[0]["lr"] = 7.0


CHANGES: tuple[Callable[[Any], None], ...] = (
    _forward_only,
    _step,
    _in_place,
    _gathered,
    _set_param,
    _set_state,
    _set_own,
    _load_weights,
    _offload,
    _change_groups,
)


def _change_while_saving(rank: int, folder: str, stage: int, bf16: bool) -> None:
    engine = _make(stage, bf16=bf16)
    train_engine(engine, steps=1, dtype=engine.module.last.weight.dtype)
    engine.save_checkpoint(folder, "start")
    for change in CHANGES:
        engine.load_checkpoint(folder, "start")
        with _held_back() as may_go:
            before = engine._saver.before_change
            engine.save_checkpoint(folder, change.__name__)
            _let_go_when_waited_for(engine, may_go)
            change(engine)
            engine._saver.before_change = before
        engine._saver.wait()
    engine.destroy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "bf16"),
    few(
        [(0, True), (1, False), (2, True), (3, False)],
        lambda stage, bf16: stage in (0, 3),
    ),
)
def test_what_changes_while_a_save_is_under_way_is_not_in_it(
    ranks: Ranks, tmp_path: Path, stage: int, bf16: bool
) -> None:
    """The background begins as late as it can: when a caller says that values are about to change."""
    ranks(_change_while_saving, str(tmp_path), stage, bf16, world_size=2)
    start = _tensors(tmp_path, "start")
    groups = CheckpointReader(open_store(tmp_path), "start").training()["optimizer"]["groups"]
    for change in CHANGES:
        assert_same_bits(_tensors(tmp_path, change.__name__), start)
        reader = CheckpointReader(open_store(tmp_path), change.__name__)
        assert reader.training()["optimizer"]["groups"] == groups


BOTH_WAYS = [(1, False), (2, True), (3, True)]  # stage, and whether the model is in bfloat16


def _save_both_ways(rank: int, folder: str) -> None:
    for stage, bf16 in BOTH_WAYS:
        for is_async in (False, True):
            engine = _make(stage, bf16=bf16, is_async=is_async)
            dtype = engine.module.last.weight.dtype
            train_engine(engine, steps=2, dtype=dtype)
            engine.save_checkpoint(folder, f"{stage}-{is_async}")
            train_engine(engine, steps=2, first=2, dtype=dtype)
            engine.destroy()


def test_a_save_beside_training_is_equal_to_one_that_training_waits_for(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_save_both_ways, str(tmp_path), world_size=2)
    for stage, _ in BOTH_WAYS:
        assert_same_bits(_tensors(tmp_path, f"{stage}-True"), _tensors(tmp_path, f"{stage}-False"))


# ---- failures


def _fail_and_go_on(rank: int, folder: str) -> tuple[list[str], dict[str, Tensor], dict[str, Tensor]]:
    said = []
    plain = _make(2)
    train_engine(plain, steps=5)
    engine = _make(2)
    train_engine(engine, steps=1)
    blocked = Path(folder) / "file"
    blocked.write_text("where a folder should be")
    with _held_back() as may_go:
        engine.save_checkpoint(blocked)
        train_engine(engine, steps=0)
        may_go.set()
        engine._saver._current.save.thread.join()
    with pytest.raises(CheckpointError) as caught:
        train_engine(engine, steps=1, first=1)  # the step is done, and then it is told
    said.append(str(caught.value))
    train_engine(engine, steps=2, first=2)

    def broken(*args: object) -> Any:
        raise MemoryError("no memory for the copy")

    if rank == 1:  # one rank has no copy: the others must not wait for it
        take, Memory.take = Memory.take, broken  # type: ignore[method-assign]
    engine.save_checkpoint(Path(folder) / "good")
    if rank == 1:
        engine._saver._current.save.thread.join()
        Memory.take = take  # type: ignore[method-assign]
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(Path(folder) / "good")
    said.append(str(caught.value))
    train_engine(engine, steps=1, first=4)
    engine.save_checkpoint(Path(folder) / "good", "after")
    result = [_values(one) for one in (plain, engine)]
    engine.destroy()  # waits
    assert (Path(folder) / "good" / "after" / "manifest.json").exists()
    return said, result[0], result[1]


def _values(engine: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in engine.state_dict().items()}


def test_a_failure_is_told_after_the_next_step_on_every_rank_and_training_goes_on(
    ranks: Ranks, tmp_path: Path
) -> None:
    for said, plain, engine in ranks(_fail_and_go_on, str(tmp_path), world_size=2):
        assert said[0].startswith(f"checkpoint {tmp_path}/file/global_step1 cannot be written on rank 0: ")
        assert said[1].startswith(f"checkpoint {tmp_path}/good/global_step4 cannot be written on rank 1: ")
        assert "no memory for the copy" in said[1]
        assert_same_bits(engine, plain)


def _one_after_the_other(rank: int, folder: str) -> list[str]:
    engine = _make(1)
    seen: list[str] = []
    publish = FolderStore.publish

    def noted(self: FolderStore, folder: str, tag: str, *, is_latest: bool) -> None:
        seen.append(tag)
        publish(self, folder, tag, is_latest=is_latest)

    FolderStore.publish = noted  # type: ignore[method-assign]
    try:
        for number in range(3):
            engine.save_checkpoint(folder, f"tag{number}")
            seen.append(f"asked {number}")
        engine.destroy()
    finally:
        FolderStore.publish = publish  # type: ignore[method-assign]
    return [one for one in seen if one.startswith("tag")]


def test_saves_follow_each_other(ranks: Ranks, tmp_path: Path) -> None:
    order, others = ranks(_one_after_the_other, str(tmp_path), world_size=2)
    assert order == ["tag0", "tag1", "tag2"]
    assert others == []  # rank 0 does it


def test_async_save_with_nvme_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    ranks(_with_nvme, str(tmp_path), world_size=1)


def _with_nvme(rank: int, folder: str) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": folder}}
    config = make_config(checkpoint={"async_save": True}) | {"zero_optimization": zero}
    with pytest.raises(
        ConfigError, match='async_save with device "nvme" would need the host memory that nvme'
    ):
        dslaunch.initialize(model=make_model(Normed), config=config)


# ---- the end of a program, with a save under way

SCRIPT = """
import atexit, os, sys, torch, dslaunch
from dslaunch.runtime.checkpoint.files.snapshot import Snapshot
take = Snapshot.take_rest
def slow(self):
    import threading
    threading.main_thread().join(2.0)  # until the program is at its end
    take(self)
Snapshot.take_rest = slow
config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "checkpoint": {"async_save": True}}
other = os.fork()
for folder in sys.argv[1:] if other else sys.argv[2:]:
    engine, *_ = dslaunch.initialize(model=torch.nn.Linear(3, 3), config=config)
    engine.save_checkpoint(folder, "last")
if other:
    atexit.register(lambda: print(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1])))
    raise ValueError("in training")
"""


@pytest.mark.slow
def test_the_end_of_a_program_waits_for_the_save_and_tells_its_failure(tmp_path: Path) -> None:
    """Of two engines, one of which cannot save. Another program, which has that one only, ends with 0."""
    good, bad = tmp_path / "good", tmp_path / "bad"
    bad.write_text("a file")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(good), str(bad)], capture_output=True, text=True, timeout=90
    )
    assert (done.returncode, done.stdout) == (1, "0\n"), done.stderr
    assert "ValueError: in training" in done.stderr
    assert (good / "last" / "manifest.json").exists(), done.stderr
    assert done.stderr.count(f"checkpoint {bad}/last cannot be written") == 2
