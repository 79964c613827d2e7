"""The launcher asks for other hosts: all ranks end after a save, with code 75, and nothing is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import dslaunch
from dslaunch.runtime.checkpoint.preemption import CHANGE_CODE
from tests.runtime.checkpoint.states import make, run, whole_state
from tests.runtime.models import assert_same_bits
from tests.runtime.ranks import Ranks


@contextmanager
def _asked_by(file: str) -> Iterator[None]:
    os.environ["DSLAUNCH_RESIZE_FILE"] = file
    try:
        yield
    finally:
        del os.environ["DSLAUNCH_RESIZE_FILE"]


def _file_of(rank: int, folder: str) -> str:
    """Of a host of its own, and not there yet."""
    return f"{folder}/asked-{rank}"


def _ends_after_its_save(rank: int, folder: str) -> list[Any]:
    with _asked_by(_file_of(rank, folder)):
        engine = make(2, False)
        assert engine.load_checkpoint(f"{folder}/out") == (None, {}), "the first start has none"
        run(engine, first=0, steps=1)
        engine.save_checkpoint(f"{folder}/out")
        run(engine, first=1, steps=1)  # nobody was asked
        if rank == 1:
            Path(_file_of(rank, folder)).touch()
        torch.distributed.barrier()
        engine.save_checkpoint(f"{folder}/out", "aside", save_latest=False)
        run(engine, first=2, steps=1)  # a program does not go on from such a save
        engine.save_checkpoint(f"{folder}/out")
        Path(f"{folder}/after-{rank}").touch()  # what the program does after its save is done
        with pytest.raises(SystemExit) as ended:
            run(engine, first=3, steps=1)
    assert engine.global_steps == 3
    again = make(2, False, seed=5)
    again.load_checkpoint(f"{folder}/out")
    assert_same_bits(whole_state(again), whole_state(engine))
    return [ended.value.code, again.global_steps]


def test_all_end_after_the_next_save_when_one_is_asked(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks(_ends_after_its_save, str(tmp_path), world_size=2)
    assert found == [[75, 3]] * 2
    assert sorted(path.name for path in tmp_path.glob("after-*")) == ["after-0", "after-1"]


def _asked_while_saving(rank: int, folder: str) -> list[int]:
    """The save under way is not the one that counts: it may have begun before others were asked."""
    with _asked_by(_file_of(rank, folder)):
        engine = make(3, False, checkpoint={"async_save": True})
        run(engine, first=0, steps=1)
        engine.save_checkpoint(f"{folder}/out")  # runs on beside the next step
        Path(_file_of(rank, folder)).touch()
        run(engine, first=1, steps=1)
        engine.save_checkpoint(f"{folder}/out")
        with pytest.raises(SystemExit) as ended:
            run(engine, first=2, steps=1)
    assert isinstance(ended.value.code, int)
    return [ended.value.code, int(Path(f"{folder}/out/latest").read_text().removeprefix("global_step"))]


def test_who_is_asked_while_a_save_runs_beside_training_ends_after_the_next(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks(_asked_while_saving, str(tmp_path), world_size=2) == [[75, 2]] * 2


def _ends_after_a_step(rank: int, folder: str, is_signalled: bool) -> Any:
    with _asked_by(_file_of(rank, folder)):
        engine = make(1, False, checkpoint={"preemption_save_dir": f"{folder}/last"})
        run(engine, first=0, steps=1)
        if rank == 0:
            Path(_file_of(rank, folder)).touch()
        elif is_signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        torch.distributed.barrier()
        with pytest.raises(SystemExit) as ended:
            run(engine, first=1, steps=1)
    again = make(1, False, seed=5)
    again.load_checkpoint(f"{folder}/last")
    assert_same_bits(whole_state(again), whole_state(engine))
    return ended.value.code, again.global_steps


@pytest.mark.parametrize(("is_signalled", "code"), [(False, CHANGE_CODE), (True, 143)])
def test_with_a_folder_for_it_all_end_after_the_next_step_and_sigterm_counts_more(
    ranks: Ranks, tmp_path: Path, is_signalled: bool, code: int
) -> None:
    assert ranks(_ends_after_a_step, str(tmp_path), is_signalled, world_size=2) == [(code, 2)] * 2


STEPS = 9
# Of a loss, the mean over the same 12 samples, and of the weights: two and three ranks add in another order.
TOLERANCE = 1e-5


def _part(rank: int, folder: str, asked_at: int) -> tuple[Any, Any, Any]:
    """Train from where the folder's checkpoint is, saving every third step, until the end or until the ranks
    are asked to end, at this step; return the losses by step, the weights, and the exit code.
    """
    file = Path(f"{folder}/asked-{torch.distributed.get_world_size()}-{asked_at}")
    losses: dict[int, float] = {}
    with _asked_by(str(file)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        config = {
            "train_batch_size": 12,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 50},
            "checkpoint": {"async_save": True},
        }
        engine, *_ = dslaunch.initialize(model=model, model_parameters=model.parameters(), config=config)
        engine.load_checkpoint(f"{folder}/out")
        code = 0
        try:
            while engine.global_steps < STEPS:
                step = engine.global_steps
                x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
                own = x.chunk(engine.world_size)[rank]
                loss = (engine(own) - own.sum(1, keepdim=True)).square().mean()
                engine.backward(loss)
                engine.step()
                whole = loss.detach().clone()
                torch.distributed.all_reduce(whole)
                losses[step] = whole.item() / engine.world_size
                if engine.global_steps == asked_at and rank == 0:
                    file.touch()
                if engine.global_steps % 3 == 0:
                    engine.save_checkpoint(f"{folder}/out")
        except SystemExit as ended:
            code = ended.code
        with dslaunch.zero.GatheredParameters(list(model.parameters())):
            weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        engine.destroy()
    return losses, weights, code


def test_two_ranks_then_three_then_two_lose_as_two_do(ranks: Ranks, tmp_path: Path) -> None:
    """The same on hosts that come and go: tests/runtime/training/test_elastic_hosts.py."""
    losses: dict[int, float] = {}
    weights: dict[str, torch.Tensor] = {}
    for world_size, asked_at, code in ((2, 2, 75), (3, 6, 75), (2, 0, 0)):
        parts = ranks(_part, str(tmp_path), asked_at, world_size=world_size)
        assert [one[2] for one in parts] == [code] * world_size
        assert not losses.keys() & parts[0][0].keys(), "no step is done twice"
        losses |= parts[0][0]
        weights = parts[0][1]
    (tmp_path / "plain").mkdir()
    plain_losses, plain_weights, _ = ranks(_part, str(tmp_path / "plain"), 0, world_size=2)[0]
    assert sorted(losses) == sorted(plain_losses) == list(range(STEPS))
    for step in range(STEPS):
        assert abs(losses[step] - plain_losses[step]) < TOLERANCE, step
    for name, weight in weights.items():
        assert (weight - plain_weights[name]).abs().max() < TOLERANCE, name
        assert abs(weight.norm() - plain_weights[name].norm()) < TOLERANCE, name
