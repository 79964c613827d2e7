"""Whatever fails in the middle leaves the state before or the state after, on all ranks: see injection.py."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dslaunch import CheckpointError, ConfigError
from dslaunch.runtime.checkpoint import background
from dslaunch.runtime.checkpoint.export.export import ExportOptions, export
from dslaunch.runtime.checkpoint.export.source import open_source
from dslaunch.runtime.checkpoint.files.reader import CheckpointReader
from dslaunch.runtime.checkpoint.save import prune
from dslaunch.runtime.checkpoint.storage.folder_store import FolderStore
from dslaunch.runtime.zero.model.parked_states import ParkedStorage
from tests.runtime.checkpoint.injection import Fault, collectives_fail, files_fail
from tests.runtime.checkpoint.states import make, run, tensors
from tests.runtime.ranks import Ranks

QUICK = 17  # of the operations every so many fails in `make test`, and each one in `make test-all`
DEADLINE_S = 300.0  # of ranks that fail each operation in turn
STEPS = [pytest.param(QUICK, id="some"), pytest.param(1, id="all", marks=pytest.mark.exhaustive)]
GIVES_UP_S = 5.0  # a rank whose peer has failed in a collective


def _held(engine: Any) -> dict[str, Any]:
    """All that this rank has, without a collective."""
    found: dict[str, Any] = {name: value.clone() for name, value in engine.module.named_buffers()}
    sub_buffers = [sub_buffer for unit in engine._model.units for sub_buffer in unit.sub_buffers]
    for number, sub_buffer in enumerate(sub_buffers):
        flats = {
            "parameters": sub_buffer.param_shard.kept
            if sub_buffer.is_sharded
            else sub_buffer.param_shard.values.flat
        }
        if sub_buffer.is_trained:
            flats |= {"master": sub_buffer.optimizer_shard.master, **sub_buffer.optimizer_shard.states}
        found |= {f"{number} {kind}": flat.clone() for kind, flat in flats.items()}
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    found["rest"] = (
        groups,
        engine.optimizer.num_steps,
        engine.global_steps,
        engine.lr_scheduler.state_dict(),
        engine.module.note,
        torch.get_rng_state().tolist(),
    )
    return found


def _is_same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(one, right[name]) if isinstance(one, torch.Tensor) else one == right[name]
        for name, one in left.items()
    )


def _together(value: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _injected(rank: int, victim: int, fault: Fault) -> AbstractContextManager[Any]:
    return files_fail(fault) if rank == victim else nullcontext()


# ---- loading


def _engines(folder: Path, stage: int) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """An engine in the state `old`, that state, and the state `new` that a load of `new` gives."""
    other, engine = make(stage, True, seed=1), make(stage, True)
    other.module.note = "new"
    run(other, first=0, steps=3)
    other.save_checkpoint(folder, "new")
    run(engine, first=5, steps=2)
    engine.save_checkpoint(folder, "old")
    engine.load_checkpoint(folder, "new")
    after = _held(engine)
    engine.load_checkpoint(folder, "old")
    return engine, _held(engine), after


def _outcome(engine: Any, before: dict[str, Any], after: dict[str, Any]) -> str:
    if engine._model.parked_states.barred is not None:
        with pytest.raises(CheckpointError, match="failed in the middle"):
            engine.forward(torch.zeros(1, 7, dtype=torch.bfloat16))
        with pytest.raises(CheckpointError, match="failed in the middle"):
            engine.save_checkpoint("nowhere")
        return "barred"
    now = _held(engine)
    return "before" if _is_same(now, before) else "after" if _is_same(now, after) else "neither"


def _walk_loads(rank: int, folder: str, stage: int, step: int, victim: int, is_lasting: bool) -> list[str]:
    """Fail one operation after another; return what each left."""
    root, outcomes = Path(folder), []
    engine, before, after = _engines(root, stage)
    for at in itertools.count(1, step):
        fault, error = Fault(at, root, is_lasting), None
        with _injected(rank, victim, fault):
            try:
                engine.load_checkpoint(root, "new")
            except CheckpointError as found:
                error = found
        said = _together((_outcome(engine, before, after), error is not None, fault.has_struck))
        assert len({(state, failed) for state, failed, _ in said}) == 1, (at, fault.what, said)
        state, failed, _ = said[0]
        assert state in (("before", "barred") if failed else ("after",)), (at, fault.what, error)
        outcomes.append(state)
        engine.load_checkpoint(root, "old")
        assert _outcome(engine, before, after) == "before"
        if not said[victim][2]:
            return outcomes
    raise AssertionError("it does not end")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "step"),
    [(3, QUICK), pytest.param(3, 1, marks=pytest.mark.exhaustive)],
)
def test_a_load_whose_kth_operation_fails_leaves_the_engine_as_it_was_on_all_ranks(
    ranks: Ranks, tmp_path: Path, stage: int, step: int
) -> None:
    for victim in (0, 1):
        outcomes, other = ranks(
            *(_walk_loads, str(tmp_path / str(victim)), stage, step, victim, False),
            world_size=2,
            deadline_s=DEADLINE_S,
        )
        assert outcomes == other
        assert outcomes[0] == "before"
        assert outcomes[-1] == "after"
        assert "barred" not in outcomes  # what is read again is tried again


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_a_load_whose_disk_is_gone_from_then_on_leaves_an_engine_that_says_so_everywhere(
    ranks: Ranks, tmp_path: Path, step: int
) -> None:
    outcomes, _ = ranks(_walk_loads, str(tmp_path), 2, step, 1, True, world_size=2, deadline_s=DEADLINE_S)
    assert outcomes.index("barred") > outcomes.index("before")
    assert outcomes[-1] == "after"


def _walk_collectives(rank: int, folder: str, stage: int) -> list[str]:
    """Rank 1 fails in one collective of a load after the other; the other rank gives up after a while."""
    outcomes = []
    for at in itertools.count(1):
        dist.destroy_process_group()
        root = Path(folder) / str(at)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store{at}",
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=GIVES_UP_S),
        )
        engine, before, after = _engines(root, stage)
        fault, failed = Fault(at, root), False
        with collectives_fail(fault) if rank == 1 else nullcontext():
            try:
                engine.load_checkpoint(root, "new")
            except (RuntimeError, OSError):
                failed = True
        outcome = _outcome(engine, before, after)
        assert outcome in (("before", "barred") if failed else ("after",)), (at, outcome)
        outcomes.append(outcome)
        if not failed:
            return outcomes
    raise AssertionError("it does not end")


@pytest.mark.exhaustive
def test_a_load_in_which_a_rank_fails_at_any_collective_leaves_both_with_the_same(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks(_walk_collectives, str(tmp_path), 3, world_size=2, deadline_s=DEADLINE_S)
    assert first == second
    assert first[0] == "before"


ASKED: list[tuple[dict[str, Any], str]] = [
    ({"tag": "old"}, "tag='new' on rank 0 and tag='old' on rank 1"),
    ({}, "tag='new' on rank 0 and tag=None on rank 1"),
    (
        {"tag": "new", "load_optimizer_states": False},
        "load_optimizer_states=True on rank 0 and load_optimizer_states=False on rank 1",
    ),
]


def _asked_apart(rank: int, folder: str) -> list[tuple[str, str]]:
    """Ask for another load on rank 1; return the errors, and what each left."""
    engine, before, after = _engines(Path(folder), 3)
    found = []
    for other, _ in ASKED:
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(folder, **({"tag": "new"} if rank == 0 else other))
        found.append((str(caught.value), _outcome(engine, before, after)))
    return found


def test_a_load_that_ranks_ask_for_differently_is_an_error_on_all_and_changes_nothing(
    ranks: Ranks, tmp_path: Path
) -> None:
    errors = [f"load_checkpoint() was given {differs}; give all ranks the same" for _, differs in ASKED]
    wanted = [(error, "before") for error in errors]
    assert ranks(_asked_apart, str(tmp_path), world_size=2) == [wanted] * 2


# ---- saving


def _unspeakable(rank: int, folder: str) -> tuple[str, list[str | None]]:
    """Save what rank 0 cannot describe, and then something good; return the error,
    and the tags that are there.
    """
    engine = make(2, True)
    run(engine, first=0, steps=1)
    state: dict[str, Any] = {}
    state["itself"] = state
    with pytest.raises(CheckpointError) as caught:
        engine.save_checkpoint(folder, "bad", client_state=state)
    engine.save_checkpoint(folder, "good")
    return str(caught.value), _together(FolderStore(Path(folder)).tags())[0]


def test_what_rank_0_cannot_describe_is_an_error_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(_unspeakable, str(tmp_path), world_size=2)
    assert first == second
    assert first[1] == ["good"]
    assert "RecursionError" in first[0]


def _nameless(rank: int, folder: str) -> tuple[str, list[str | None]]:
    """Save while rank 1's module cannot say what it holds, and then with a tag that is the name of a file."""
    engine = make(2, True)

    def fail(**given: Any) -> None:
        raise ValueError("no extra state")

    with (
        patch.object(engine.module, "state_dict", fail) if rank == 1 else nullcontext(),
        pytest.raises(CheckpointError) as caught,
    ):
        engine.save_checkpoint(folder, "bad")
    with pytest.raises(CheckpointError, match="tag 'latest' is the name of the file that says"):
        engine.save_checkpoint(folder, "latest")
    engine.save_checkpoint(folder, "good")
    return str(caught.value), _together(FolderStore(Path(folder)).tags())[0]


