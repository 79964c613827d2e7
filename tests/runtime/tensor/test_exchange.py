"""What enters layers that are divided over ranks."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from dslaunch.runtime.tensor.exchange import TensorAxis


class Counted(TensorAxis):
    """Two ranks with the same gradients."""

    def __init__(self) -> None:
        super().__init__(size=2, index=0)
        self.num_sums = 0

    def sum(self, value: Tensor, what: str) -> Tensor:
        self.num_sums += 1
        return 2 * value


def test_what_enters_several_layers_is_added_once() -> None:
    axis, x = Counted(), torch.ones(3, requires_grad=True)
    hidden = x * 1
    (axis.enter(hidden, "a") + 10 * axis.enter(hidden, "b")).sum().backward()
    assert axis.num_sums == 1
    assert x.grad is not None
    assert x.grad.tolist() == [22.0] * 3


def test_what_was_changed_since_it_entered_enters_anew() -> None:
    axis, x = Counted(), torch.ones(3, requires_grad=True)
    hidden = x * 1
    before = axis.enter(hidden, "a").clone()
    hidden.mul_(3)
    (before + axis.enter(hidden, "b")).sum().backward()
    assert axis.num_sums == 2
    assert x.grad is not None
    assert x.grad.tolist() == [2.0 + 6.0] * 3


def test_what_has_entered_is_freed_with_the_graph() -> None:
    x = torch.ones(3, requires_grad=True)
    hidden = x * 1
    kept = weakref.ref(hidden)
    Counted().enter(hidden, "a").sum().backward()
    del hidden
    assert kept() is None


def test_what_enters_layers_of_two_models_is_added_for_each() -> None:
    one, other = Counted(), Counted()
    hidden = torch.ones(3, requires_grad=True) * 1
    (one.enter(hidden, "a") + other.enter(hidden, "b")).sum().backward()
    assert (one.num_sums, other.num_sums) == (1, 1)


def test_a_parameter_enters_anew_each_time() -> None:
    axis, param = Counted(), torch.nn.Parameter(torch.ones(3))
    assert axis.enter(param, "a") is not axis.enter(param, "a")
