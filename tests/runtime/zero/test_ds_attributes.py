"""The attributes by which DeepSpeed's callers know a sharded parameter."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dslaunch
from dslaunch import ConfigError, zero
from tests.runtime.models import Uneven, batch, make_config, make_model
from tests.runtime.ranks import Ranks

AVAILABLE, NOT_AVAILABLE = zero.ZeroParamStatus.AVAILABLE, zero.ZeroParamStatus.NOT_AVAILABLE
NAMES = (
    "ds_id",
    "ds_shape",
    "ds_numel",
    "ds_status",
    "ds_tensor",
    "ds_persist",
    "ds_process_group",
    "ds_zero_partition_rank",
    "ds_zero_partition_world_size",
    "ds_active_sub_modules",
    "ds_summary",
    "partition_numel",
)


def _has_any(params: Iterable[nn.Parameter]) -> bool:
    return any(hasattr(param, name) for param in params for name in (*NAMES, "all_gather", "partition"))


def _describe(params: Iterable[nn.Parameter], status: zero.ZeroParamStatus) -> list[int]:
    """Check all attributes, and return the ids."""
    for param in params:
        assert param.ds_shape == param.shape
        assert param.ds_numel == param.numel()
        assert param.ds_status is status
        assert param.ds_persist is False
        assert dist.get_world_size(param.ds_process_group) == 2
        assert param.ds_tensor.dim() == 1
        assert param.partition_numel() == param.ds_tensor.numel()
        assert (param.ds_zero_partition_rank, param.ds_zero_partition_world_size) == (dist.get_rank(), 2)
        assert param.ds_active_sub_modules == set()
        summary = param.ds_summary()
        assert (summary["id"], summary["status"], summary["ds_shape"]) == (
            param.ds_id,
            status.name,
            (*param.shape,),
        )
    return [param.ds_id for param in params]


def _follow(rank: int, is_early: bool) -> tuple[list[int], list[Tensor]]:
    """A parameter from its making to destroy(); returns ids, and this rank's parts of all."""
    torch.manual_seed(0)
    with zero.Init(enabled=is_early):
        model = Uneven()
    params = list(model.parameters())
    early_ids = []
    if is_early:
        early_ids = _describe(params, NOT_AVAILABLE)
        with zero.GatheredParameters(params):
            _describe(params, AVAILABLE)
            parts = torch.cat([param.ds_tensor for param in params])
            assert parts.numel() <= sum(param.numel() for param in params) / 2 + len(params)
    else:
        assert not _has_any(params)
    engine = dslaunch.initialize(model=model, config=make_config(stage=3))[0]
    ids = _describe(params, NOT_AVAILABLE)
    assert early_ids in ([], ids)
    seen = []
    model.get_submodule("blocks.1.2").register_forward_hook(
        lambda module, args, out: seen.extend(param.ds_status for param in module.parameters())
    )
    engine.backward(engine(batch(0)).sum())
    engine.step()
    assert set(seen) == {AVAILABLE}
    _describe(params, NOT_AVAILABLE)
    parts = [param.ds_tensor.clone() for param in params]
    engine.destroy()
    assert not _has_any(params)
    return ids, parts + [param.detach() for param in params]


@pytest.mark.parametrize("is_early", [False, True])
def test_a_sharded_parameter_has_them_from_the_first_to_the_last(ranks: Ranks, is_early: bool) -> None:
    (ids, first), (other_ids, second) = ranks(_follow, is_early, world_size=2)
    # These processes may have sharded different things before.
    assert [one - ids[0] for one in ids] == [one - other_ids[0] for one in other_ids]
    assert len(set(ids)) == len(ids)
    count = len(ids)
    for place in range(count):  # rank 0's part and rank 1's are the parameter
        whole = torch.cat([first[place], second[place]])
        assert torch.equal(whole, first[count + place].reshape(-1))


def _gather_by_method(rank: int, is_early: bool) -> tuple[Tensor, str]:
    torch.manual_seed(0)
    with zero.Init(enabled=is_early):
        model = Uneven()
    engine = None if is_early else dslaunch.initialize(model=model, config=make_config(stage=3))[0]
    param, other = model.last.weight, model.last.bias
    param.partition()  # nothing to end
    param.all_gather()
    param.all_gather()
    param.data.fill_(rank + 3.0)
    param.partition(has_been_updated=True)
    assert param.ds_status is NOT_AVAILABLE
    param.all_gather([param, other])
    value = param.detach().clone()
    assert other.ds_status is AVAILABLE
    param.partition([param, other])
    assert other.ds_status is NOT_AVAILABLE
    param.all_gather()
    with pytest.raises(ConfigError, match=r"^partition\(free_data=False\)"):
        param.partition(free_data=False)
    assert param.ds_status is AVAILABLE
    with torch.no_grad():
        param.fill_(9.0)
    with pytest.raises(ConfigError) as caught:
        param.partition()
    assert param.ds_status is NOT_AVAILABLE
    del engine
    return value, str(caught.value)


@pytest.mark.parametrize("is_early", [False, True])
def test_all_gather_and_partition_are_gathered_parameters_in_two_steps(ranks: Ranks, is_early: bool) -> None:
    for value, message in ranks(_gather_by_method, is_early, world_size=2):
        assert torch.equal(value, torch.full((1, 15), 3.0))
        assert "was written inside GatheredParameters without modifier_rank" in message


def _other_stages(rank: int) -> list[bool]:
    found = []
    for stage in (0, 1, 2, 3):
        model = make_model(Uneven)
        engine = dslaunch.initialize(model=model, config=make_config(stage=stage))[0]
        found.append(_has_any(engine.module.parameters()))
    return found


def test_only_stage_3_has_them_and_on_one_rank_too(ranks: Ranks) -> None:
    assert ranks(_other_stages, world_size=2) == [[False, False, False, True]] * 2
    assert ranks(_other_stages, world_size=1) == [[False, False, False, True]]


def _copies(rank: int) -> list[str]:
    """A copy and a pickle are plain parameters, with the user's own attributes where torch keeps those."""
    model = make_model(Uneven)
    engine = dslaunch.initialize(model=model, config=make_config(stage=3))[0]
    param = engine.module.last.weight
    param.mark = "mine"
    with zero.GatheredParameters([param]):
        file = io.BytesIO()
        torch.save(param, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for copied in (copy.deepcopy(param), loaded):
            assert type(copied) is nn.Parameter
            assert torch.equal(copied, param)
            assert not _has_any([copied])
    return [loaded.mark]


def test_copies_of_a_parameter_do_not_have_them(ranks: Ranks) -> None:
    assert ranks(_copies, world_size=2) == [["mine"], ["mine"]]