def test_what_another_rank_cannot_say_is_an_error_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks(_nameless, str(tmp_path), world_size=2)
    assert first == second
    assert first[1] == ["good"]
    assert "cannot be put together on rank 1: ValueError: no extra state" in first[0]


def _found(root: Path) -> tuple[str | None, dict[str, int]]:
    """`latest`, and the checkpoints that are there, each read to its end."""
    store, steps = FolderStore(root), {}
    for tag in sorted(store.tags()):
        reader = CheckpointReader(store, tag)
        reader.verify()
        steps[tag] = reader.manifest.global_steps
    return store.latest(), steps


def _walk_saves(rank: int, folder: str, step: int, victim: int, tag: str, is_async: bool) -> list[str]:
    engine = make(2, True, checkpoint={"async_save": is_async, "keep_last": 2})
    kept, root, outcomes = Path(folder) / "kept", Path(folder) / "root", []
    engine.save_checkpoint(kept, "older")
    run(engine, first=0, steps=1)
    engine.save_checkpoint(kept, "old")
    engine._saver.wait()
    run(engine, first=1, steps=1)
    before = _found(kept)
    steps = {**before[1], tag: 2}
    if len(steps) > 2:
        del steps["older"]
    after = (tag, steps)
    for at in itertools.count(1, step):
        if rank == 0:
            shutil.rmtree(root, ignore_errors=True)
            shutil.copytree(kept, root, copy_function=shutil.copy2)
        dist.barrier()
        fault, error = Fault(at, root), None
        # The thread that writes makes way for training, and on a busy machine for all that
        # the other tests do.
        with _injected(rank, victim, fault), patch.object(background, "_NICENESS", 0):
            try:
                engine.save_checkpoint(root, tag)
                engine._saver.wait()
            except CheckpointError as found:
                error = found
        said = _together((str(error), fault.has_struck))
        assert len({text for text, _ in said}) == 1, said
        now = _found(root)
        older = {**now[1]}
        older.pop("older", None) if len(steps) == 2 and "older" not in steps else None
        state = "before" if now == before else "after" if (now[0], older) == after else f"neither: {now}"
        assert state == ("after" if error is None else "before"), (at, fault.what, error)
        outcomes.append(state)
        dist.barrier()
        if not said[victim][1]:
            return outcomes
    raise AssertionError("it does not end")


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("tag", "is_async"), [("old", False), ("new", True)])
def test_a_save_whose_kth_operation_fails_leaves_the_folder_as_it_was(
    ranks: Ranks, tmp_path: Path, tag: str, is_async: bool, step: int
) -> None:
    for victim in (0, 1):
        outcomes, _ = ranks(
            *(_walk_saves, str(tmp_path / str(victim)), step, victim, tag, is_async),
            world_size=2,
            deadline_s=DEADLINE_S,
        )
        assert outcomes[-1] == "after"
        if step == 1:
            assert "before" in outcomes


