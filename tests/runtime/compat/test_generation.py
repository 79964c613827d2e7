"""unwrap_model_for_generation: a model that generates with all of its parameters here."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import dslaunch
from dslaunch.runtime.compat.generation import unwrap_model_for_generation
from tests.runtime.models import Writer, make_config
from tests.runtime.ranks import Ranks


def _step(engine: dslaunch.Engine, rank: int) -> None:
    torch.manual_seed(rank)
    tokens = torch.randint(11, (6, 5))
    engine.backward(nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten()))
    engine.step()


def _generates(rank: int, stage: int) -> None:
    one, other = (
        dslaunch.initialize(model=Writer(), config=make_config(stage=stage, reduce_bucket_size=50))[0]
        for _ in range(2)
    )
    for _ in range(2):
        _step(one, rank)
        _step(other, rank)
        whole = Writer().eval()
        with dslaunch.zero.GatheredParameters(other.parameters()):
            whole.load_state_dict(copy.deepcopy(other.module.state_dict()))
        prompt = torch.tensor([[rank + 1, 2, 3]])
        with unwrap_model_for_generation(one) as model:
            assert model is one
            assert all(
                p.numel() == q.numel() for p, q in zip(model.parameters(), whole.parameters(), strict=True)
            )
            # Ranks generate as much as they like: nothing is gathered meanwhile.
            made = model.generate(prompt, 3 + 5 * rank)
        assert torch.equal(made, whole.generate(prompt, 3 + 5 * rank))
        with pytest.raises(KeyError), unwrap_model_for_generation(one):
            raise KeyError("in the middle")
        if stage == 3:
            statuses = {str(p.ds_status) for p in one.parameters()}
            assert len(statuses) == 1
            assert "NOT_AVAILABLE" in statuses.pop()
    _step(one, rank)
    _step(other, rank)
    with dslaunch.zero.GatheredParameters([*one.parameters(), *other.parameters()]):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_it_generates_what_a_whole_model_does_and_trains_on_as_before(ranks: Ranks, stage: int) -> None:
    ranks(_generates, stage, world_size=2)
