"""Odd parameters, and loops that change them: each case beside what plain torch does with it, or the words
in which it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import dslaunch

WIDTH = 8
Optimizer = torch.optim.Optimizer


def gathered(
    params: Iterable[nn.Parameter], modifier_rank: int | None = None
) -> AbstractContextManager[object]:
    return dslaunch.zero.GatheredParameters(list(params), modifier_rank=modifier_rank)


class Case(nn.Module):
    """Three layers, one after the other. A case overrides what is odd about them."""

    refused: str | dict[int, str] = ""  # what the error says, at all stages or by stage
    warned = ""  # what a warning says

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.make_block() for _ in range(3))

    def make_block(self) -> nn.Module:
        return nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

    def loss(self, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return (call(x) - 1).pow(2).mean()

    def groups(self) -> Iterable[Any]:
        return self.parameters()

    def make_optimizer(self) -> Optimizer:
        return torch.optim.SGD(self.groups(), lr=0.1, momentum=0.9, weight_decay=0.05)

    def change(self, step: int, optimizer: Optimizer) -> None:
        """Before a step, from 0."""


# ---- what a parameter is


class Complex(Case):
    refused = "parameter 'phase' is torch.complex64"

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * self.phase).abs()


class FrozenComplex(Complex):
    refused = ""

    def __init__(self) -> None:
        super().__init__()
        self.phase.requires_grad_(False)


class Double(Case):
    refused = "parameter 'blocks.1.weight' is torch.float64"

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].double()


class NonContiguous(Case):
    def make_block(self) -> nn.Module:
        block = nn.Linear(WIDTH, WIDTH)
        block.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)[:, ::2].t())
        return block


class ZeroSized(Case):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.nothing.sum()


class Scalars(Case):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor([0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.shift


class Expanded(Case):
    refused = "parameter 'scale' is expanded"

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1).expand(WIDTH))


class MadeInInferenceMode(Case):
    refused = "parameter 'scale' was made in torch.inference_mode()"

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.scale = nn.Parameter(torch.ones(WIDTH))


class ViewsOfOneStorage(Case):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(WIDTH, 2 * WIDTH)
        self.blocks[0].weight = nn.Parameter(whole[:, :WIDTH])
        self.blocks[2].weight = nn.Parameter(whole[:, WIDTH:])


class OverlappingViews(Case):
    refused = "'blocks.0.bias' and 'blocks.2.bias' share their storage"

    def __init__(self) -> None:
        super().__init__()
        whole = torch.randn(WIDTH + 3)
        self.blocks[0].bias, self.blocks[2].bias = nn.Parameter(whole[:WIDTH]), nn.Parameter(whole[3:])


class SharedStorage(Case):
    refused = "'blocks.0.weight' and 'blocks.2.weight' share their storage"

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].weight.data = self.blocks[0].weight.data


class Tied(Case):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].weight = self.blocks[0].weight


class Lazy(Case):
    refused = "parameter 'blocks.0.weight' has no shape yet"

    def make_block(self) -> nn.Module:
        return nn.LazyLinear(WIDTH)

    def make_optimizer(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ListsAndDicts(Case):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(3))
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH)), "b": torch.randn(WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        return (
            super().forward(x) * self.listed[0]
            + self.listed[1] * self.listed[2]
            + self.named["a"] * self.named["b"]
        )


class GradientsOfABuffer(Case):
    refused = "1 of the optimizer's 7 parameters are not the model's"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(WIDTH, requires_grad=True))

    def groups(self) -> Iterable[Any]:
        return [*self.parameters(), self.offset]


class InTheOptimizerOnly(Case):
    refused = "1 of the optimizer's 7 parameters are not the model's"

    def groups(self) -> Iterable[Any]:
        return [*self.parameters(), nn.Parameter(torch.zeros(1))]


class InTheModelOnly(Case):
    warned = (
        "no group of the optimizer has parameters 'blocks.1.weight', 'blocks.1.bias', though "
        "requires_grad is set"
    )

    def groups(self) -> Iterable[Any]:
        return [*self.blocks[0].parameters(), *self.blocks[2].parameters()]


class Sparse(Case):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, sparse=True)

    def make_optimizer(self) -> Optimizer:
        return torch.optim.SGD(self.groups(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table((x[:, 0] > 0).long() + 1))


class Recurrent(Case):
    def make_block(self) -> nn.Module:
        return nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        for block in self.blocks:
            x = block(x)[0]
        return x.squeeze(1)


class ScaledByAHook(Case):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].weight.register_hook(lambda grad: grad * 3)


# ---- what it is computed from


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Parametrized(Case):
    def make_block(self) -> nn.Module:
        block = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(block, "weight", Doubled())
        return block


class WeightNorm(Case):
    def make_block(self) -> nn.Module:
        return parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class SpectralNorm(Case):
    def make_block(self) -> nn.Module:
        return parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Orthogonal(Case):
    def make_block(self) -> nn.Module:
        return parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))


class OldSpectralNorm(Case):
    def make_block(self) -> nn.Module:
        return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


class ParametrizedLater(Case):
    refused = {3: "parameter 'blocks.1.weight' was "}  # noqa: RUF012

    def change(self, step: int, optimizer: Optimizer) -> None:
        if step == 2:
            parametrize.register_parametrization(self.blocks[1], "weight", Doubled(), unsafe=True)


class WeightNormLater(Case):
    refused = "parameter 'blocks.1.weight'"

    def change(self, step: int, optimizer: Optimizer) -> None:
        if step == 2:
            parametrizations.weight_norm(self.blocks[1])


# ---- requires_grad


class FrozenFromTheStart(Case):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)


class FrozenLater(Case):
    def change(self, step: int, optimizer: Optimizer) -> None:
        if step == 2:
            self.blocks[1].requires_grad_(False)
            self.blocks[2].bias.requires_grad_(False)


class FrozenForAWhile(Case):
    """Adam counts each parameter's own steps."""

    def make_optimizer(self) -> Optimizer:
        return torch.optim.AdamW(self.groups(), lr=0.05, weight_decay=0.1)

    def change(self, step: int, optimizer: Optimizer) -> None:
        if step in (0, 2):
            self.blocks[1].requires_grad_(step == 2)
            self.blocks[0].bias.requires_grad_(step == 2)