# ---- folders: pruning, and files for other programs


def _one_checkpoint(rank: int, folder: str) -> None:
    engine = make(2, True)
    for tag in ("a", "b", "c", "d"):
        run(engine, first=0, steps=1)
        engine.save_checkpoint(folder, tag)


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def _until_it_succeeds(root: Path, step: int) -> Iterator[Fault]:
    for at in itertools.count(1, step):
        fault = Fault(at, root)
        yield fault
        if not fault.has_struck:
            return


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_an_export_whose_kth_operation_fails_leaves_the_files_of_the_one_before(
    ranks: Ranks, tmp_path: Path, step: int
) -> None:
    ranks(_one_checkpoint, str(tmp_path / "from"), world_size=2)
    out, kept, fresh = (tmp_path / name for name in ("out", "kept", "fresh"))
    for old_size, options in (("5GB", 1000), (1000, "5GB")):
        for folder, tag, of in ((kept, "a", old_size), (fresh, "d", options)):
            shutil.rmtree(folder, ignore_errors=True)
            export(open_source(tmp_path / "from", tag), folder, ExportOptions(max_shard_size=of))
        before, after = _contents(kept), _contents(fresh)
        for fault in _until_it_succeeds(out, step):
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(kept, out)
            error = None
            with files_fail(fault):
                try:
                    export(open_source(tmp_path / "from", "d"), out, ExportOptions(max_shard_size=options))
                except CheckpointError as found:
                    error = found
            assert _contents(out) == (after if error is None else before), (fault.what, error)


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_pruning_whose_kth_operation_fails_leaves_whole_checkpoints(
    ranks: Ranks, tmp_path: Path, step: int
) -> None:
    kept, root = tmp_path / "kept", tmp_path / "root"
    ranks(_one_checkpoint, str(kept), world_size=2)
    for fault in _until_it_succeeds(root, step):
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(kept, root, copy_function=shutil.copy2)
        with files_fail(fault):
            try:
                prune(FolderStore(root), keep_last=1)
            except (OSError, CheckpointError):
                assert fault.has_struck
        latest, steps = _found(root)
        assert latest == "d"
        assert set(steps) <= {"a", "b", "c", "d"}
        assert "d" in steps
        prune(FolderStore(root), keep_last=1)  # and again, which does the rest
        assert set(_found(root)[1]) == {"d"}


