"""The models that the benchmarks train."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 512
HEAD_DIM = 64
ADAMW = {"lr": 1e-4, "weight_decay": 0.01}
EP, EXPERTS = 4, 8  # ranks that share the experts, and experts
AUX = 0.01  # factor of the loss that evens the load out
# time of a forward, of the gradients of inputs, and of those of parameters: that of a real stage
SLEEP_S = 0.05


class Shape(NamedTuple):
    """A model, and the batch of each group of ranks that computes together."""

    width: int
    blocks: int
    batch: int
    sequence: int
    layers: int = 0  # layers of a block, each a few modules that compute next to nothing; 0: a block of a GPT


class Attention(nn.Module):
    """With its norm. The rows of `qkv` lie by heads, so that a part of them is a part of the heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, HEAD_DIM)).permute(3, 0, 2, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = x + self.out(attended.transpose(1, 2).flatten(2))
        return result


class Block(Attention):
    """Attention and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.second = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        result: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return result


class Small(nn.Module):
    """Three modules that compute next to nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.act, self.drop = nn.Linear(width, width), nn.Tanh(), nn.Identity()
        # 500 of them one after the other: with larger weights the order of a sum decides what is trained
        nn.init.normal_(self.linear.weight, std=0.002)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.drop(self.act(self.linear(x)))
        return result


def _block(shape: Shape) -> nn.Module:
    if shape.layers:
        return nn.Sequential(*(Small(shape.width) for _ in range(shape.layers)))
    return Block(shape.width)


class Gpt(nn.Module):
    """Returns the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, shape.width)
        self.blocks = nn.ModuleList(_block(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()  # float32 also for a bfloat16 model: its losses are compared
        return loss_of(logits[:, :-1], tokens[:, 1:])


class MixtureOfExperts(nn.Module):
    """`moe` is DeepSpeed's MoE, or ours. Tokens beyond an expert's capacity are dropped in their order, so
    that both drop the same.
    """

    def __init__(self, moe: Any, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.embed, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.attention = nn.ModuleList(Attention(width) for _ in range(shape.blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(shape.blocks))
        self.experts = nn.ModuleList(
            moe(
                hidden_size=width,
                expert=nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
                num_experts=EXPERTS,
                ep_size=EP,
                use_rts=False,
            )
            for _ in range(shape.blocks)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x, even = self.embed(tokens[:, :-1]), torch.zeros(())
        for attention, norm, experts in zip(self.attention, self.norms, self.experts, strict=True):
            x = attention(x)
            more, l_aux, _ = experts(norm(x))
            x, even = x + more, even + l_aux
        return loss_of(self.head(x), tokens[:, 1:]) + AUX * even


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """The mean cross entropy."""
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def layers(shape: Shape) -> list[nn.Module]:
    """Blocks of a Transformer, as a pipeline takes them."""
    blocks = [Block(shape.width) for _ in range(shape.blocks)]
    return [nn.Embedding(VOCABULARY, shape.width), *blocks, nn.Linear(shape.width, VOCABULARY)]


def llama(shape: Shape) -> Any:
    """Hugging Face's."""
    from transformers import LlamaConfig, LlamaForCausalLM  # imported at need: it takes seconds

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=shape.width,
            intermediate_size=3 * shape.width,
            num_hidden_layers=shape.blocks,
            num_attention_heads=shape.width // HEAD_DIM,
            num_key_value_heads=shape.width // HEAD_DIM,
            max_position_embeddings=shape.sequence,
            tie_word_embeddings=False,
        )
    )


class _Slow(torch.autograd.Function):
    """Takes its time for the gradient, and in the forward if it is asked to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float) -> Tensor:
        time.sleep(forward_s)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(SLEEP_S)
        return grad, None


class Sleeps(nn.Module):
    """A layer that sleeps in its forward, and as long for each half of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not x.requires_grad:  # the first stage takes as long as the others
            x = x.detach().requires_grad_()
        slow: Tensor = _Slow.apply(x, SLEEP_S)  # type: ignore[no-untyped-call]
        weight: Tensor = _Slow.apply(self.weight, 0.0)  # type: ignore[no-untyped-call]
        return slow * weight
