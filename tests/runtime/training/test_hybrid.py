"""Hybrid sharding on a 2-D mesh: groups that each have everything, or that each have all parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dslaunch
from dslaunch import ConfigError
from tests.exhaustive import few
from tests.runtime.models import (
    assert_same_bits,
    loss_of,
    make_config,
    make_model,
    snapshot,
    train_engine,
    train_plain,
    worst_difference,
)
from tests.runtime.ranks import Ranks

DRIFT = 1e-6  # as FP32_DRIFT of test_stages: four ranks add in another order, ten steps. Seen: 2e-7
MICS = {"mics_shard_size": 2}
HPZ = {"zero_hpz_partition_size": 2}
MODES = [(1, MICS), (2, MICS)]  # test_parity.py has those of stage 3


def _engine(stage: int, zero: dict[str, int], **changes: Any) -> dslaunch.Engine:
    config = make_config(stage=stage, **changes)
    config["zero_optimization"] |= zero
    engine, *_ = dslaunch.initialize(model=make_model(), config=config)
    return engine


def _train(
    rank: int, stage: int, zero: dict[str, int], changes: dict[str, Any]
) -> tuple[dict[str, Tensor], float]:
    engine = _engine(stage, zero, **changes)
    train_engine(engine, steps=10)
    norm = engine.get_global_grad_norm()
    assert norm is not None
    return snapshot(engine.module.named_parameters()), norm


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    few(
        [{"gradient_clipping": 0.1}, {"gradient_accumulation_steps": 3}],
        lambda changes: "gradient_clipping" in changes,
    ),
    ids=["clip", "gas"],
)
@pytest.mark.parametrize(("stage", "zero"), MODES)
def test_groups_train_as_one_process_does(
    ranks: Ranks, stage: int, zero: dict[str, int], changes: dict[str, Any]
) -> None:
    expected = make_model()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01, weight_decay=0.1)
    norms = train_plain(expected, optimizer, steps=10, clipping=changes.get("gradient_clipping", 0.0))
    results = ranks(_train, stage, zero, changes, world_size=4)
    for result, norm in results:
        assert worst_difference(result, snapshot(expected.named_parameters())) <= DRIFT
        assert_same_bits(result, results[0][0])
        assert norm == results[0][1]
        assert norm == pytest.approx(norms[-1], rel=1e-4)


def _shares(rank: int, stage: int, zero: dict[str, int], bf16: bool) -> tuple[list[float], dict[str, int]]:
    engine = _engine(stage, zero, bf16={"enabled": bf16})
    sub_buffer = max(engine._model.trained, key=lambda sub_buffer: sub_buffer.layout.numel)
    numel = sub_buffer.layout.numel
    shares = [
        sub_buffer.param_shard.kept.numel() / numel,
        sub_buffer.optimizer_shard.master.numel() / numel,
        sub_buffer.optimizer_shard.states["exp_avg"].numel() / numel,
    ]
    before = engine.comm_bytes()
    train_engine(engine, steps=1, dtype=torch.bfloat16 if bf16 else torch.float32)
    after = engine.comm_bytes()
    return shares, {kind: count - before.get(kind, 0) for kind, count in after.items()}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(
    ("stage", "zero", "shares"),
    [(1, MICS, [1, 1 / 2, 1 / 2]), (3, MICS, [1 / 2, 1 / 2, 1 / 2]), (3, HPZ, [1 / 2, 1 / 4, 1 / 4])],
)
def test_each_rank_holds_its_group_s_share(
    ranks: Ranks, stage: int, zero: dict[str, int], shares: list[float], bf16: bool
) -> None:
    for found, _ in ranks(_shares, stage, zero, bf16, world_size=4):
        assert found == shares


def test_parameters_stay_in_the_group_while_the_model_computes(ranks: Ranks) -> None:
    """Psi elements: each gather brings half of a unit, and after the step the two groups
    exchange a quarter.
    """
    sent = {
        name: ranks(_shares, 3, zero, False, world_size=4)[0][1] for name, zero in (("hpz", HPZ), ("all", {}))
    }
    assert sent["hpz"]["parameters"] * 3 == sent["all"]["parameters"] * 2  # 1/2 against 3/4, as often
    assert sent["all"].get("all_gather", 0) == 0
    assert sent["hpz"]["reduce_scatter"] == sent["all"]["reduce_scatter"]  # 1/2 + 1/4 = 3/4
    assert sent["hpz"]["all_gather"] * 3 == sent["hpz"]["reduce_scatter"]  # 1/4


def _resume(rank: int, folder: str, stage: int, zero: dict[str, int], saves: bool) -> dict[str, Tensor]:
    engine = _engine(stage, zero, bf16={"enabled": True})
    if saves:
        train_engine(engine, steps=3, dtype=torch.bfloat16)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    result = snapshot(engine.module.named_parameters())
    for name, param in engine.module.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            state = dslaunch.zero.safe_get_full_optimizer_state(param, key)
            assert state is not None
            result[f"{name} {key}"] = state
        master = dslaunch.zero.safe_get_full_fp32_param(param)
        assert master is not None
        result[f"{name} master"] = master
    return result


@pytest.mark.exhaustive
@pytest.mark.slow
def test_checkpoints_go_between_all_ways_to_share(ranks: Ranks, tmp_path: Path) -> None:
    written = ranks(_resume, str(tmp_path), 3, HPZ, True, world_size=4)[0]
    for stage, zero, world_size in ((3, MICS, 4), (3, HPZ, 4), (2, MICS, 2), (3, {}, 3), (0, {}, 1)):
        assert_same_bits(written, ranks(_resume, str(tmp_path), stage, zero, False, world_size=world_size)[0])


def _edits(rank: int, zero: dict[str, int]) -> list[dict[str, Tensor]]:
    engine = _engine(3, zero)
    params = dict(engine.module.named_parameters())
    with dslaunch.zero.GatheredParameters(params.values(), modifier_rank=3):
        for param in params.values():
            param.data.fill_(float(rank))
    seen = [snapshot(params)]
    first = params["first.weight"]
    value = torch.arange(first.numel(), dtype=torch.float32).view(first.shape)
    dslaunch.zero.safe_set_full_fp32_param(first, value)
    seen.append(snapshot({"first.weight": first, "expected": value}))
    loss_of(engine, torch.ones(4, 7)).backward()
    grad = dslaunch.zero.safe_get_full_grad(first)
    assert grad is not None
    seen.append({"grad": grad})
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("zero", [MICS, HPZ], ids=["mics", "hpz"])
def test_values_are_read_and_written_whole(ranks: Ranks, zero: dict[str, int]) -> None:
    plain = make_model()
    with torch.no_grad():
        for param in plain.parameters():
            param.fill_(3.0)
        first = dict(plain.named_parameters())["first.weight"]
        first.copy_(torch.arange(first.numel(), dtype=torch.float32).view(first.shape))
    loss_of(plain, torch.ones(4, 7)).backward()
    for spread, set_whole, got in ranks(_edits, zero, world_size=4):
        assert all(bool((value == 3.0).all()) for value in spread.values())
        assert torch.equal(set_whole["first.weight"], set_whole["expected"])
        torch.testing.assert_close(got["grad"], first.grad, rtol=1e-5, atol=1e-5)


def _with_lamb(rank: int, zero: dict[str, int]) -> dict[str, Tensor]:
    engine = _engine(3, zero, optimizer={"type": "LAMB", "params": {"lr": 0.02}})
    train_engine(engine, steps=3)
    return snapshot(engine.module.named_parameters())


@pytest.mark.slow
def test_optimizers_of_whole_parameters_work_on_any_mesh(ranks: Ranks) -> None:
    mics, hpz, plain = (ranks(_with_lamb, zero, world_size=4) for zero in (MICS, HPZ, {}))
    for result in (*mics, *hpz):
        assert worst_difference(result, plain[0]) <= DRIFT


def _refused(rank: int) -> str:
    engine = _engine(3, HPZ)
    param = engine.module.first.weight
    sub_buffer = dslaunch.zero.safe_get_local_fp32_param(param)
    sub_buffer = (
        torch.empty(0) if sub_buffer is None else sub_buffer
    )  # what this rank holds of it may be nothing
    with pytest.raises(ConfigError) as caught:
        dslaunch.zero.safe_set_local_fp32_param(param, sub_buffer)
    return str(caught.value)


def test_a_part_that_several_ranks_keep_is_not_written_by_one(ranks: Ranks) -> None:
    assert ranks(_refused, world_size=4)[0].startswith(
        "parameter 'first.weight' is kept by more than one rank"
    )
