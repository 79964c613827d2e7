"""Layers that are divided over ranks, on the fake device: its NCCL is late, and freed memory is NaN."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch import ConfigError
from dslaunch.runtime.tensor.inputs import digest_on_device
from dslaunch.utils import safe_get_full_fp32_param
from tests.runtime.ranks import Ranks
from tests.runtime.tensor.models import (
    LossOf,
    Numbers,
    check,
    cut_sequence,
    loss_of_numbers,
    loss_of_tokens,
    make_config,
    make_hugging_face,
    make_net,
    number_batches,
    numbers,
    token_batches,
    torch_plan,
    train_plain,
)
from tests.runtime.tensor.test_divide import RULES, VOCABULARY


class Case(NamedTuple):
    """One way to divide and train."""

    kind: str  # of Hugging Face's models, or "rules" and "torch with sequences" for one of ours
    stage: int
    changes: dict[str, Any] = {}  # noqa: RUF012  # never written
    is_tied: bool = False
    is_made_in_shards: bool = False

    def make(self) -> tuple[Any, LossOf, list[Tensor]]:
        """Return model, loss and batches, in host memory."""
        with torch.device("cpu"):
            if self.kind[0].isupper():
                return make_hugging_face(self.kind, is_tied=self.is_tied), loss_of_tokens, token_batches()
            return make_net(), loss_of_numbers, number_batches()


def _divided_by_torch(model: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    mesh = init_device_mesh("cuda", (2,))
    parallelize_module(model.cuda(), mesh, torch_plan(is_sequence=True))
    cut_sequence(model, mesh)


def _train(rank: int, case: Case) -> tuple[Numbers, dict[str, Tensor]]:
    model, loss_of, batches = case.make()
    changes = dict(case.changes)
    if case.kind.startswith("torch"):
        _divided_by_torch(model)
    elif "tensor_parallel" not in changes:
        changes |= RULES if case.kind == "rules" else {"tensor_parallel": {"autotp_size": 2}}
    config = make_config(case.stage, **changes)
    if case.is_made_in_shards:
        with dslaunch.zero.Init(config_dict_or_path=config):
            model, *_ = case.make()
    engine, *_ = dslaunch.initialize(model=model, config=config)
    assert engine.device == torch.device("cuda", rank)
    found = []
    for batch in batches:
        losses = []
        for micro_batch in batch.chunk(2):
            own = micro_batch.to(engine.device)
            losses.append(loss_of(engine, own))
            engine.backward(losses[-1])
            engine.step()
        mean = torch.stack(losses).mean().detach()
        found.append((mean.item(), float(engine.get_global_grad_norm() or 0.0)))
    values = {name: safe_get_full_fp32_param(param) for name, param in model.named_parameters()}
    engine.destroy()
    return found, {name: value.cpu() for name, value in values.items() if value is not None}


# What the table of ways to train, training/test_parity.py, has not.
CASES = [
    Case("rules", 3, is_made_in_shards=True),
    Case("torch with sequences", 3),
    Case("Llama", 3, VOCABULARY, is_tied=True),
    Case("Mixtral", 1),
]


def _train_cases(rank: int) -> list[tuple[Numbers, dict[str, Tensor]]]:
    return [_train(rank, case) for case in CASES]


@pytest.mark.slow
def test_divided_layers_train_on_gpus_as_one_process_trains_the_whole(cuda_ranks: Ranks) -> None:
    for case, results in zip(CASES, zip(*cuda_ranks(_train_cases, world_size=2), strict=True), strict=True):
        plain, loss_of, batches = case.make()
        expected = train_plain(plain, loss_of, batches)
        for found, values in results:
            check(found, expected)
            for name, param in plain.named_parameters():
                assert torch.allclose(values[name], param.detach(), rtol=0, atol=5e-6), (case, name)


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
