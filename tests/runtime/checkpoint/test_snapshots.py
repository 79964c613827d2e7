"""Snapshots in the memory of hosts: what ranks that start again find there is the training, to the bit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import dslaunch
from dslaunch import CheckpointError
from dslaunch.runtime.checkpoint import snapshots
from dslaunch.runtime.checkpoint.storage import memory_store
from dslaunch.runtime.checkpoint.storage.agent_memory import AgentMemory, Surroundings
from dslaunch.shared import variables
from tests.exhaustive import few
from tests.launcher.node.memory.memory_hosts import MemoryHost, introduce, memory_hosts
from tests.runtime.checkpoint.states import make, run, whole_state
from tests.runtime.models import assert_same_bits, batch, loss_of, make_config, make_model
from tests.runtime.ranks import RankFailed, Ranks


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[MemoryHost]]:
    with memory_hosts(tmp_path, "a", "b") as found:
        yield found


def _begin(rank: int, sockets: list[str], *, attempt: int, every: str = "2") -> None:
    """Be a rank of a job with snapshots; ranks are on the hosts by turns."""
    os.environ[variables.MEMORY] = sockets[rank % len(sockets)]
    os.environ[variables.SNAPSHOT_EVERY] = every
    os.environ[variables.ATTEMPT] = str(attempt)
    snapshots._TRAININGS = snapshots._Trainings()  # as in a process that has just begun


def _make(stage: int, bf16: bool, **more: Any) -> Any:
    """Make an engine of this job; the process goes on to other tests."""
    engine = make(stage, bf16, **more)
    _leave()
    return engine


def _leave() -> None:
    for name in (variables.MEMORY, variables.SNAPSHOT_EVERY, variables.ATTEMPT):
        del os.environ[name]


def _train(rank: int, sockets: list[str], stage: int, folder: str) -> dict[str, torch.Tensor]:
    """Train four steps; the state after them is on the disk, and in memory."""
    _begin(rank, sockets, attempt=0)
    engine = _make(stage, True)
    run(engine, first=0, steps=2)
    engine._saver.snapshots.wait()  # steps are so short here that the next one would be left out
    run(engine, first=2, steps=2)
    engine.save_checkpoint(folder, client_state={"program": 7})
    state = whole_state(engine)
    engine.destroy()
    assert engine._saver.snapshots.last_step == 4
    return state


def _train_and_be_killed(rank: int, sockets: list[str]) -> None:
    """Rank 1 is killed while it writes the second snapshot."""
    _begin(rank, sockets, attempt=0)
    engine = _make(3, True)
    run(engine, first=0, steps=2)
    engine._saver.snapshots.wait()
    if rank == 1:
        memory_store._MemoryStream.write = lambda stream, data: os.kill(os.getpid(), signal.SIGKILL)
    run(engine, first=2, steps=2)
    engine._saver.snapshots.wait()


def _resume(rank: int, sockets: list[str], stage: int, attempt: int) -> tuple[dict[str, torch.Tensor], int]:
    _begin(rank, sockets, attempt=attempt, every="1000")
    engine = _make(stage, True, seed=1)
    assert engine.resume() == {}
    state, step = whole_state(engine), engine.global_steps
    engine.destroy()
    return state, step


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_other_ranks_and_stages_go_on_from_memory_with_the_same_bits(
    ranks: Ranks, hosts: list[MemoryHost], tmp_path: Path, stage: int
) -> None:
    sockets = [str(one.socket) for one in hosts]
    saved = ranks(_train, sockets, stage, str(tmp_path / "disk"), world_size=2)[0]
    for attempt, world_size in enumerate((3, 1), start=1):
        for state, step in ranks(_resume, sockets, (stage + attempt) % 4, attempt, world_size=world_size):
            assert step == 4
            assert_same_bits(state, saved)


def _steps(ranks: Ranks, sockets: list[str], attempt: int, saved: dict[str, torch.Tensor] | None) -> int:
    (state, step), *_ = ranks(_resume, sockets, 3, attempt, world_size=len(sockets))
    if saved is not None:
        assert_same_bits(state, saved)
    return step


def test_copies_are_loaded_where_a_host_is_gone_and_damage_leaves_the_generation_before(
    ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with memory_hosts(tmp_path, "a", "b") as (a, b):
        sockets = [str(a.socket), str(b.socket)]
        saved = ranks(_train, sockets, 1, str(tmp_path / "disk"), world_size=2)[0]
        a.close()
        introduce([b])
        assert _steps(ranks, sockets[1:], 1, saved) == 4
        with closing(AgentMemory(sockets[1])) as memory:
            newest = [
                one for one in memory.held() if one.tag.endswith("step4") and one.name == "__0_0.distcp"
            ]
            assert [one.owner for one in newest] == ["a"]
            ask = {"owner": "a", "tag": newest[0].tag, "name": newest[0].name}
            descriptor, _ = memory.descriptor(do="open", **ask)
            os.pwrite(descriptor, bytes(64), newest[0].size // 2)
            os.close(descriptor)
        assert _steps(ranks, sockets[1:], 2, None) == 2


def test_a_rank_that_is_killed_in_a_snapshot_leaves_the_one_before(
    ranks: Ranks, hosts: list[MemoryHost]
) -> None:
    sockets = [str(one.socket) for one in hosts]
    with pytest.raises(RankFailed, match="died"):
        ranks(_train_and_be_killed, sockets, world_size=2)
    assert _steps(ranks, sockets, 1, None) == 2


def _load_folder(rank: int, sockets: list[str], folder: str, how: str) -> tuple[int, Any]:
    _begin(rank, sockets, attempt=1, every="1000")
    engine = _make(2, True, seed=1)
    if how == "resume":
        kept = engine.resume(folder)
    else:
        kept = engine.load_checkpoint(folder, load_module_only=how == "weights")[1]
    engine.destroy()
    return engine.global_steps, kept


def _train_with_own_state(rank: int, sockets: list[str], folder: str, *, is_given: bool) -> None:
    """Save step 2 on the disk; the snapshot of step 4 is newer."""
    _begin(rank, sockets, attempt=0, every="4")
    engine = _make(1, True)
    engine.resume(client_state=(lambda: {"epoch": engine.global_steps}) if is_given else None)
    run(engine, first=0, steps=2)
    engine.save_checkpoint(folder, client_state={"epoch": 2} if is_given else None)
    run(engine, first=2, steps=2)
    engine.destroy()


def _train_without_own_state(rank: int, sockets: list[str], folder: str) -> None:
    _train_with_own_state(rank, sockets, folder, is_given=False)


def _train_with_epoch(rank: int, sockets: list[str], folder: str) -> None:
    _train_with_own_state(rank, sockets, folder, is_given=True)


def _load_and_train(rank: int, sockets: list[str], folder: str) -> None:
    """Go on from a client_state, and be gone before the program gives one itself."""
    _begin(rank, sockets, attempt=1, every="1")
    engine = _make(1, True)
    assert engine.load_checkpoint(folder)[1] == {"epoch": 2}
    run(engine, first=2, steps=1)
    engine.destroy()
    assert engine._saver.snapshots.last_step == 3


def test_the_newest_of_memory_and_folder_is_taken_and_no_old_client_state(
    ranks: Ranks, tmp_path: Path
) -> None:
    """load_checkpoint() of a program that has a client_state of its own takes what it asked for."""
    folder = str(tmp_path / "disk")

    def load(how: str) -> tuple[int, Any]:
        answer: tuple[int, Any] = ranks(_load_folder, sockets, folder, how, world_size=2)[0]
        return answer

    with memory_hosts(tmp_path, "a") as found:
        sockets = [str(one.socket) for one in found]
        ranks(_train_without_own_state, sockets, folder, world_size=2)
        assert load("folder") == (4, {})
        assert load("weights") == (0, {})
        assert load("resume") == (4, {})
    with memory_hosts(tmp_path, "a") as found:
        ranks(_train_with_epoch, sockets, folder, world_size=2)
        assert load("folder") == (2, {"epoch": 2})
        assert load("resume") == (4, {"epoch": 4})
    with memory_hosts(tmp_path, "a") as found:
        assert load("resume") == (2, {"epoch": 2})  # memory is lost
        ranks(_load_and_train, sockets, folder, world_size=2)
        assert load("folder") == (2, {"epoch": 2})


def _train_one_after_the_other(rank: int, sockets: list[str], folders: list[str]) -> None:
    _begin(rank, sockets, attempt=0, every="1")
    for steps, folder in enumerate(folders, start=2):
        engine = make(1, True)
        assert engine.resume(folder, client_state=lambda folder=folder: {"in": folder}) == {}
        for step in range(steps):
            run(engine, first=step, steps=1)
            engine._saver.snapshots.wait()
        engine.destroy()
    _leave()


def _go_on_in(rank: int, sockets: list[str], folder: str, attempt: int) -> tuple[int, Any, set[str]]:
    _begin(rank, sockets, attempt=attempt, every="1")
    engine = _make(1, True)
    kept = engine.resume(folder, client_state=lambda: {"in": folder})
    found = engine.global_steps
    run(engine, first=found, steps=1)
    engine.destroy()
    with closing(AgentMemory(sockets[0])) as memory:
        return found, kept, {one.tag.partition("-")[0] for one in memory.held()}


def test_a_training_does_not_go_on_from_one_that_the_program_leaves_out_now(
    ranks: Ranks, tmp_path: Path
) -> None:
    """The second one is the first of the program that starts again."""
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    with memory_hosts(tmp_path, "a") as found:
        sockets = [str(found[0].socket)]
        ranks(_train_one_after_the_other, sockets, [one, two], world_size=1)
        assert ranks(_go_on_in, sockets, two, 1, world_size=1) == [(3, {"in": two}, {"t0"})]
        assert ranks(_go_on_in, sockets, three, 2, world_size=1) == [(0, {}, {"t0"})]


def _give_no_state(rank: int, sockets: list[str]) -> list[str]:
    _begin(rank, sockets, attempt=0, every="1")
    engine = _make(1, True)
    wrong: Any = {"epoch": 0}
    with pytest.raises(CheckpointError) as at_once:
        engine.resume(client_state=wrong)
    engine.resume(client_state=lambda: wrong.update(epoch=1))
    with pytest.raises(CheckpointError) as later:
        run(engine, first=0, steps=1)
    engine.destroy()
    return [str(at_once.value), str(later.value)]


def test_a_client_state_that_is_no_function_or_returns_nothing_is_refused(
    ranks: Ranks, hosts: list[MemoryHost]
) -> None:
    ((at_once, later),) = ranks(_give_no_state, [str(hosts[0].socket)], world_size=1)
    assert at_once.startswith(
        "client_state of resume() is {'epoch': 0}; give it a function that returns a dict"
    )
    assert later.startswith("the client_state function of resume() returned None; it must return a dict")


def _without_room(rank: int, sockets: list[str], attempt: int) -> tuple[str, int]:
    _begin(rank, sockets, attempt=attempt, every="1")
    engine = _make(0, True)
    try:
        run(engine, first=0, steps=1)
    except CheckpointError as error:
        return str(error), 0
    run(engine, first=1, steps=1)
    engine.destroy()
    return "", engine._saver.snapshots.num_taken


def test_hosts_without_room_are_named_at_first_and_cost_a_later_start_its_snapshots_only(
    ranks: Ranks, tmp_path: Path
) -> None:
    with memory_hosts(tmp_path, "small", free_bytes=1000) as found:
        sockets = [str(found[0].socket)]
        said = [text for text, _ in ranks(_without_room, sockets, 0, world_size=2)]
        assert ranks(_without_room, sockets, 1, world_size=2) == [("", 0)] * 2
    assert said[0] == said[1]
    assert "two generations of its own ranks are 0.00 GiB, and small has 0.00 GiB to give" in said[0]
    assert "--snapshot_every" in said[0]


def test_what_a_host_needs_is_its_own_ranks_and_the_copies_it_has() -> None:
    def place(name: str, partner: str, free: int | None, held: int = 0) -> Surroundings:
        return Surroundings(name, partner, (), "", free, held)

    gib = 1 << 30
    good = [(place("a", "b", 4 * gib), gib), (place("b", "c", 2 * gib, 4 * gib), gib)]
    assert snapshots.why_no_room([*good, (place("b", "c", 2 * gib, 4 * gib), gib)]) is None
    assert snapshots.why_no_room([(place("a", "b", None), gib)]) is None
    why = snapshots.why_no_room([*good, (place("c", "a", 9 * gib), 3 * gib)])
    assert (
        why
        == ": two generations of its own ranks and of copies for c are 8.00 GiB, and a has 4.00 GiB to give"
    )


def _while_one_is_written(
    rank: int, sockets: list[str], every: tuple[str, str], busy: int
) -> list[int | None]:
    """Train six steps, one of them while the last snapshot is still written; return the step of the newest
    snapshot after each.
    """
    _begin(rank, sockets, attempt=0, every=every[rank])
    engine = _make(2, True)
    taken = engine._saver.snapshots
    newest: list[int | None] = []
    writes = threading.Thread()
    for step in range(1, 7):
        run(engine, first=step, steps=1)
        current = taken._current
        newest.append(None if current is None else current.step)
        if current is None:
            continue
        if step == busy:
            current.thread = writes
        writes = current.thread
        writes.join()
        if step + 1 == busy:
            current.thread = threading.current_thread()  # as if it still wrote
    engine.destroy()
    return newest


# the clock of rank 1 says that nothing is due: that of rank 0 counts
@pytest.mark.parametrize(
    ("every", "busy", "newest"),
    [(("0.001s", "1000s"), 3, [1, 2, 2, 4, 5, 6]), (("2", "2"), 4, [None, 2, 2, 2, 5, 6])],
)
def test_a_snapshot_that_is_due_while_another_is_written_begins_when_that_has_ended(
    ranks: Ranks, hosts: list[MemoryHost], every: tuple[str, str], busy: int, newest: list[int | None]
) -> None:
    sockets = [str(one.socket) for one in hosts]
    assert ranks(_while_one_is_written, sockets, every, busy, world_size=2) == [newest] * 2


def _train_at_the_last_moment(rank: int, sockets: list[str]) -> dict[str, torch.Tensor]:
    """What can wait is written only when a caller says that values are about to change."""
    _begin(rank, sockets, attempt=0, every="2")
    engine = _make(2, True)
    taken, may_go = engine._saver.snapshots, threading.Event()
    write, before_change = taken._write, taken.before_change

    def late(prepared: Any, part: int) -> Any:
        assert part == 1 or may_go.wait(30.0)
        return write(prepared, part)

    def change() -> None:
        may_go.set()
        before_change()

    run(engine, first=0, steps=1)
    taken._write = late
    run(engine, first=1, steps=1)
    taken.before_change = change
    state = {name: value.clone() for name, value in whole_state(engine).items()}
    with torch.no_grad():
        engine.module.last.weight.add_(1.0)  # the program may do so at any time
    run(engine, first=2, steps=1)
    assert may_go.is_set()
    engine.destroy()
    return state


def test_a_snapshot_holds_what_was_there_when_its_step_ended(ranks: Ranks, hosts: list[MemoryHost]) -> None:
    sockets = [str(one.socket) for one in hosts]
    saved = ranks(_train_at_the_last_moment, sockets, world_size=2)[0]
    assert _steps(ranks, sockets, 1, saved) == 2


def _on_gpu(rank: int, sockets: list[str], stage: int) -> None:
    """Copies from the device come as late as they may; the next step changes what they read."""

    def train(engine: Any, first: int, steps: int) -> None:
        for step in range(first, first + steps):
            inputs = batch(step).chunk(torch.distributed.get_world_size())[rank].to(engine.device).bfloat16()
            engine.backward(loss_of(engine, inputs))
            engine.step()

    def states(engine: Any) -> dict[str, torch.Tensor]:
        kept = {name: value.cpu() for name, value in engine.state_dict().items()}
        for sub_buffer in engine.optimizer.sub_buffers:
            shard = sub_buffer.optimizer_shard
            kept |= {f"{sub_buffer.label} {name}": value.cpu() for name, value in shard.states.items()}
        return {name: value.clone() for name, value in kept.items()}

    config = make_config(stage=stage, bf16={"enabled": True}, train_batch_size=12)
    expected: dict[str, torch.Tensor] = {}
    for attempt, is_looked_at in enumerate((True, False)):  # who looks at values waits for them
        _begin(rank, sockets, attempt=attempt, every="2")
        engine, *_ = dslaunch.initialize(model=make_model(), config=config)
        _leave()
        train(engine, 0, 2)
        if is_looked_at:
            expected = states(engine)
        else:
            train(engine, 2, 1)
        engine.destroy()
    _begin(rank, sockets, attempt=2, every="1000")
    fresh, *_ = dslaunch.initialize(model=make_model(seed=1), config=config)
    _leave()
    fresh.resume()
    assert fresh.global_steps == 2
    assert_same_bits(states(fresh), expected)
    fresh.destroy()


@pytest.mark.parametrize("stage", few([3, 0, 1, 2], lambda stage: stage in (0, 3)))
def test_a_snapshot_of_a_gpu_holds_what_was_there(
    cuda_ranks: Ranks, hosts: list[MemoryHost], stage: int
) -> None:
    cuda_ranks(_on_gpu, [str(one.socket) for one in hosts], stage, world_size=2)
