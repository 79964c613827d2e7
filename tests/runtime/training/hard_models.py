"""Models that use their parameters in every way that real ones do.

All take [batch, 8] and give a loss of the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 15), nn.Linear(15, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


class Model(nn.Module):
    """Three blocks, one after the other; a case overrides what it does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.make_block() for _ in range(3))

    def make_block(self) -> nn.Module:
        return Block()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        """`call` runs the model, through the engine if there is one."""
        result: Tensor = call(x).pow(2).mean()
        return result


class CalledTwice(Model):
    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        result: Tensor = first(third(second(first(x))))
        return result


class TiedEnds(Model):
    """Embedding and head are one parameter, with blocks between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(super().forward(self.embed(x)))
        return result


class TiedBlocks(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


class SharedBlock(Model):
    """One module object in two places of the list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = self.blocks[0]


class UsedOutside(Model):
    """A block's weight is used by its owner's owner, before the block and after it."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.blocks[1].down.weight @ self.blocks[1].up.weight)
        result: Tensor = F.linear(super().forward(x), self.blocks[0].up.weight)
        return result


class UsedByAnother(Model):
    """Two units' weights in one operation."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x @ (self.blocks[0].down.weight @ self.blocks[2].up.weight)


class UnusedParameter(Model):
    def make_block(self) -> nn.Module:
        block = Block()
        block.left_over = nn.Linear(WIDTH, WIDTH)
        return block


class UnusedUnit(Model):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.blocks[2](self.blocks[0](x))
        return result


class Experts(nn.Module):
    """Which expert is used depends on the data, so it differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.sum(dim=1).abs() * 10).long() % len(self.experts)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            out = out + self.experts[index](x) * (chosen == index).unsqueeze(1)
        return x + out


class MixtureOfExperts(Model):
    def make_block(self) -> nn.Module:
        return Experts()


class MixedDtypes(Model):
    """A block of float32 with a bfloat16 layer inside."""

    def make_block(self) -> nn.Module:
        block = Block()
        block.down = nn.Linear(15, WIDTH, bias=False).bfloat16()
        block.forward = lambda x: x + block.down(torch.tanh(block.up(x)).bfloat16()).float()  # type: ignore[method-assign]
        return block


class FrozenInside(Model):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.up.requires_grad_(False)


class FrozenUnit(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[2].requires_grad_(False)


class FrozenButAdapters(Model):
    """As LoRA: the base is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            x = block(x) + adapter(x)
        return x


class CheckpointAround(Model):
    options: dict[str, Any] = {"use_reentrant": False}  # noqa: RUF012 - never changed

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()  # what the reentrant kind asks for
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)
        return x


class ReentrantAround(CheckpointAround):
    options = {"use_reentrant": True}  # noqa: RUF012


class CheckpointInside(Model):
    options: dict[str, Any] = {"use_reentrant": False}  # noqa: RUF012

    def make_block(self) -> nn.Module:
        class Inside(Block):
            options = self.options

            def forward(self, x: Tensor) -> Tensor:
                inner: Tensor = checkpoint(self.norm, x, **self.options)
                inner = checkpoint(lambda y: torch.tanh(self.up(y)), inner, **self.options)
                result: Tensor = x + self.down(inner)
                return result

        return Inside()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone().requires_grad_())


class ReentrantInside(CheckpointInside):
    options = {"use_reentrant": True}  # noqa: RUF012


class CheckpointOverSeveral(Model):
    options: dict[str, Any] = {"use_reentrant": False}  # noqa: RUF012

    def forward(self, x: Tensor) -> Tensor:
        run = super().forward
        result: Tensor = checkpoint(lambda y: run(y), x.clone().requires_grad_(), **self.options)
        return result