def test_a_link_to_a_checkpoint_is_removed_as_a_link(tmp_path: Path) -> None:
    for place, tag in enumerate(("elsewhere/x", "root/a", "root/b")):
        (tmp_path / tag).mkdir(parents=True)
        (tmp_path / tag / "manifest.json").write_text("{}")
        os.utime(tmp_path / tag / "manifest.json", (place, place))
    (tmp_path / "root" / "link").symlink_to(tmp_path / "elsewhere" / "x")
    store = FolderStore(tmp_path / "root")
    store.remove("link")
    store.remove("a")
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["b"]
    assert (tmp_path / "elsewhere" / "x" / "manifest.json").exists()


# ---- weights and states that the program moves


def _wrong_weights(rank: int, stage: int) -> tuple[list[str], bool]:
    """Give one rank weights that do not fit, of which some would; then both a function that
    fails on one rank.
    """
    engine = make(stage, True)
    run(engine, first=0, steps=1)
    before, said = _held(engine), []
    good = {
        name: value + 1 if value.is_floating_point() else value for name, value in tensors(engine).items()
    }
    wrong = {**good, "last.weight": torch.zeros(3, 3)} if rank == 1 else dict(good)
    extra = {name: value for name, value in engine.state_dict().items() if name not in good}

    def fails(src: Any, dst: Any) -> None:
        if rank == 1:
            raise KeyError("no such weight")

    for action in (
        lambda: engine.load_state_dict({**wrong, **extra}),
        lambda: engine.load_module_state_dict({"module": good}, custom_load_fn=fails),
    ):
        with pytest.raises((RuntimeError, KeyError)) as caught:
            action()
        said.append(f"{type(caught.value).__name__}: {caught.value}")
        assert _is_same(_held(engine), before)
    return said, engine._model.parked_states.barred is not None


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_that_do_not_fit_on_one_rank_change_nothing_on_any(ranks: Ranks, stage: int) -> None:
    (other, is_barred), (own, is_barred_too) = ranks(_wrong_weights, stage, world_size=2)
    assert own[0].startswith("RuntimeError: Error(s) in loading state_dict")
    assert other[0].startswith(
        "CheckpointError: load_state_dict() failed on rank 1, so no rank goes on with it"
    )
    assert own[1] == "KeyError: 'no such weight'"
    assert other[1].startswith("CheckpointError: load_module_state_dict(custom_load_fn=...) failed on rank 1")
    assert (
        is_barred == is_barred_too == (stage == 2)
    )  # below stage 3 the function writes to the weights themselves


def _full_memory(rank: int, stage: int, method: str) -> int:
    """Let the k-th move of a storage fail, out or back; return how many moves there are."""
    engine = make(stage, True)
    run(engine, first=0, steps=1)
    before = _held(engine)
    moved = {"out": engine.offload_states, "back": engine.reload_states}
    for at in itertools.count(1):
        if method == "back":
            engine.offload_states()
        fault = Fault(at, Path("nowhere"))
        name = "__init__" if method == "out" else "restore"

        was = getattr(ParkedStorage, name)

        def fails(*args: Any, fault: Fault = fault, was: Any = was, **kwargs: Any) -> Any:
            fault.pass_by("a move")
            return was(*args, **kwargs)

        with patch.object(ParkedStorage, name, fails):
            try:
                moved[method]()
            except OSError:
                assert fault.has_struck
        if method == "back" and fault.has_struck:
            parked = engine._model.parked_states._parked.values()
            assert not any(one._tensor.untyped_storage().nbytes() for of_kind in parked for one in of_kind)
            with pytest.raises(ConfigError, match="reload_states"):
                engine.step()
        if method == "back" or not fault.has_struck:
            engine.reload_states()
        assert _is_same(_held(engine), before), at
        run(engine, first=1, steps=1)
        before = _held(engine)
        if not fault.has_struck:
            return at
    raise AssertionError("it does not end")


@pytest.mark.parametrize(("stage", "method"), [(1, "out"), (3, "back")])
def test_moving_states_whose_kth_storage_fails_moves_none(ranks: Ranks, stage: int, method: str) -> None:
    first, second = ranks(_full_memory, stage, method, world_size=2)
    assert first == second > 5
