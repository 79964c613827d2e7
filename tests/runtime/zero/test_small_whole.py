"""Stage 3 leaves units of small parameters whole on every rank, as
stage3_param_persistence_threshold says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslaunch
from dslaunch import zero
from dslaunch.runtime.engine.summary import summarize
from dslaunch.runtime.placement.stage_policy import (
    Placement,
    UnitSizes,
    keep_small_whole,
    policy_for_stage,
)
from dslaunch.runtime.zero.units.partition import cut_into_units
from tests.runtime.models import (
    assert_same_bits,
    make_config,
    make_model,
    snapshot,
    train_engine,
    train_plain,
    worst_difference,
)
from tests.runtime.ranks import Ranks

STEPS = 4
DRIFT = 1e-6  # as in test_stages.py
SHARDED = policy_for_stage(3)
# Of `Uneven`: 105 elements in the weight of `first`, 255 in those of the blocks, 15 in the others.
SMALL = 110
CUT: dict[str, Any] = {"reduce_bucket_size": 50, "stage3_prefetch_bucket_size": 50}


def _rows(sub_buffers: Sequence[Sequence[int]], stage: int = 3, **sizes: int) -> list[bool]:
    """Whether each of these stays whole."""
    policy = policy_for_stage(stage)
    rows = keep_small_whole(policy, sub_buffers, UnitSizes(max_numel=1, **sizes))
    for row in rows:
        assert (row.stage, row.gradients, row.optimizer) == (stage, policy.gradients, policy.optimizer)
        assert row.reshard_after_forward == (row.parameters is Placement.SHARDED)
    return [row.parameters is Placement.REPLICATED for row in rows]


def test_a_sub_buffer_stays_whole_if_all_its_parameters_are_small() -> None:
    assert _rows([[10, 3], [11], [10, 11], []], whole_param_numel=10) == [True, False, False, True]
    assert _rows([[0], [1]], whole_param_numel=0) == [False, False]


def test_the_first_small_ones_stay_whole_as_far_as_there_is_room() -> None:
    assert _rows([[4, 4], [20], [4], [2]], whole_param_numel=10, whole_model_numel=10) == [
        True,
        False,
        False,
        True,
    ]


def _unit_names(whole_param_numel: int) -> list[str]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 9), nn.Linear(9, 2), nn.Linear(2, 2))
    sizes = UnitSizes(max_numel=30, max_whole_numel=1000, whole_param_numel=whole_param_numel)
    return [plan.name for plan in cut_into_units(model, sizes=sizes)]


def test_small_neighbours_are_merged_as_where_nothing_is_sharded() -> None:
    assert _unit_names(0) == ["0 to 1", "2", "3 to 4", "root"]
    assert _unit_names(17) == ["0 to 1", "2", "3 to 4", "root"]
    assert _unit_names(18) == ["0 to 4", "root"]


def _engine(module: nn.Module, **section: Any) -> dslaunch.Engine:
    config = make_config(stage=3, gradient_clipping=0.05, bf16={"enabled": section.pop("bf16", False)})
    del config["zero_optimization"]["stage3_param_persistence_threshold"]
    config["zero_optimization"] |= section
    return dslaunch.initialize(model=module, config=config)[0]


def _whole_units(engine: dslaunch.Engine) -> list[str]:
    return [unit.name for unit in engine._model.units if unit.sub_buffers and not unit.is_sharded]


def _trained(
    rank: int, section: dict[str, Any], is_made_sharded: bool = False
) -> tuple[list[str], dict[str, Tensor], list[float], list[int]]:
    if is_made_sharded:
        with zero.Init():
            model = make_model()
    else:
        model = make_model()
    engine = _engine(model, **section)
    for param in model.parameters():
        assert vars(param)["ds_persist"] == (type(param) is nn.Parameter)
    norms = []
    dtype = torch.bfloat16 if section.get("bf16") else torch.float32
    for step in range(STEPS):
        train_engine(engine, steps=1, first=step, dtype=dtype)
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    placement = summarize(engine, [])["zero"]["parameters"]
    numel = sum(
        sub_buffer.layout.numel
        for unit in engine._model.units
        for sub_buffer in unit.sub_buffers
        if not sub_buffer.is_sharded
    )
    assert placement == (
        "sharded"
        + (f", but {engine._model.num_small:,} elements, in units of small parameters" if numel else "")
    )
    gathers = [unit.num_gathers for unit in engine._model.units if not unit.is_sharded]
    return _whole_units(engine), snapshot(model.named_parameters()), norms, gathers


@pytest.mark.parametrize("is_made_sharded", [False, True])
@pytest.mark.parametrize(
    ("section", "whole"),
    [
        ({"reduce_bucket_size": 5000, "stage3_prefetch_bucket_size": 50}, ["first to last"]),
        ({**CUT, "stage3_param_persistence_threshold": SMALL}, ["first", "norm to last"]),
        (
            {
                **CUT,
                "stage3_param_persistence_threshold": SMALL,
                "stage3_model_persistence_threshold": 125,
            },
            ["first"],
        ),
        ({**CUT, "stage3_param_persistence_threshold": 0}, []),
    ],
)
def test_the_training_is_that_of_plain_torch(
    ranks: Ranks, section: dict[str, Any], whole: list[str], is_made_sharded: bool
) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    norms = train_plain(model, optimizer, steps=STEPS, clipping=0.05)
    expected = snapshot(model.named_parameters())
    for names, params, seen, gathers in ranks(_trained, section, is_made_sharded, world_size=2):
        assert names == whole
        assert worst_difference(params, expected) <= DRIFT
        assert seen == pytest.approx(norms, rel=1e-5)
        assert not any(gathers)


def _written_locally(rank: int) -> tuple[Tensor, Tensor]:
    model = make_model()
    _engine_kept = _engine(model, **CUT)
    own = zero.safe_get_local_fp32_param(model.first.weight)
    assert own is not None
    zero.safe_set_local_fp32_param(model.first.weight, torch.full_like(own, rank + 1.0))
    return model.first.weight.detach().clone(), snapshot({"": model.first.weight})[""]


def test_what_ranks_write_to_their_own_parts_is_what_all_have(ranks: Ranks) -> None:
    found = ranks(_written_locally, world_size=2)
    for value, gathered in found:
        assert set(value.unique().tolist()) == {1.0, 2.0}
        assert torch.equal(value, gathered)
        assert torch.equal(value, found[0][0])


def _written_gathered(rank: int) -> Tensor:
    model = make_model()
    _engine_kept = _engine(model, **CUT)
    with zero.GatheredParameters(list(model.first.parameters()), modifier_rank=1), torch.no_grad():
        if rank == 1:
            model.first.weight.fill_(0.25)
    return model.first.weight.detach().clone()


def test_what_one_rank_writes_to_gathered_parameters_is_what_all_have(ranks: Ranks) -> None:
    for value in ranks(_written_gathered, world_size=2):
        assert bool((value == 0.25).all())


def _saved_and_loaded(
    rank: int, folder: str, saved: int, loaded: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    found = []
    for threshold in (saved, loaded):
        model = make_model(seed=threshold)
        engine = _engine(model, **CUT, bf16=True, stage3_param_persistence_threshold=threshold)
        if found:
            engine.load_checkpoint(folder)
        else:
            train_engine(engine, steps=2, dtype=torch.bfloat16)
            engine.save_checkpoint(folder)
        train_engine(engine, steps=2, first=2, dtype=torch.bfloat16)
        found.append(snapshot(model.named_parameters()))
    return found[0], found[1]


@pytest.mark.parametrize(("saved", "loaded"), [(0, SMALL), (SMALL, 0)])
def test_a_checkpoint_loads_where_other_units_stay_whole(
    ranks: Ranks, tmp_path: Path, saved: int, loaded: int
) -> None:
    for left, right in ranks(_saved_and_loaded, str(tmp_path), saved, loaded, world_size=2):
        assert_same_bits(left, right)
