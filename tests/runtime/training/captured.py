"""Models whose checkpointed functions use parameters of other modules, however these reach them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dslaunch

WIDTH = 8
Checkpoint = Callable[..., Any]


class Block(nn.Module):
    """Uses a table that is another module's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Any) -> Tensor:
        if isinstance(table, (tuple, dict)):
            (table,) = table.values() if isinstance(table, dict) else table
        return x + torch.tanh(F.linear(self.linear(x), table) @ table)


class Captured(nn.Module):
    """Two blocks, each in a checkpoint; a case overrides how the table comes to them."""

    def __init__(self, run: Checkpoint) -> None:
        super().__init__()
        self.run = run
        self.table = nn.Embedding(6, WIDTH)
        nn.init.normal_(self.table.weight, std=0.3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.last = nn.Linear(WIDTH, 3)

    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            x = self.call(block, x, self.table.weight)
        result: Tensor = self.last(x)
        return result


class Positional(Captured):
    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        return self.run(block, x, table)


class Keyword(Captured):
    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        return self.run(block, x, table=table)


class InATuple(Captured):
    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        return self.run(block, x, (table,))


class InADict(Captured):
    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        return self.run(functools.partial(block, table={"table": table}), x)


class Partial(Captured):
    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        return self.run(functools.partial(block, table=table), x)


class Closure(Captured):
    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        return self.run(lambda y: block(y, table), x)


class Rows(Captured):
    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        return self.run(lambda y: block(y, table[:4]), x)


class RowsBefore(Captured):
    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        rows = table[:4]
        return self.run(lambda y: block(y, rows), x)


class RowsAsKeyword(Captured):
    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        return self.run(functools.partial(block, table=table[:4]), x)


class Transposed(Captured):
    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        return self.run(lambda y: block(y, table.T.t()), x)


class Attribute(Captured):
    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        return self.run(lambda y: block(y, self.table.weight), x)


class FunctionsOnly(Captured):
    """No module runs in the checkpoint."""

    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        return self.run(lambda y: torch.tanh(F.linear(block.linear(x), table) @ table + y), x)


class BeforeItsBlock(Captured):
    """What is computed of it is followed by modules."""

    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        def run(y: Tensor) -> Any:
            y = torch.tanh(F.linear(y, table) @ table)
            for one in self.blocks:
                y = one(y, table)
            return F.linear(y, table) @ table

        return self.run(run, x)


class WithoutModules(Captured):
    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        weight = block.linear.weight
        return self.run(lambda y: torch.tanh(F.linear(y, weight) @ table.t()) @ table, x)


class InNoGrad(Captured):
    """A part of a function reads it without a gradient."""

    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        def run(y: Tensor) -> Any:
            with torch.no_grad():
                norm = table.norm() + block.linear.weight.norm()
            return block(y / norm, table)

        return self.run(run, x)


class Nested(Captured):
    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        def inner(y: Tensor) -> Any:
            return block(F.linear(y, table) @ table, table)

        return self.run(lambda y: torch.tanh(self.run(inner, y) + F.linear(y, table) @ table), x)


class Listed(Captured):
    """It is kept outside of the modules."""

    def __init__(self, run: Checkpoint) -> None:
        super().__init__(run)
        self.others = [self.table.weight]

    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        return self.run(lambda y: block(y, self.others[0]), x)


class Returning(nn.Module):
    """Returns its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, WIDTH) * 0.3)

    def forward(self) -> Tensor:
        return self.weight


class Returned(Captured):
    def __init__(self, run: Checkpoint) -> None:
        super().__init__(run)
        self.table = Returning()  # type: ignore[assignment]

    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        return self.run(functools.partial(block, table=self.table()), x)  # type: ignore[call-arg]


class TiedHead(Captured):
    """The embedding's table is the head of a loss that is computed in parts."""

    def call(self, block: nn.Module, x: Tensor, table: nn.Parameter) -> Any:
        return self.run(functools.partial(block, table=table), x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.table((x[:, 0] > 0).long()) + super().forward(x).mean()
        weight = self.table.weight

        def loss(part: Tensor) -> Any:
            return F.cross_entropy(F.linear(part, weight), torch.zeros(len(part), dtype=torch.long))

        return torch.stack([self.run(loss, part) for part in x.split(2)]).mean()


# By name: what checkpoints a function.
CHECKPOINTS: dict[str, Checkpoint] = {
    "checkpoint": functools.partial(checkpoint, use_reentrant=False),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "ours": dslaunch.checkpointing.checkpoint,
}
CASES = tuple(Captured.__subclasses__())


def make(kind: type[Captured], run: str) -> Captured:
    torch.manual_seed(0)
    return kind(CHECKPOINTS[run])
