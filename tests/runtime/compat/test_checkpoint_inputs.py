"""Inputs of checkpointed layers that wait in host memory, in models that call torch's checkpoint."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dslaunch
from dslaunch.runtime.compat.checkpoint_inputs import (
    CheckpointHiddenStatesOffload,
    get_checkpoint_hidden_states_offloading_ctx_manager,
)
from dslaunch.runtime.errors import ConfigError
from tests.runtime.models import assert_same_bits, make_config
from tests.runtime.ranks import Ranks

LAYERS = 3


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(LAYERS))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        result: Tensor = self.head(x)
        return result


def _moved(rank: int, stage: int, keep_last_count: int) -> int:
    gradients = []
    for is_on_host in (False, True):
        torch.manual_seed(1)
        model = Checkpointed()
        engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=stage, reduce_bucket_size=50))
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
        context = get_checkpoint_hidden_states_offloading_ctx_manager(
            min_offload_bytes=0, keep_last_count=keep_last_count
        )
        if is_on_host:
            with context:
                loss = engine(x).pow(2).sum()
        else:
            loss = engine(x).pow(2).sum()
        engine.backward(loss)
        engine.step()
        with dslaunch.zero.GatheredParameters(list(model.parameters())):
            gradients.append({name: param.detach().clone() for name, param in model.named_parameters()})
        engine.destroy()
    assert_same_bits(*gradients)
    return context.num_on_host


@pytest.mark.parametrize(("stage", "keep_last_count"), [(0, 1), (0, 0), (3, 0)])
def test_inputs_of_checkpointed_layers_wait_in_host_memory(
    ranks: Ranks, stage: int, keep_last_count: int
) -> None:
    for number in ranks(_moved, stage, keep_last_count, world_size=2):
        assert number == LAYERS - keep_last_count


def test_what_else_autograd_keeps_stays_where_it_is() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    with CheckpointHiddenStatesOffload(min_offload_bytes=0, keep_last_count=0) as context:
        (x @ weight).tanh().sum().backward()
        checkpoint(torch.tanh, x, use_reentrant=False).sum().backward()
    assert context.num_on_host == 1
    with pytest.raises(ConfigError, match="keep_last_count must be >= 0, got -1"):
        CheckpointHiddenStatesOffload(keep_last_count=-1)
