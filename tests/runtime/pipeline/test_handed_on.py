"""Complex tensors between stages, and outputs that have a gradient in some micro batches only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dslaunch
from dslaunch.runtime.compat.pipeline.module import PipelineModule
from tests.runtime.pipeline.models import CLIP
from tests.runtime.pipeline.test_train import MICRO, config_of
from tests.runtime.ranks import RankFailed, Ranks

STEPS = 2


class Wave(nn.Module):
    """Hands on a complex tensor, in every second micro batch without a gradient if it `detaches`."""

    def __init__(self, *, detaches: bool) -> None:
        super().__init__()
        self.linear, self.detaches, self.count = nn.Linear(4, 4), detaches, 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        wave = torch.complex(self.linear(x), x)
        return wave.detach() if self.detaches and self.count % 2 else wave


class Size(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, wave: Tensor) -> Tensor:
        result: Tensor = self.linear(wave.abs() + wave.imag)
        return result


def _layers(*, detaches: bool) -> list[nn.Module]:
    torch.manual_seed(3)
    return [Wave(detaches=detaches), Size()]


def _batches() -> Tensor:
    return torch.randn(STEPS, MICRO, 3, 4, generator=torch.Generator().manual_seed(1))


def _train(rank: int, schedule: str, detaches: bool) -> tuple[list[float], list[float]]:
    module = PipelineModule(_layers(detaches=detaches), 2, loss_fn=F.mse_loss, schedule=schedule)
    engine, *_ = dslaunch.initialize(model=module, config=config_of(2))
    losses, norms = [], []
    for batch in _batches():
        losses.append(engine.train_batch(iter([(x, x) for x in batch])).item())
        norms.append(engine.get_global_grad_norm())
    engine.destroy()
    return losses, norms


def test_complex_tensors_are_handed_on_with_their_gradients(ranks: Ranks) -> None:
    model, wanted = nn.Sequential(*_layers(detaches=False)), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for batch in _batches():
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch.flatten(0, 1)), batch.flatten(0, 1))
        loss.backward()
        wanted.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()))
        optimizer.step()
    for losses, norms in ranks(_train, "1f1b", False, world_size=2):
        assert losses == pytest.approx([loss for loss, _ in wanted], abs=2e-6)
        assert norms == pytest.approx([norm for _, norm in wanted], rel=2e-6)


def test_an_output_that_has_a_gradient_at_times_is_named_as_that(ranks: Ranks) -> None:
    said = r"complex64 \[3, 4\] for micro batch 1, and handed on complex64 \[3, 4\] without a gradient for"
    with pytest.raises(RankFailed, match=said):
        ranks(_train, "1f1b", True, world_size=2, deadline_s=30)


def _most_under_way(rank: int, num_micro_batches: int) -> int:
    module = PipelineModule(_layers(detaches=False), 2, loss_fn=F.mse_loss)
    engine, *_ = dslaunch.initialize(model=module, config=config_of(2, num_micro_batches))
    post, seen = engine._executor.post, []
    send = post.send

    def noted(*args: Any, **kwargs: Any) -> None:
        send(*args, **kwargs)
        seen.append(len(post._under_way))

    post.send = noted
    engine.train_batch(iter([(x, x) for x in torch.ones(num_micro_batches, 3, 4)]))
    engine.destroy()
    return max(seen)


def test_what_has_arrived_is_not_held_until_the_end_of_a_batch(ranks: Ranks) -> None:
    """gloo does not tell the end of a message, nor does a GPU to a host that is ahead of it: what comes back
    does.
    """
    assert ranks(_most_under_way, 12, world_size=2) == [2, 2]