class FrozenForAWhileByAnother(FrozenForAWhile):
    """A torch optimizer that is stepped as it is."""

    def make_optimizer(self) -> Optimizer:
        return torch.optim.RMSprop(self.groups(), lr=0.01, momentum=0.5, weight_decay=0.1)


class UnfrozenLater(FrozenFromTheStart):
    refused = (
        "the optimizer has parameters 'blocks.1.weight', 'blocks.1.bias', with requires_grad now and without "
        "it at initialize"
    )

    def change(self, step: int, optimizer: Optimizer) -> None:
        if step == 2:
            self.blocks[1].requires_grad_(True)


class UnfrozenAndInNoGroup(UnfrozenLater):
    refused = ""
    warned = (
        "no group of the optimizer has parameters 'blocks.1.weight', 'blocks.1.bias', though "
        "requires_grad is set"
    )

    def groups(self) -> Iterable[Any]:
        return [param for param in self.parameters() if param.requires_grad]


# ---- another parameter in its place


class Replaced(Case):
    refused = "the model no longer has parameter 'blocks.1.weight', and now has parameter 'blocks.1.weight'"

    def change(self, step: int, optimizer: Optimizer) -> None:
        if step == 2:
            self.blocks[1].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))


class Added(Case):
    warned = "no group of the optimizer has parameter 'extra', though requires_grad is set"

    def change(self, step: int, optimizer: Optimizer) -> None:
        if step == 2:
            self.extra = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self, "extra", 1.0)


class TiedLater(Case):
    warned = "the model no longer has parameter 'blocks.2.weight'"

    def change(self, step: int, optimizer: Optimizer) -> None:
        if step == 2:
            self.blocks[2].weight = self.blocks[0].weight


class Untied(Tied):
    warned = "no group of the optimizer has parameter 'blocks.2.weight', though requires_grad is set"

    def change(self, step: int, optimizer: Optimizer) -> None:
        if step == 2:
            with gathered([self.blocks[0].weight]):
                self.blocks[2].weight = nn.Parameter(self.blocks[0].weight.detach().clone())


class ModuleSwapped(Case):
    refused = "the model no longer has parameters 'blocks.1.weight', 'blocks.1.bias', and now has"

    def change(self, step: int, optimizer: Optimizer) -> None:
        if step == 2:
            self.blocks[1] = nn.Linear(WIDTH, WIDTH)


class LoadedByAssigning(Case):
    refused = "the model no longer has parameters 'blocks.0.weight'"

    def change(self, step: int, optimizer: Optimizer) -> None:
        if step == 2:
            values = {name: torch.ones(param.shape) for name, param in self.named_parameters()}
            self.load_state_dict(values, assign=True)


class ConvertedLater(Case):
    refused = "parameter 'blocks.1.weight' "

    def change(self, step: int, optimizer: Optimizer) -> None:
        if step == 2:
            self.blocks[1].to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x.to(block.weight.dtype)))
        return x


# ---- the optimizer


