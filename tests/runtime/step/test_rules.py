"""What a fused rule remembers: the states that its formula needs, whatever a checkpoint has of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dslaunch
from tests.runtime.models import make_config, make_model, snapshot, train_engine
from tests.runtime.ranks import Ranks

OTHERS = ["momentum_buffer", "of another optimizer"]  # what the checkpoint has
MAKE: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, float]]] = {
    "AdamW": (lambda params: torch.optim.AdamW(params, lr=0.01), {"exp_avg": 0.0, "exp_avg_sq": 0.0}),
    "Adam": (lambda params: torch.optim.Adam(params, lr=0.01), {"exp_avg": 0.0, "exp_avg_sq": 0.0}),
    "Adagrad": (
        lambda params: torch.optim.Adagrad(params, lr=0.01, initial_accumulator_value=0.5),
        {"sum": 0.5},
    ),
    "SGD": (lambda params: torch.optim.SGD(params, lr=0.01), {"momentum_buffer": 0.0}),
}


def _begin_again(rank: int) -> dict[str, Any]:
    """Train, forget, and train from the first parameters on; beside it an engine that does only the last."""
    found = {}
    for name, (make, _) in MAKE.items():
        results = []
        for is_old in (True, False):
            model = make_model()
            client, config = make(model.parameters()), make_config(stage=2)
            engine, chosen, *_ = dslaunch.initialize(model=model, optimizer=client, config=config)
            assert chosen is not None
            if is_old:
                begin = snapshot(model.named_parameters())
                train_engine(engine, steps=3)
                chosen.rule.reset_states(OTHERS)
                chosen.num_steps = 0
                states = [
                    {key: state[0].item() for key, state in sub_buffer.optimizer_shard.states.items()}
                    for sub_buffer in chosen.sub_buffers
                ]
                with torch.no_grad():
                    for sub_buffer in chosen.sub_buffers:
                        for index, member in enumerate(sub_buffer.members):
                            sub_buffer.param_shard.load(index, begin[member.name])
                            sub_buffer.copy_fragment(
                                index, begin[member.name], sub_buffer.optimizer_shard.master
                            )
            train_engine(engine, steps=2)
            results.append(snapshot(model.named_parameters()))
        found[name] = (chosen.rule.name, states, *results)
    return found


@pytest.mark.slow
def test_states_that_nobody_saved_begin_as_before_the_first_step(ranks: Ranks) -> None:
    (found,) = ranks(_begin_again, world_size=1)
    for name, (rule_name, states, old, new) in found.items():
        assert rule_name.split()[0] == name  # the name that checkpoints know
        assert states
        assert all(one == MAKE[name][1] for one in states)
        for key, param in old.items():
            assert torch.equal(param, new[key]), (name, key)
