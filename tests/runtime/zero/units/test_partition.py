"""How a model is cut into units."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from dslaunch import ConfigError
from dslaunch.runtime.placement.stage_policy import UnitSizes
from dslaunch.runtime.zero.parameters.freed_parameter import Placeholder
from dslaunch.runtime.zero.units.partition import cut_into_units
from tests.runtime.models import Uneven

BLOCK = 15 * 17 + 17 + 17 * 15 + 15


def _cut(module: nn.Module, max_numel: int = 1) -> dict[str, list[str]]:
    return {
        plan.name: [name for name, _ in plan.params]
        for plan in cut_into_units(module, sizes=UnitSizes(max_numel=max_numel))
    }


def test_children_of_lists_are_units_and_the_rest_is_the_root() -> None:
    assert _cut(Uneven()) == {
        "first": ["first.weight", "first.bias"],
        "blocks.0.0": ["blocks.0.0.weight", "blocks.0.0.bias"],
        "blocks.0.2": ["blocks.0.2.weight", "blocks.0.2.bias"],
        "blocks.1.0": ["blocks.1.0.weight", "blocks.1.0.bias"],
        "blocks.1.2": ["blocks.1.2.weight", "blocks.1.2.bias"],
        "blocks.2.0": ["blocks.2.0.weight", "blocks.2.0.bias"],
        "blocks.2.2": ["blocks.2.2.weight", "blocks.2.2.bias"],
        "norm": ["norm.weight", "norm.bias"],
        "last": ["last.weight", "last.bias"],
        "root": [],
    }


@pytest.mark.parametrize(
    ("max_numel", "names"),
    [
        (
            BLOCK,
            [
                "first to blocks.0.0",
                "blocks.0.2 to blocks.1.0",
                "blocks.1.2 to blocks.2.0",
                "blocks.2.2 to last",
                "root",
            ],
        ),
        (2 * BLOCK, ["first to blocks.1.0", "blocks.1.2 to last", "root"]),
        (10**9, ["first to last", "root"]),
    ],
)
def test_neighbours_are_merged_up_to_the_bucket(max_numel: int, names: list[str]) -> None:
    assert list(_cut(Uneven(), max_numel)) == names


def test_a_list_inside_a_block_does_not_cut_the_block() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    model = nn.ModuleDict({"body": nn.ModuleList([Block(), Block()])})
    assert list(_cut(model)) == ["body.0", "body.1", "root"]


def test_a_parameter_of_two_units_belongs_to_the_root() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    assert _cut(model) == {"0": ["0.bias"], "1": ["1.bias"], "root": ["0.weight"]}


def test_a_leaf_is_not_looked_into() -> None:
    experts = nn.ModuleDict(
        {"router": nn.Linear(2, 2), "experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(2))}
    )
    model = nn.ModuleDict({"moe": experts, "head": nn.Linear(2, 2)})
    assert list(_cut(model)) == ["moe.router", "moe.experts.0", "moe.experts.1", "head", "root"]
    plans = cut_into_units(
        model, sizes=UnitSizes(max_numel=1), is_leaf=lambda name, module: module is experts
    )
    assert [plan.name for plan in plans] == ["moe", "head", "root"]
    (root,) = cut_into_units(
        model, sizes=UnitSizes(max_numel=1), is_leaf=lambda name, module: module is model
    )
    assert [name for name, _ in root.params] == [name for name, _ in model.named_parameters()]


def test_a_model_without_parameters_has_an_empty_root() -> None:
    assert _cut(nn.Sequential(nn.Tanh(), nn.ModuleList())) == {"root": []}


def test_parameters_that_share_storage_but_are_two_objects_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    with pytest.raises(
        ConfigError, match=r"'0.weight' and '1.weight' share their storage but are two objects"
    ):
        cut_into_units(model, sizes=UnitSizes(max_numel=1))


def _holding(values: torch.Tensor) -> nn.Module:
    return nn.ParameterList([nn.Parameter(values, requires_grad=False)])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
        (nn.LazyLinear(2), "parameter 'weight' has no shape yet"),
        (nn.LazyBatchNorm1d(affine=False), "buffer 'running_mean' has no shape yet"),
        (_holding(torch.eye(2).to_sparse()), r"'0' is a sparse tensor \(torch.sparse_coo\), whose elements"),
        (_holding(torch.eye(2).to_mkldnn()), "'0' is a tensor of mkldnn"),
        (_holding(TwoTensor(torch.eye(2), torch.eye(2))), "'0' is a tensor of class TwoTensor"),
    ],
)
def test_parameters_without_storage_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cut_into_units(model, sizes=UnitSizes(max_numel=1))


def test_a_trained_parameter_of_another_dtype_is_refused_by_name() -> None:
    from dslaunch.runtime.zero.model.sharded_model import _check_trained_dtypes
    from dslaunch.runtime.zero.parameters.sub_buffer_plan import Member

    member = Member(name="w", param=nn.Parameter(torch.zeros(1, dtype=torch.float16)), group=0)
    with pytest.raises(
        ConfigError, match=r"parameter 'w' is torch\.float16; trained parameters are float32 or bfloat16"
    ):
        _check_trained_dtypes([[member]], None)
    _check_trained_dtypes([[member]], torch.bfloat16)


class _OfALibrary(nn.Parameter):
    pass


class _Keeper:
    pass


@pytest.mark.parametrize("kind", [nn.Parameter, _OfALibrary])
def test_placeholders_of_any_class_are_taken_from_their_keeper_and_refused_without_it(
    kind: type[nn.Parameter],
) -> None:
    model, keeper = nn.Linear(4, 4, bias=False), _Keeper()
    model.weight = kind(torch.ones(4, 4))
    placeholder = Placeholder(
        "weight",
        model.weight,
        keeper,  # type: ignore[arg-type]
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    placeholder.put(model.weight)
    assert cut_into_units(model, sizes=UnitSizes(max_numel=100))[-1].params[0][1] is model.weight
    del keeper
    with pytest.raises(ConfigError, match="'weight' was sharded by an engine that is gone"):
        cut_into_units(model, sizes=UnitSizes(max_numel=100))