class GroupAdded(Case):
    refused = "param_groups have changed since initialize(): 1 parameters were added"

    def groups(self) -> Iterable[Any]:
        return list(self.parameters())[:-1]

    def change(self, step: int, optimizer: Optimizer) -> None:
        if step == 2:
            optimizer.add_param_group({"params": [self.blocks[2].bias]})


class ListShortened(Case):
    refused = "param_groups have changed since initialize(): 1 parameters were taken out"

    def change(self, step: int, optimizer: Optimizer) -> None:
        if step == 2:
            del optimizer.param_groups[0]["params"][1]


class GroupDivided(Case):
    """The same parameters in the same order, in more groups."""

    refused = "param_groups have changed since initialize(): the number of groups was 1 and is 2"

    def change(self, step: int, optimizer: Optimizer) -> None:
        if step == 2:
            (group,) = optimizer.param_groups
            later = {**group, "params": group["params"][3:], "lr": 0.0}
            group["params"] = group["params"][:3]
            optimizer.param_groups.append(later)


class _AssigningSgd(torch.optim.Optimizer):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.data = param.data - group["lr"] * param.grad.data


class AssigningOptimizer(Case):
    def make_optimizer(self) -> Optimizer:
        return _AssigningSgd(self.groups(), {"lr": 0.1})


class _ElementwiseAssigningSgd(_AssigningSgd):
    is_elementwise = True


class ElementwiseAssigningOptimizer(Case):
    def make_optimizer(self) -> Optimizer:
        return _ElementwiseAssigningSgd(self.groups(), {"lr": 0.1})


# ---- values that the program writes


class AssignedBetweenSteps(Case):
    refused = "parameter 'blocks.1.weight' "

    def change(self, step: int, optimizer: Optimizer) -> None:
        if step == 2:
            self.blocks[1].weight.data = torch.ones(WIDTH, WIDTH)


class AssignedWhileGathered(Case):
    def change(self, step: int, optimizer: Optimizer) -> None:
        with gathered([self.blocks[1].weight], modifier_rank=0):
            self.blocks[1].weight.data = self.blocks[1].weight.data * 0.5


class TransposedBetweenSteps(Case):
    refused = "parameter 'blocks.1.weight' "

    def change(self, step: int, optimizer: Optimizer) -> None:
        if step == 2:
            self.blocks[1].weight.data = self.blocks[1].weight.data.t()


class TransposedWhileGathered(Case):
    def change(self, step: int, optimizer: Optimizer) -> None:
        with gathered([self.blocks[1].weight], modifier_rank=0):
            self.blocks[1].weight.data = self.blocks[1].weight.data.t()


class ClippedBetweenSteps(Case):
    def change(self, step: int, optimizer: Optimizer) -> None:
        with gathered(self.parameters(), modifier_rank=0):
            for param in self.parameters():
                param.data.clamp_(-0.2, 0.2)


class Normalized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


class WritesInForward(Case):
    def make_block(self) -> nn.Module:
        return Normalized(WIDTH, WIDTH)


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class WritesThroughData(Case):
    def make_block(self) -> nn.Module:
        return Clamped(WIDTH, WIDTH)


class Assigned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = self.weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


class AssignsInForward(Case):
    refused = "parameter 'blocks.0.weight' is torch.float32 on cpu in memory of its own"

    def make_block(self) -> nn.Module:
        return Assigned(WIDTH, WIDTH)


class TiedByDataInForward(Case):
    refused = "parameter 'blocks.0.weight' "

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[0].weight.data = self.blocks[2].weight.data
        return super().forward(x)


class MaxNorm(Case):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, max_norm=0.7)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table(torch.arange(5)).sum(0))


# ---- losses


class DoubleBackward(Case):
    def loss(self, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        output = call(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return output.pow(2).mean() + slope.pow(2).mean()


class PenaltyWhileGathered(Case):
    def loss(self, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        loss = super().loss(call, x)
        with gathered(self.parameters()):
            penalty = sum(param.pow(2).sum() + param.exp().mean() for param in self.parameters())
        return loss + 0.1 * penalty


class PenaltyBeforeTheForward(Case):
    def loss(self, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with gathered(self.parameters()):
            penalty = torch.stack([param.pow(2).sum() for param in self.parameters()]).sum()
        return super().loss(call, x) + 0.1 * penalty


class PenaltyOnFreedParameters(Case):
    refused = {3: "parameter 'blocks.0.weight' was asked for"}  # noqa: RUF012

    def loss(self, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return super().loss(call, x) + 0.1 * sum(param.pow(2).sum() for param in self.parameters())


def _cases(kind: type[Case]) -> list[type[Case]]:
    return [one for below in kind.__subclasses__() for one in (below, *_cases(below))]


CASES = tuple(dict.fromkeys(_cases(Case)))
