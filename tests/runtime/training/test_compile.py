"""engine.compile(): the whole model where ranks hold all parameters,
each block's forward where they do not.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch import ConfigError
from tests.runtime.models import batch, make_model, snapshot, worst_difference
from tests.runtime.ranks import Ranks
from tests.runtime.training.hard_models import WIDTH, Model, TiedEnds
from tests.runtime.training.test_hard_cases import DRIFT, STEPS, check_freed, make_config, reference


class Counted:
    """A backend that counts what it compiles, and runs it as it is."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.num_graphs += 1
        return graph.forward


def _train(rank: int, kind: type[Model], stage: int) -> tuple[dict[str, Tensor], int]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="The .grad attribute"
        )  # which torch.compile asks for by itself
        torch._dynamo.reset()
        model = make_model(kind)
        assert isinstance(model, Model)
        engine, *_ = dslaunch.initialize(model=model, config=make_config(stage))
        backend = Counted()
        assert not engine.is_compiled
        engine.compile(backend=backend, compile_kwargs={"dynamic": False})
        engine.compile(backend="no such backend")  # a second call does nothing
        assert engine.is_compiled
        for step in range(STEPS):
            engine.backward(model.loss(engine, batch(step, width=WIDTH).chunk(engine.world_size)[rank]))
            engine.step()
            check_freed(engine)
        return snapshot(model.named_parameters()), backend.num_graphs


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Model, TiedEnds], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_compiled_model_trains_as_one_that_is_not(ranks: Ranks, stage: int, kind: type[Model]) -> None:
    expected = reference(kind, 2)
    for params, num_graphs in ranks(_train, kind, stage, world_size=2):
        assert worst_difference(params, expected) <= DRIFT
        assert num_graphs >= (3 if stage == 3 else 1)


def _refused(rank: int) -> list[str]:
    engine, *_ = dslaunch.initialize(model=make_model(Model), config=make_config(3))
    said = []
    for options in ({"schedule": []}, {"compiled_autograd_enabled": True}):
        with pytest.raises(ConfigError) as caught:
            engine.compile(**options)  # type: ignore[arg-type]
        said.append(str(caught.value))
    assert not engine.is_compiled
    return said


def test_deepcompile_is_refused_by_name(ranks: Ranks) -> None:
    assert ranks(_refused, world_size=2)[0] == [
        "engine.compile(schedule=[]) is not available here; leave it out",
        "engine.compile(compiled_autograd_enabled=True) is not available here; leave it out",
    ]
