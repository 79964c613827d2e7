"""Parameters that only some ranks of the job share: trained as one process trains the whole.

SGD with a clip below the norm: AdamW would hide gradients of a wrong scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dslaunch
from dslaunch.runtime.checkpoint.opened import open_checkpoint
from dslaunch.runtime.checkpoint.storage.url_store import open_store
from dslaunch.runtime.config import Config, load_config
from dslaunch.runtime.engine import components, make_engine
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.mesh.domain import Domains
from dslaunch.shared.axes import Axes
from dslaunch.utils import safe_get_full_fp32_param
from tests.exhaustive import few
from tests.runtime.mesh.test_groups import reduced
from tests.runtime.models import Uneven, batch, loss_of, make_config, make_model
from tests.runtime.ranks import Ranks

STEPS = 4
CLIP = 0.05  # below every norm here
SGD = {"type": "SGD", "params": {"lr": 0.5, "momentum": 0.9}}
Trained = tuple[list[float], list[float], dict[str, Tensor]]  # losses, norms, parameters


def _config(stage: int, **changes: Any) -> dict[str, Any]:
    """Units of one block and less, so that the order of collectives matters."""
    settings = {
        "train_batch_size": 16,
        "optimizer": SGD,
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
    }
    return make_config(
        stage=stage, reduce_bucket_size=50, gradient_accumulation_steps=2, **settings, **changes
    )


def _batch(step: int) -> Tensor:
    return batch(step, size=16)


def _train(engine: dslaunch.Engine, parts: Sequence[Tensor]) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    dtype = next(engine.module.parameters()).dtype
    for part in parts:
        for micro_batch in part.chunk(2):
            loss = loss_of(engine, micro_batch.to(engine.device, dtype))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(engine.get_global_grad_norm() or 0.0)
    return losses, norms


def _whole(module: nn.Module) -> dict[str, Tensor]:
    return {name: safe_get_full_fp32_param(param).cpu() for name, param in module.named_parameters()}


@contextmanager
def arranged(axes: Axes) -> Iterator[None]:
    """Have initialize() arrange the ranks so, whatever the ds_config says."""

    def load(source: Any, *, world_size: int, **more: Any) -> Config:
        return load_config(source, world_size=axes.dp, **more)

    with (
        patch.object(make_engine, "axes_of_job", lambda world_size, **sizes: axes),
        patch.object(make_engine, "load_config", load),
    ):
        yield


# ---- data ranks that are not all ranks


def _on_axes(rank: int, axes: Axes, stage: int, changes: dict[str, Any], folder: str) -> Trained:
    """Train rank's part of the samples; ranks that hold other values at first get rank 0's."""
    num_groups = len(dist.distributed_c10d._world.pg_map)
    with arranged(axes):
        model = make_model(seed=rank)
        engine, *_ = dslaunch.initialize(model=model, config=_config(stage, **changes))
    place = axes.coordinates(rank)["dp"]
    assert (engine.dp_world_size, engine.train_micro_batch_size_per_gpu()) == (axes.dp, 4)
    loader = engine.deepspeed_io(torch.arange(8), route="eval")
    assert torch.cat(list(loader)).tolist() == list(range(place, 8, axes.dp))
    losses, norms = _train(engine, [_batch(step).chunk(axes.dp)[place] for step in range(STEPS)])
    engine.save_checkpoint(folder, tag="here")
    trained = _whole(model)
    engine.destroy()
    assert len(dist.distributed_c10d._world.pg_map) == num_groups
    return losses, norms, trained


CASES = [
    (0, {}),
    (1, {"bf16": {"enabled": True}}),
    (2, {}),
    (3, {}),
    (3, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
]


@pytest.mark.parametrize(("stage", "changes"), few(CASES, lambda stage, changes: bool(changes)))
def test_two_data_ranks_among_four_train_as_a_job_of_two_to_the_bit(
    ranks: Ranks, tmp_path: Path, stage: int, changes: dict[str, Any]
) -> None:
    alone = ranks(_on_axes, Axes(dp=2), stage, changes, str(tmp_path / "two"), world_size=2)
    among = ranks(_on_axes, Axes(dp=2, tp=2), stage, changes, str(tmp_path / "four"), world_size=4)
    for rank, (losses, norms, trained) in enumerate(among):
        expected_losses, expected_norms, expected = alone[rank // 2]
        assert (losses, norms) == (expected_losses, expected_norms)
        assert all(torch.equal(trained[name], value) for name, value in expected.items())
    assert _tensors(tmp_path / "four") == _tensors(tmp_path / "two")


def _tensors(folder: Path) -> dict[str, list[Any]]:
    reader = open_checkpoint(open_store(folder), "here")
    return {name: reader.tensor(name).flatten().tolist() for name in reader.tensors()}


# ---- ranks with other models


class Wide(nn.Module):
    """Another model than Uneven, with another number of units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(7, 33), nn.Linear(33, 3)
        self.blocks = nn.ModuleList(nn.Linear(33, 33) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        result: Tensor = self.last(x)
        return result


KINDS: tuple[type[nn.Module], ...] = (Uneven, Wide)


def _of_two_models(rank: int, stage: int) -> Trained:
    axes = Axes(pp=2, dp=2)
    place = axes.coordinates(rank)
    with arranged(axes):
        model = make_model(KINDS[place["pp"]])
        engine, *_ = dslaunch.initialize(model=model, config=_config(stage))
    losses, norms = _train(engine, [_batch(step).chunk(2)[place["dp"]] for step in range(STEPS)])
    trained = _whole(model)
    engine.destroy()
    return losses, norms, trained


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_with_other_models_are_clipped_by_the_norm_of_all(ranks: Ranks, stage: int) -> None:
    models = [make_model(kind) for kind in KINDS]
    params = [param for model in models for param in model.parameters()]
    norms = _trained_plain(params, lambda step: sum(loss_of(model, _batch(step)) for model in models))
    for rank, (_, own_norms, trained) in enumerate(ranks(_of_two_models, stage, world_size=4)):
        assert own_norms == pytest.approx(norms, rel=1e-6)
        _check_close(trained, dict(models[rank // 2].named_parameters()))


def _trained_plain(params: Sequence[nn.Parameter], loss: Callable[[int], Any]) -> list[float]:
    optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.9)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(step).backward()
        norms.append(float(nn.utils.clip_grad_norm_(params, CLIP)))
        optimizer.step()
    return norms


def _check_close(trained: dict[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert trained.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(trained[name], value.detach(), rtol=2e-6, atol=2e-6, msg=name)


def _of_a_different_model(rank: int) -> str:
    """Rank 3 has another model than rank 2, whose data rank it is."""
    with arranged(Axes(pp=2, dp=2)):
        model = make_model(KINDS[rank in (2,)])
        with pytest.raises(ConfigError) as caught:
            dslaunch.initialize(model=model, config=_config(3))
    return str(caught.value)


def test_a_model_that_is_not_its_leaders_is_named_on_every_rank(ranks: Ranks) -> None:
    for said in ranks(_of_a_different_model, world_size=4):
        assert said.startswith("rank 3 and rank 2 were given different models or optimizer groups")


# ---- parameters that fewer ranks share than the rest


class Experts(nn.Module):
    """A dense model with a layer in each block of which a group of ranks has its own."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(7, 15), nn.Linear(15, 1)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"dense": nn.Linear(15, 15), "expert": nn.Linear(15, 15)}) for _ in range(3)
        )
        torch.manual_seed(100 + number)
        for block in self.blocks:
            for param in block["expert"].parameters():
                nn.init.normal_(param, std=0.3)
            block["expert"].register_buffer("shift", torch.full((15,), 0.1 * number))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(
                block["expert"](torch.tanh(block["dense"](x))) + block["expert"].shift.to(x.dtype)
            )
        result: Tensor = self.last(x)
        return result


def _with_experts(model: Experts, num_experts: int, axes: Axes, *args: Any, **options: Any) -> Domains:
    domains = Domains(axes, **options)
    num_sharers = axes.dp // num_experts
    domains.add(
        "experts",
        sharers=[range(number, axes.dp, num_experts) for number in range(num_experts)],
        shard_size=min(options["shard_size"], num_sharers),
        states_by_chunk=options["states_by_chunk"],
        divisor=axes.dp,
        params=[
            tensor
            for block in model.blocks
            for tensor in (*block["expert"].parameters(), *block["expert"].buffers())
        ],
    )
    return domains


def _on_experts(rank: int, num_experts: int, stage: int, changes: dict[str, Any]) -> Trained:
    model = Experts(rank % num_experts)
    if rank >= num_experts:  # to get the values of the first with the same experts
        for block in model.blocks:
            block["expert"].shift.fill_(9.0)
    config = _config(stage)
    config["zero_optimization"] |= changes
    with patch.object(components, "Domains", partial(_with_experts, model, num_experts)):
        engine, *_ = dslaunch.initialize(model=model, config=config)
    losses, norms = _train(engine, [_batch(step).chunk(4)[rank] for step in range(STEPS)])
    trained = _whole(model)
    engine.destroy()
    return losses, norms, trained


HOST = {"offload_optimizer": {"device": "cpu"}}
EXPERT_CASES: list[tuple[int, int, dict[str, Any]]] = [
    *((num_experts, stage, {}) for num_experts in (2, 4) for stage in (0, 1, 2, 3)),
    *((num_experts, stage, {"mics_shard_size": 2}) for num_experts in (2, 4) for stage in (1, 2, 3)),
    *((num_experts, 3, {"zero_hpz_partition_size": 2}) for num_experts in (2, 4)),
    *((num_experts, stage, HOST) for num_experts in (2, 4) for stage in (1, 2, 3)),
    *((num_experts, 3, HOST | {"offload_param": {"device": "cpu"}}) for num_experts in (2, 4)),
    *((num_experts, 3, {"stage3_param_persistence_threshold": 20}) for num_experts in (2, 4)),
]


def _is_kept(num_experts: int, stage: int, changes: dict[str, Any]) -> bool:
    """Whole and in shards, and every change."""
    if not changes:
        return (num_experts, stage) in ((2, 0), (2, 2), (4, 3))
    return (num_experts, stage) == ((4, 2) if changes == HOST else (2, 3))


@pytest.mark.parametrize(("num_experts", "stage", "changes"), few(EXPERT_CASES, _is_kept))
def test_experts_that_some_ranks_share_are_trained_as_in_one_process(
    ranks: Ranks, num_experts: int, stage: int, changes: dict[str, Any]
) -> None:
    _check_experts(ranks, num_experts, stage, changes)


@pytest.mark.parametrize(("num_experts", "stage"), [(2, 2)])
def test_experts_are_trained_so_where_the_back_end_reduces(
    cuda_ranks: Ranks, num_experts: int, stage: int
) -> None:
    _check_experts(cuda_ranks, num_experts, stage)


def test_a_back_end_that_reduces_divides_once_and_sends_as_much_as_is_counted(cuda_ranks: Ranks) -> None:
    half = 8 * 4 // 2  # bytes of a ring of two ranks, of all and of its half
    for shard_size, sent in (
        (1, {"all_reduce": 2 * 8 * 4 * 3 // 4}),
        (2, {"reduce_scatter": half, "all_reduce": 2 * half // 2}),
        (4, {"reduce_scatter": 8 * 4 * 3 // 4}),
    ):
        results = cuda_ranks(reduced, shard_size, False, "cuda", world_size=4)
        assert results == [([10 / 8] * (8 // shard_size), sent)] * 4


def _check_experts(ranks: Ranks, num_experts: int, stage: int, changes: dict[str, Any] | None = None) -> None:
    models = [Experts(number) for number in range(num_experts)]
    dense = [(name, param) for name, param in models[0].named_parameters() if "expert" not in name]
    for model in models[1:]:
        for name, param in dense:  # the same parameter in all
            owner = model.get_submodule(name.rpartition(".")[0])
            setattr(owner, name.rpartition(".")[2], param)
    params = list({id(param): param for model in models for param in model.parameters()}.values())

    def loss(step: int) -> Any:
        parts = _batch(step).chunk(4)
        return sum(loss_of(models[rank % num_experts], part) for rank, part in enumerate(parts)) / 4

    norms = _trained_plain(params, loss)
    results = ranks(_on_experts, num_experts, stage, changes or {}, world_size=4)
    for rank, (_, own_norms, trained) in enumerate(results):
        assert own_norms == pytest.approx(norms, rel=1e-6)
        _check_close(trained, dict(models[rank % num_experts].named_parameters()))
