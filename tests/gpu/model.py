"""The GPT that the measurements train, and its batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional


class Size(NamedTuple):
    """A model and its batch."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int


FIRST = Size(layers=12, width=2048, heads=16, vocabulary=32_000, sequence=2048, batch=4)  # 0.7e9 parameters
WIDE = Size(layers=8, width=4096, heads=32, vocabulary=32_000, sequence=512, batch=1)  # 1.9e9 parameters
MIDDLE = Size(layers=4, width=1024, heads=8, vocabulary=32_000, sequence=512, batch=4)
SMALL = Size(
    layers=3, width=64, heads=2, vocabulary=100, sequence=16, batch=4
)  # for a device that is not there


class Block(nn.Module):
    """Attention and a perceptron, each after a norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, width = x.shape
        qkv = self.qkv(self.first(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))
        result: Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
        return result


class GPT(nn.Module):
    """`forward` returns the loss of predicting each token from itself: what it learns does not matter.

    It is made on the GPU: a processor takes half a minute to draw as many numbers.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        with torch.device("cuda"):
            self.tokens = nn.Embedding(size.vocabulary, size.width)
            self.places = nn.Embedding(size.sequence, size.width)
            self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
            self.norm = nn.LayerNorm(size.width)
            self.head = nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids.flatten())


def tokens(size: Size, step: int) -> Tensor:
    """The batch of a step, on the GPU: int64 of shape [batch, sequence]."""
    drawn = torch.randint(
        size.vocabulary, (size.batch, size.sequence), generator=torch.Generator().manual_seed(step)
    )
    return drawn.cuda()


def config(size: Size, *, ranks: int = 1, **zero: Any) -> dict[str, Any]:
    """A ds_config: bf16, AdamW, clipping, and `zero` for zero_optimization."""
    return {
        "train_batch_size": size.batch * ranks,
        "train_micro_batch_size_per_gpu": size.batch,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
        "zero_optimization": zero,
    }
