"""Routes of tokens to experts, with their weights: DeepSpeed's gating, to the bit.

All of it is computed in float32, and random numbers are drawn in DeepSpeed's order, so that the same seed
gives the same routes.

    S  tokens        E  experts        k  experts of a token        C  capacity: tokens that an expert takes

Source: DeepSpeed 0.19.8 moe/sharded_moe.py, `top1gating`, `top2gating`, `topkgating`, `TopKGate`
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ConfigError

NOISES = ("Jitter", "RSample")
_JITTER = 1e-2


class Routes(NamedTuple):
    """Routes of the tokens of one rank; a route that an expert has no room for has expert -1."""

    l_aux: Tensor  # [] float32: the loss that evens the load out
    capacity: int | Tensor  # a tensor [] int64 if no token is dropped: it then depends on the tokens' choices
    num_experts: int
    experts: Tensor  # [k, S] int64
    places: Tensor  # [k, S] int64: slot in the expert's capacity
    weights: Tensor  # [k, S] float32
    counts: Tensor  # [E] int64: number of tokens that chose each expert, including those it has no room for


def top1(
    logits: Tensor,
    *,
    capacity_factor: float,
    min_capacity: int,
    used_token: Tensor | None = None,
    is_sampled: bool = False,
    drop_tokens: bool = True,
    use_rts: bool = True,
) -> Routes:
    """Send each token to its best expert; `is_sampled`: to one drawn by its probability. If an expert has no
    room for all its tokens, it takes the first ones, or with `use_rts` random ones.

    Shapes: logits [S, E] float32; used_token [S], 0 for tokens that go nowhere
    Errors: ConfigError for fewer tokens than `min_capacity`
    """
    noisy = logits + _gumbel(logits) if is_sampled else None
    gates = F.softmax(logits, dim=1)
    num_tokens, num_experts = gates.shape
    chosen = torch.argmax(gates if noisy is None else noisy, dim=1)
    mask = F.one_hot(chosen, num_classes=num_experts)
    if used_token is not None:
        mask = used_token.reshape(-1, 1).to(mask.dtype) * mask
    counts = mask.sum(dim=0).detach()
    capacity = _capacity(gates, capacity_factor, min_capacity) if drop_tokens else counts.max()
    l_aux = torch.sum(_mean(gates) * _mean(mask.float())) * num_experts
    preference = mask * torch.rand_like(gates) if use_rts else mask
    if num_tokens < min_capacity:
        raise ConfigError(
            f"a layer of experts has {num_tokens} tokens and min_capacity {min_capacity}, which each expert "
            "takes at least: give it more tokens, or a min_capacity of at most as many, as 0"
        )
    if isinstance(capacity, int):
        taken = torch.topk(preference, k=min(capacity, num_tokens), dim=0)[1]
        mask = mask * torch.zeros_like(mask).scatter_(0, taken, 1)
    places = torch.cumsum(mask, dim=0) - 1
    return Routes(
        l_aux,
        capacity,
        num_experts,
        torch.where(mask.any(dim=1), chosen, -1).unsqueeze(0),
        torch.sum(places * mask, dim=1).unsqueeze(0),
        torch.sum(gates * mask, dim=1).unsqueeze(0),
        counts,
    )


def top2(
    logits: Tensor,
    *,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    is_second_sampled: bool = True,
) -> Routes:
    """Send each token to its best expert, and to a second one: the second best, or one drawn by its
    probability.

    Shapes: logits [S, E] float32
    """
    gates = F.softmax(logits, dim=1)
    num_experts = gates.shape[1]
    first = torch.argmax(gates, dim=1)
    mask1 = F.one_hot(first, num_classes=num_experts)
    noisy = logits + _gumbel(logits) if is_second_sampled else logits
    second = torch.argmax(noisy.masked_fill(mask1.bool(), float("-inf")), dim=1)
    mask2 = F.one_hot(second, num_classes=num_experts)
    places1 = torch.cumsum(mask1, dim=0) - 1
    places2 = torch.cumsum(mask2, dim=0) - 1 + mask1.sum(dim=0, keepdim=True)
    l_aux = torch.mean(_mean(gates) * _mean(mask1.float())) * num_experts * num_experts
    counts = torch.sum(mask1 + mask2, dim=0).detach()
    capacity: int | Tensor
    if drop_tokens:
        capacity = _capacity(gates, capacity_factor * 2, min_capacity)
        mask1 = mask1 * (places1 < capacity)
        mask2 = mask2 * (places2 < capacity)
    else:
        capacity = counts.max()
    weight1, weight2 = (torch.einsum("se,se->s", gates, mask.float()) for mask in (mask1, mask2))
    total = torch.clamp(weight1 + weight2, min=torch.finfo(torch.float32).eps)
    return Routes(
        l_aux,
        capacity,
        num_experts,
        torch.stack(
            [torch.where(mask.any(dim=1), one, -1) for mask, one in ((mask1, first), (mask2, second))]
        ),
        torch.stack([torch.sum(places1 * mask1, dim=1), torch.sum(places2 * mask2, dim=1)]),
        torch.stack([weight1 / total, weight2 / total]),
        counts,
    )


def top_k(
    logits: Tensor, k: int, *, capacity_factor: float, min_capacity: int, drop_tokens: bool = True
) -> Routes:
    """Send each token to its k best experts; an expert without room for all its tokens takes the most
    probable.

    Shapes: logits [S, E] float32
    """
    gates = F.softmax(logits, dim=1)
    num_tokens, num_experts = gates.shape
    best, chosen = torch.topk(gates, k=k, dim=1)
    mask = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, chosen, True)
    counts = mask.sum(dim=0).detach()
    l_aux = torch.mean(_mean(gates) * _mean(mask.float())) * num_experts * num_experts / k
    capacity: int | Tensor
    if drop_tokens:
        capacity = _capacity(gates, capacity_factor * k, min_capacity)
        preference = torch.zeros_like(gates).scatter(1, chosen, best)
        taken = torch.topk(preference, k=min(capacity, num_tokens), dim=0, sorted=False)[1]
        mask = mask & torch.zeros_like(mask).scatter_(0, taken, True)
    else:
        capacity = counts.max()
    places = torch.cumsum(mask, dim=0) - 1
    weights = gates * mask
    weights = weights / torch.clamp(weights.sum(dim=-1, keepdim=True), min=torch.finfo(torch.float32).eps)
    is_taken = mask.gather(1, chosen)
    return Routes(
        l_aux,
        capacity,
        num_experts,
        torch.where(is_taken, chosen, -1).t(),
        (places.gather(1, chosen) * is_taken).t(),
        weights.gather(1, chosen).t(),
        counts,
    )


class TopKGate(nn.Module):
    """The gate of a layer: a linear layer `wg` without bias, and one of the functions above."""

    def __init__(  # noqa: PLR0913  (DeepSpeed's signature)
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: object = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """`ep_group` is not used: the ranks exchange their numbers of tokens when these are sent.

        Errors: ConfigError for a k that is not a possible number of experts
        """
        super().__init__()
        if not 1 <= k <= num_experts:
            raise ConfigError(f"k={k}: a token goes to at least 1 and at most all {num_experts} experts")
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k = k
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity, self.noisy_gate_policy = min_capacity, noisy_gate_policy
        self.drop_tokens, self.use_rts = drop_tokens, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(self, tokens: Tensor, used_token: Tensor | None = None) -> Routes:
        """Return the routes of the tokens.

        Shapes: tokens [S, model_dim]; used_token [S]
        Errors: as `top1`
        """
        with torch.autocast(tokens.device.type, enabled=False):
            exact = tokens.float()
            if self.noisy_gate_policy == "Jitter" and self.training:
                low, high = (
                    torch.tensor(bound, device="cpu").item() for bound in (1.0 - _JITTER, 1.0 + _JITTER)
                )
                exact = exact * _uniform(exact, low, high)
            logits = F.linear(exact, self.wg.weight.float())
            return self._route(logits, used_token)

    def _route(self, logits: Tensor, used_token: Tensor | None) -> Routes:
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        if self.k == 1:
            return top1(
                logits,
                capacity_factor=factor,
                min_capacity=self.min_capacity,
                used_token=used_token,
                is_sampled=self.noisy_gate_policy == "RSample" and self.training,
                drop_tokens=self.drop_tokens,
                use_rts=self.use_rts,
            )
        if self.k == 2:
            return top2(
                logits,
                capacity_factor=factor,
                min_capacity=self.min_capacity,
                drop_tokens=self.drop_tokens,
                is_second_sampled=self.top2_2nd_expert_sampling,
            )
        return top_k(
            logits,
            self.k,
            capacity_factor=factor,
            min_capacity=self.min_capacity,
            drop_tokens=self.drop_tokens,
        )


def _capacity(gates: Tensor, factor: float, min_capacity: int) -> int:
    """Return how many tokens an expert takes; the factor is rounded to float32, as in DeepSpeed."""
    num_tokens, num_experts = gates.shape
    return max(int(torch.ceil((num_tokens / num_experts) * torch.tensor(factor, device="cpu"))), min_capacity)


def _mean(values: Tensor) -> Tensor:
    """Return the mean over tokens, 0 if there are none, so that the loss of a rank without tokens
    is not NaN.
    """
    return values.mean(dim=0) if len(values) else values.sum(dim=0)


def _uniform(like: Tensor, low: float, high: float) -> Tensor:
    """Draw as torch.distributions.Uniform does, whose bounds are float32."""
    bounds = torch.tensor([low, high], dtype=torch.float32, device="cpu")
    first, width = bounds[0].item(), (bounds[1] - bounds[0]).item()
    return first + torch.rand_like(like) * width


def _gumbel(like: Tensor) -> Tensor:
    """Draw as torch.distributions.Gumbel(0, 1) does."""
    info = torch.finfo(torch.float32)
    return -torch.log(-torch.log(_uniform(like, info.tiny, 1.0 - info.eps)))
