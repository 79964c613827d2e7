"""A small language model as a list of layers, and one process that trains it: the judge of every pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dslaunch.runtime.pipeline.layers import LayerSpec, TiedLayerSpec

VOCABULARY, WIDTH = 24, 8
CLIP = 0.3  # below every norm here


class Embed(nn.Embedding):
    """With the base's weights as the judge has them."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH)


class Block(nn.Module):
    """A layer with parameters of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Head(nn.Module):
    """Logits with a weight of the embedding's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def logits(embed: nn.Module, x: Tensor) -> Tensor:
    """Use the embedding as the head."""
    return F.linear(x, embed.weight)  # type: ignore[arg-type]


def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1).float(), labels.flatten())


def specs(depth: int = 6, *, is_tied: bool) -> list[Any]:
    """Return the layers, to be built."""
    ends: list[Any] = (
        [TiedLayerSpec("embed", Embed), TiedLayerSpec("embed", Embed, forward_fn=logits)]
        if is_tied
        else [LayerSpec(Embed), LayerSpec(Head)]
    )
    return [ends[0], *(LayerSpec(Block) for _ in range(depth)), ends[1]]


class Judge(nn.Module):
    """All layers in one module, with the names that a PipelineModule gives."""

    def __init__(self, depth: int = 6, *, is_tied: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.tied_modules = nn.ModuleDict({"embed": Embed()} if is_tied else {})
        self._number = depth + 1
        if not is_tied:
            self.add_module("0", Embed())
        for number in range(1, depth + 1):
            self.add_module(str(number), Block())
        if not is_tied:
            self.add_module(str(depth + 1), Head())

    def forward(self, x: Tensor) -> Tensor:
        embed = next(iter(self.tied_modules.values()), None)
        x = embed(x) if embed is not None else self.get_submodule("0")(x)
        for number in range(1, self._number):
            x = self.get_submodule(str(number))(x)
        return logits(embed, x) if embed is not None else self.get_submodule(str(self._number))(x)


def take_values(module: nn.Module, judge: nn.Module) -> None:
    """Give a rank's layers the judge's values."""
    wanted = judge.state_dict()
    module.load_state_dict({name: wanted[name] for name in module.state_dict()})


def data(step: int, *, size: int, length: int = 5) -> tuple[Tensor, Tensor]:
    """Return inputs and labels."""
    tokens = torch.randint(
        0, VOCABULARY, (size, length + 1), generator=torch.Generator().manual_seed(100 + step)
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def train_alone(
    judge: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], *, lr: float = 0.5
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Return losses, norms before clipping and the parameters after SGD on whole batches."""
    model = deepcopy(judge)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses, norms = [], []
    for inputs, labels in batches:
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, {name: param.detach() for name, param in model.named_parameters()}
