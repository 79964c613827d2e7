"""A backward in two halves gives what a whole one gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dslaunch.runtime.pipeline.split_backward import backward_inputs


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm, self.aside = nn.LayerNorm(4), nn.Parameter(torch.randn(4))
        self.unused, self.frozen = nn.Parameter(torch.randn(2)), nn.Linear(4, 4).requires_grad_(False)


Form = Callable[[Net, Tensor, Tensor], tuple[Tensor, ...]]
FORMS: dict[str, Form] = {
    "a chain": lambda net, x, y: (net.second(torch.tanh(net.first(x))) + y,),
    "one weight twice": lambda net, x, y: (net.first(torch.tanh(net.first(x))) * y,),
    "one weight twice and another between": lambda net, x, y: (
        net.first(net.norm(net.second(torch.tanh(net.first(x))))) * y,
    ),
    "weights beside the inputs": lambda net, x, y: (
        x * torch.tanh(net.aside * 2).sum() + net.first(net.aside),
    ),
    "an output without inputs": lambda net, x, y: (net.first(x) * y, net.aside.square().sum()),
    "an output made of another": lambda net, x, y: (lambda h: (net.second(h), h * 2))(net.first(x)),
    "an output used by another, without inputs": lambda net, x, y: (lambda h: (net.first(x) * h, h))(
        torch.tanh(net.aside)
    ),
    "a frozen layer": lambda net, x, y: (net.second(net.frozen(net.first(x))),),
    "an input that is not used": lambda net, x, y: (net.first(x),),
    "the inputs themselves": lambda net, x, y: (x, y * 1),
    "a residual": lambda net, x, y: (x + net.second(torch.relu(net.first(net.norm(x)))),),
}


@pytest.mark.parametrize("name", FORMS)
def test_two_halves_are_the_whole(name: str) -> None:
    def run(is_split: bool) -> tuple[list[Tensor | None], dict[str, Tensor | None], list[str]]:
        net = Net()
        seen: list[str] = []
        for param_name, param in net.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(lambda _, one=param_name: seen.append(one))
        total: list[Tensor | None] = [None, None]
        for number in range(2):  # gradients add up
            torch.manual_seed(number)
            inputs = [torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)]
            outputs = [one for one in FORMS[name](net, *inputs) if one.requires_grad]
            grads = [torch.randn_like(one) for one in outputs]
            if is_split:
                found, rest = backward_inputs(outputs, grads, inputs, net.parameters())
                assert not (number == 0 and seen)
                rest.run()
            else:
                torch.autograd.backward(outputs, grads)
                found = tuple(one.grad for one in inputs)
            total = list(found)
        return total, {key: param.grad for key, param in net.named_parameters()}, sorted(set(seen))

    (inputs, params, seen), (wanted_inputs, wanted, wanted_seen) = run(True), run(False)
    for found, one in zip(inputs, wanted_inputs, strict=True):
        assert (found is None) == (one is None)
        if found is not None and one is not None:
            torch.testing.assert_close(found, one)
    for key, grad in wanted.items():
        mine = params[key]
        assert (mine is None) == (grad is None), key
        if mine is not None and grad is not None:
            torch.testing.assert_close(mine, grad, msg=key)
    assert seen == wanted_seen
