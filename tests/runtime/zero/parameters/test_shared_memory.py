"""Memory that parameters have in common with each other, or with what their modules keep beside them."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm

import dslaunch
from dslaunch import zero
from dslaunch.runtime.zero.parameters.shared_memory import first_sharing, is_expanded, warn_of_kept_views
from tests.runtime.models import make_config
from tests.runtime.ranks import Ranks
from tests.runtime.zero.test_api import kept_warnings

WHOLE = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    ("one", "other", "is_shared"),
    [
        (WHOLE[:2], WHOLE[1:], True),
        (WHOLE[:2], WHOLE[2:], False),
        (WHOLE[:, :2], WHOLE[:, 2:], False),
        (WHOLE.t(), WHOLE[0], True),
        (WHOLE, WHOLE.clone(), False),
        (WHOLE[:0], WHOLE, False),
    ],
)
def test_parameters_share_memory_if_they_have_elements_in_common(
    one: torch.Tensor, other: torch.Tensor, is_shared: bool
) -> None:
    assert first_sharing([torch.ones(3), one, other]) == ((1, 2) if is_shared else None)


def test_an_expanded_tensor_has_one_number_several_times() -> None:
    assert is_expanded(torch.ones(1).expand(3))
    assert not is_expanded(torch.ones(1, 3).expand(1, 3))
    assert not is_expanded(torch.empty_strided((1, 3), (0, 1)))


class Keeping(nn.Module):
    """Keeps views of a parameter that is trained, and of one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.first, self.same = self.linear.weight.data[0], self.frozen.data
        self.copy = self.linear.weight.detach().clone()
        self.linear.register_buffer("last", self.linear.weight.data[2])
        self.normed = spectral_norm(nn.Linear(3, 3))  # makes its view in every forward


def test_a_view_of_a_trained_parameter_that_a_module_keeps_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = Keeping()
    model.lazy = nn.LazyBatchNorm1d(affine=False)  # its buffers have no memory yet
    storage = torch.ones(6)
    model.begin, model.rest = nn.Parameter(storage[:3]), storage[3:]
    with caplog.at_level(logging.WARNING, logger="dslaunch"):
        warn_of_kept_views(model.named_modules(), dict(model.named_parameters()))
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(",")[0] for line in said] == [
        "'first' lies in the memory of parameter 'linear.weight'",
        "'linear.last' lies in the memory of parameter 'linear.weight'",
    ]


def _initialize(rank: int, is_early: bool) -> list[str]:
    with kept_warnings() as said, zero.Init(enabled=is_early):
        model = Keeping()
    with kept_warnings() as said_later:
        dslaunch.initialize(model=model, config=make_config(stage=3))
    return [line.split(",")[0] for line in (*said, *said_later) if "lies in the memory" in line]


@pytest.mark.parametrize("is_early", [False, True])
def test_rank_0_warns_of_kept_views_once(ranks: Ranks, is_early: bool) -> None:
    said, by_other = ranks(_initialize, is_early, world_size=2)
    # zero.Init knows a parameter by the module that has it, and looks there for views
    seen = (
        ["'last' lies in the memory of parameter 'Linear.weight'"]
        if is_early
        else [
            "'first' lies in the memory of parameter 'linear.weight'",
            "'linear.last' lies in the memory of parameter 'linear.weight'",
        ]
    )
    assert (said, by_other) == (seen, [])
