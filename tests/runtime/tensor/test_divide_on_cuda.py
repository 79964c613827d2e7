"""Layers that are divided over ranks, on the fake device: its NCCL is late, and freed memory is NaN."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch import ConfigError
from dslaunch.runtime.tensor.inputs import digest_on_device
from dslaunch.utils import safe_get_full_fp32_param
from tests.runtime.ranks import Ranks
from tests.runtime.tensor.models import (
    Numbers,
    check,
    loss_of_numbers,
    make_config,
    make_net,
    number_batches,
    numbers,
    train_plain,
)
from tests.runtime.tensor.test_divide import RULES


def _train(rank: int, stage: int) -> tuple[Numbers, dict[str, Tensor]]:
    with torch.device("cpu"):
        model, batches = make_net(), number_batches()
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage, **RULES))
    assert engine.device.type == "cuda"
    found = []
    for batch in batches:
        losses = []
        for micro_batch in batch.chunk(2):
            own = micro_batch.chunk(2)[rank // 2].to(engine.device)
            losses.append(loss_of_numbers(engine, own))
            engine.backward(losses[-1])
            engine.step()
        mean = torch.stack(losses).mean().detach()
        found.append((mean.item(), float(engine.get_global_grad_norm() or 0.0)))
    values = {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
    engine.destroy()
    return found, {name: value.cpu() for name, value in values.items() if value is not None}


@pytest.mark.parametrize("stage", [1, 3])
def test_divided_layers_train_on_gpus_as_one_process_trains_the_whole(cuda_ranks: Ranks, stage: int) -> None:
    plain = make_net()
    expected = train_plain(plain, loss_of_numbers, number_batches())
    results = cuda_ranks(_train, stage, world_size=4)
    means = [
        (first + second) / 2 for (first, _), (second, _) in zip(results[0][0], results[2][0], strict=True)
    ]
    for found, values in results:
        norms = [norm for _, norm in found]
        check(list(zip(means, norms, strict=True)), expected)
        for name, param in plain.named_parameters():
            assert torch.allclose(values[name], param.detach(), rtol=0, atol=5e-6), name


def _differ(rank: int, what: str) -> str:
    """Inputs of shapes or values that differ in the third forward. Both shapes are new: a rank with those of
    before would go on, see [Note: who waits for the others' shapes].
    """
    with torch.device("cpu"):
        model, batch = make_net(), numbers()
    engine, *_ = dslaunch.initialize(model=model, config=make_config(1, **RULES))
    own = batch.to(engine.device)
    for _ in range(2):
        engine.backward(loss_of_numbers(engine, own))
        engine.step()
    other = own[:, 1 + rank :] if what == "shape" else own + rank * torch.eye(6, 7, device=engine.device)
    with pytest.raises(ConfigError) as caught:  # noqa: PT012
        engine.backward(loss_of_numbers(engine, other))
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [("shape", "of different shapes in forward 3: rank "), ("values", "different values in")],
)
def test_inputs_of_ranks_that_compute_together_are_the_same(cuda_ranks: Ranks, what: str, text: str) -> None:
    for error in cuda_ranks(_differ, what, world_size=2):
        assert text in error


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_tensors_of_other_values_have_other_digests(dtype: torch.dtype) -> None:
    one = torch.arange(12).remainder(5).view(3, 4).to(dtype)
    other = one.clone()
    other[0], other[1] = one[1], one[0]
    swapped, kept = digest_on_device(other), digest_on_device(one)
    assert int(kept) == int(digest_on_device(one.t().contiguous().t()))
    assert int(kept) != int(swapped)
