"""cpu_checkpointing in models that call torch's own checkpoint(), of either kind: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dslaunch
from dslaunch.runtime.activation.host_inputs import HostInputs, is_of_torchs_checkpoint
from tests.runtime.models import assert_same_bits, make_config
from tests.runtime.ranks import Ranks

from .test_checkpointing import checkpointing, fresh_process

WIDTH, LAYERS, STEPS = 8, 3, 2
CASES = [(False, 0), (True, 0), (False, 3), (True, 3)]  # reentrant, stage


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 15), nn.Linear(15, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        inner = torch.dropout(torch.tanh(self.up(x)), 0.3, True)
        return x + self.down(inner) * mask + positions.unsqueeze(-1)


class Layers(nn.Module):
    """Inputs that are views: transposed, expanded and shared by all layers; integers; a tied weight."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).view(2, -1, WIDTH).transpose(0, 1)
        mask = (x.detach()[:1, :1] > 0).to(x.dtype).expand_as(x)
        positions = torch.arange(x.shape[1]).expand(x.shape[0], -1)
        for layer in self.layers:
            x = checkpoint(layer, x, mask, positions, use_reentrant=self.reentrant)
        return self.last(x).float().pow(2).mean()


def llama(reentrant: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=WIDTH,
            intermediate_size=15,
            num_hidden_layers=LAYERS,
            num_attention_heads=2,
            attention_dropout=0.1,
            tie_word_embeddings=True,
        )
    )
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()  # which the reentrant kind wants
    return model


def loss_of_layers(engine: Any, rank: int, step: int) -> Tensor:
    random = torch.Generator().manual_seed(10 * step + rank)
    result: Tensor = engine(torch.randn(4, WIDTH, generator=random))
    return result


def loss_of_llama(engine: Any, rank: int, step: int) -> Tensor:
    random = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(0, 32, (2, 6), generator=random)
    result: Tensor = engine(input_ids=tokens, labels=tokens).loss
    return result


Loss = Callable[[Any, int, int], Tensor]


def _train(rank: int, model: nn.Module, loss_of: Loss, on_host: bool, **changes: Any) -> dict[str, Tensor]:
    """Return losses and weights, and how many inputs went to host memory."""
    with fresh_process():
        section = {"activation_checkpointing": {"cpu_checkpointing": on_host}}
        engine, *_ = dslaunch.initialize(model=model, config=make_config(**section, **changes))
        torch.manual_seed(rank)
        losses = []
        for step in range(STEPS):
            loss = loss_of(engine, rank, step)
            losses.append(loss.detach())
            engine.backward(loss)
            engine.step()
        with dslaunch.zero.GatheredParameters(list(model.parameters())):
            found = {name: param.detach().clone() for name, param in model.named_parameters()}
        found["losses"] = torch.stack(losses)
        num_sent = checkpointing._PROCESS.inputs.num_sent
        assert bool(num_sent) == on_host, num_sent
        engine.destroy()
        return found


def _compare(rank: int, make: Callable[[bool], nn.Module], loss_of: Loss, changes: dict[str, Any]) -> None:
    for reentrant, stage in CASES if not changes else CASES[2:]:
        found = []
        for on_host in (False, True):
            torch.manual_seed(1)
            how = {"stage": stage, "reduce_bucket_size": 50, **changes}
            found.append(_train(rank, make(reentrant), loss_of, on_host, **how))
        assert_same_bits(*found)


@pytest.mark.parametrize(
    ("make", "loss_of", "changes"),
    [
        (Layers, loss_of_layers, {}),
        (Layers, loss_of_layers, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
        (llama, loss_of_llama, {"bf16": {"enabled": True}}),
    ],
    ids=["views", "autocast", "llama"],
)
def test_inputs_of_both_kinds_wait_in_host_memory(
    ranks: Ranks, make: Callable[[bool], nn.Module], loss_of: Loss, changes: dict[str, Any]
) -> None:
    if make is llama:
        pytest.importorskip("transformers")
    ranks(_compare, make, loss_of, changes, world_size=2)


def test_an_input_that_is_changed_in_place_is_told_in_the_backward() -> None:
    inputs = HostInputs()
    x = torch.ones(3, requires_grad=True)
    hidden = x * 2
    with inputs.hooks(is_of_torchs_checkpoint):
        y = checkpoint(torch.sin, hidden, use_reentrant=False)
    hidden.add_(1)
    with pytest.raises(RuntimeError, match="was changed in place after the function had got it"):
        y.sum().backward()


def test_a_tensor_that_all_checkpoints_get_waits_in_host_memory_once() -> None:
    inputs = HostInputs()
    shared = torch.rand(3, requires_grad=True) * 2
    x = torch.ones(3, requires_grad=True)
    with inputs.hooks(is_of_torchs_checkpoint):
        for _ in range(LAYERS):
            x = checkpoint(torch.mul, x, shared, use_reentrant=False)
    assert (inputs.num_taken, inputs.num_sent) == (2 * LAYERS, LAYERS)  # the newest stays where it is
    x.sum().backward()
