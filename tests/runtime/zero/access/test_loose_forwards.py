"""Forwards without gradients outside of a block: ranks run as many as each likes, and training goes on."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.compat import comm
from tests.launcher.local_job import Job
from tests.runtime.models import Writer, make_config
from tests.runtime.ranks import Ranks


def _engine() -> dslaunch.Engine:
    config = make_config(stage=3, reduce_bucket_size=50)
    return dslaunch.initialize(model=Writer(), config=config)[0]


def _step(engine: dslaunch.Engine, rank: int) -> None:
    torch.manual_seed(rank)
    tokens = torch.randint(11, (6, 5))
    engine.backward(nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten()))
    engine.step()


def _whole(engine: dslaunch.Engine) -> Writer:
    whole = Writer()
    with dslaunch.zero.GatheredParameters(engine.parameters()):
        whole.load_state_dict({name: value.clone() for name, value in engine.module.state_dict().items()})
    return whole


@torch.no_grad()
def _run(engine: dslaunch.Engine, whole: Writer, tokens: Tensor, num: int) -> None:
    for _ in range(num):
        assert torch.equal(engine.module(tokens), whole(tokens))


def _runs_some(rank: int, folder: str) -> None:
    one, other = _engine(), _engine()
    tokens = torch.tensor([[rank + 1, 2, 3]])
    for following in ("a step", "a save", "weights", "another engine", "an error", "an end"):
        _step(one, rank)
        _step(other, rank)
        whole = _whole(other)
        _run(one, whole, tokens, 1 + (rank + len(following)) % 3)
        if following == "a save":
            one.save_checkpoint(folder)
        elif following == "weights":
            for name, weight in one.weights(names="module", to="all"):
                assert torch.equal(weight, whole.state_dict()[name])
        elif following == "another engine":
            _run(other, whole, tokens, 3 - rank)
            with torch.no_grad():  # another unit first
                if rank:
                    assert torch.equal(other.module.head(torch.ones(15)), whole.head(torch.ones(15)))
            _run(one, whole, tokens, 1 + rank)
        elif following == "an error" and rank:
            _run(one, whole, tokens, 2)
            for failing in ((torch.tensor([[99]]),), (tokens, (0, 99))):  # at once, and in the middle
                with pytest.raises(IndexError), torch.no_grad():
                    one.module(*failing)
            if rank == 1:
                _run(one, whole, tokens, 1)
    with dslaunch.zero.GatheredParameters([*one.parameters(), *other.parameters()]):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


def test_ranks_run_as_many_as_each_likes(ranks: Ranks, tmp_path: Path) -> None:
    """What other ranks do meanwhile is a collective of each kind."""
    ranks(_runs_some, str(tmp_path), world_size=3)


def _fails(rank: int) -> None:
    """Each rank's forward, the first of the engine too, fails at another place or not at all."""
    one = _engine()
    whole, tokens = _whole(one), torch.tensor([[rank + 1, 2, 3]])
    for order in ((0, 99), (0, 1, 2), (0, 1, 99), (0, 1, 2)):
        own = order[rank - 1 :] if rank else (0, 1, 2)
        with pytest.raises(IndexError) if 99 in own else nullcontext(), torch.no_grad():
            assert torch.equal(one.module(tokens, own), whole(tokens, own))
    _step(one, rank)


def test_a_rank_whose_forward_fails_keeps_no_other_waiting(ranks: Ranks) -> None:
    ranks(_fails, world_size=3)


def _comes_to_what_has_no_wire(rank: int) -> None:
    tokens = torch.tensor([[rank + 1, 2, 3]])
    for following in ("a new engine", "a collective of the program", "an end of the engine", "a new group"):
        one = _engine()
        whole = _whole(one)
        _run(one, whole, tokens, 1 + 2 * rank)
        if following == "a new engine":
            _run(_engine(), whole, tokens, 3 - 2 * rank)
        elif following == "a collective of the program":
            total = torch.ones(1)
            comm.all_reduce(total)
            assert total.item() == 2
        elif following == "an end of the engine":
            one.destroy()
            assert torch.equal(one.module(tokens), whole(tokens))
        comm.new_group([0, 1])


def _evaluates_in_a_step(rank: int) -> None:
    for by_engine in (True, False):
        one, plain = _engine(), _engine()
        whole = _whole(one)
        tokens = torch.randint(11, (6, 5), generator=torch.Generator().manual_seed(rank))
        for engine in (plain, one):
            loss = nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten())
            if engine is one:
                _run(one, whole, tokens, 1 + 2 * rank)
            if by_engine:
                engine.backward(loss)
            else:
                loss.backward()
            if engine is one:
                _run(one, whole, tokens, 3 - 2 * rank)
            engine.step()
        for name, weight in _whole(plain).state_dict().items():
            assert torch.equal(_whole(one).state_dict()[name], weight)


def test_evaluations_before_and_after_a_backward(ranks: Ranks) -> None:
    """Gathers for other ranks have the backward reduce nothing early, and are compared by the step."""
    ranks(_evaluates_in_a_step, world_size=2)


def test_ranks_are_waited_for_before_collectives_that_pass_no_wire(ranks: Ranks) -> None:
    ranks(_comes_to_what_has_no_wire, world_size=2)


_ENDS_EARLY = """
import torch, dslaunch
dslaunch.init_distributed()
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
engine = dslaunch.initialize(model=torch.nn.Linear(400, 400), config=config)[0]
with torch.no_grad():
    for _ in range(1 + 3 * engine.global_rank):
        engine(torch.ones(1, 400))
"""


def test_a_program_that_ends_waits_for_forwards_of_others(tmp_path: Path) -> None:
    program = tmp_path / "evaluate.py"
    program.write_text(_ENDS_EARLY)
    job = Job(tmp_path, ["--num_gpus=2", "evaluate.py"])
    assert job.wait(100.0) == 0, job.out + job.err