class CheckpointOverParts(Model):
    """What is computed again are modules of a container, which is never called itself;
    the last one once without that.
    """

    options: dict[str, Any] = {"use_reentrant": False}  # noqa: RUF012

    def make_block(self) -> nn.Module:
        return nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "linear": nn.Linear(WIDTH, WIDTH)})

    def run(self, block: nn.ModuleDict, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(block["linear"](block["norm"](x)))
        return result

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = checkpoint(self.run, block, x, **self.options)
        return self.run(block, x)


class ReentrantOverParts(CheckpointOverParts):
    options = {"use_reentrant": True}  # noqa: RUF012


class ReentrantOverSeveral(CheckpointOverSeveral):
    options = {"use_reentrant": True}  # noqa: RUF012


def _keep_most() -> Any:
    """Save every result but views and norms: an engine's copies and collectives are none of the program's."""

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_again = operation.is_view or operation is torch.ops.aten.native_layer_norm.default
        return CheckpointPolicy.PREFER_RECOMPUTE if is_again else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


class SelectiveCheckpoint(CheckpointOverSeveral):
    options = {"use_reentrant": False, "context_fn": _keep_most}  # noqa: RUF012


class ParameterAsArgument(Model):
    """What is computed again saves another unit's parameter, and has used three more units
    before its turn comes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        run = super().forward
        x = x.clone().requires_grad_()  # else the product has no use for the weight in its backward
        result: Tensor = checkpoint(lambda y, w: run(y * w), x, self.scale.weight, use_reentrant=False)
        return self.scale(result)


class GradientPenalty(Model):
    """The loss has the gradient of the output in it."""

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        value = call(x).pow(2).mean()
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        result: Tensor = value + slope.pow(2).sum() * x.shape[0]
        return result


@dataclass
class Output:
    value: Tensor
    more: dict[str, Tensor]


class DataclassOutput(Model):
    def make_block(self) -> nn.Module:
        class Wrapping(Block):
            def forward(self, x: Any) -> Any:
                value = super().forward(x.value + x.more["twice"] if isinstance(x, Output) else x)
                return Output(value, {"twice": value * 0.2})

        return Wrapping()

    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        out = call(x)
        result: Tensor = (out.value + out.more["twice"]).pow(2).mean()
        return result


class Stashed(Model):
    """A tensor leaves a block on the block itself."""

    def make_block(self) -> nn.Module:
        class Stashing(Block):
            def forward(self, x: Tensor) -> Tensor:
                self.stash = super().forward(x) * 0.1
                return super().forward(x.detach())

        return Stashing()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + block.stash
        return x


class ViewChangedInPlace(Model):
    """What a block returns is a view, and is written to."""

    def make_block(self) -> nn.Module:
        class Viewing(Block):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x).view(-1, 4, 2).transpose(0, 1)

        return Viewing()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y += 1.0
            x = y.transpose(0, 1).reshape(-1, WIDTH)
        return x


class CalledPastItsOwner(Model):
    """Submodules of a block are called, and the block is not."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.down(torch.tanh(block.up(x)))
        return x


class BatchNorm(Model):
    def make_block(self) -> nn.Module:
        block = Block()
        block.norm = nn.BatchNorm1d(WIDTH)
        return block


class OddShapes(Model):
    """A parameter without dimensions, one with an empty one, and one that is transposed in memory."""

    def make_block(self) -> nn.Module:
        class Odd(Block):
            def __init__(self) -> None:
                super().__init__()
                self.scale = nn.Parameter(torch.tensor(0.5))
                self.nothing = nn.Parameter(torch.zeros(3, 0))
                self.turned = nn.Parameter(torch.randn(5, WIDTH).t())

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * self.scale + (x @ self.turned).mean() + self.nothing.sum()

        return Odd()


class SparseEmbedding(Model):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table((x[:, 0].abs() * 10).long() % 11))


class SavedOnCpu(Model):
    def loss(self, call: Callable[..., Any], x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().loss(call, x)


class Compiled(Model):
    """Each block's forward was compiled before the engine saw it."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True)


class Scripted(Model):
    """Each block is a ScriptModule, whose tables of parameters and modules are no dicts."""

    def make_block(self) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            block: nn.Module = torch.jit.script(Block())  # type: ignore[no-untyped-call]
            return block


class Recurrent(Model):
    def make_block(self) -> nn.Module:
        class Gru(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.cell = nn.GRU(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                result: Tensor = self.cell(x)[0]
                return result

        return Gru()


class GradientInForward(Model):
    """A gradient is taken while the forward is under way."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad() if torch.is_grad_enabled() else nullcontext():
            y = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.blocks[0](y).sum(), y)
        return super().forward(x + 0.1 * slope.detach())


class SameParameterReturned(Model):
    """A block that gives its weight away."""

    def make_block(self) -> nn.Module:
        class Giving(Block):
            def forward(self, x: Tensor) -> Any:
                return super().forward(x), self.up.weight

        return Giving()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, weight = block(x)
            x = x + (x @ weight.t() @ weight) * 0.1
        return x


KINDS: tuple[type[Model], ...] = (
    Model,
    CalledTwice,
    TiedEnds,
    TiedBlocks,
    SharedBlock,
    UsedOutside,
    UsedByAnother,
    UnusedParameter,
    UnusedUnit,
    MixtureOfExperts,
    MixedDtypes,
    FrozenInside,
    FrozenUnit,
    FrozenButAdapters,
    CheckpointAround,
    ReentrantAround,
    CheckpointInside,
    ReentrantInside,
    CheckpointOverParts,
    ReentrantOverParts,
    CheckpointOverSeveral,
    ReentrantOverSeveral,
    SelectiveCheckpoint,
    ParameterAsArgument,
    GradientPenalty,
    DataclassOutput,
    Stashed,
    ViewChangedInPlace,
    CalledPastItsOwner,
    BatchNorm,
    OddShapes,
    SparseEmbedding,
    SavedOnCpu,
    Compiled,
    Scripted,
    Scripted,
    Recurrent,
    GradientInForward,
    SameParameterReturned,
)
