"""Marking modules that are gathered as one: by class, by name, by the end of names, one by one."""

from __future__ import annotations

import pytest
from torch import nn

from dslaunch.runtime.config.zero import LeafModuleConfig
from dslaunch.runtime.zero.units import leaf_modules


@pytest.fixture
def model() -> nn.Module:
    def block() -> nn.Module:
        return nn.ModuleDict({"moe": nn.Sequential(nn.Linear(1, 1)), "norm": nn.LayerNorm(1)})

    return nn.ModuleDict({"first": block(), "second": block()})


def test_modules_are_marked_by_class_and_the_mark_is_taken_away(model: nn.Module) -> None:
    found = leaf_modules.set_z3_leaf_modules(model, [nn.LayerNorm, "Sequential"])
    assert found == leaf_modules.get_z3_leaf_modules(model)
    assert len(found) == 4
    assert leaf_modules.z3_leaf_module(model.get_submodule("first.moe"))
    assert len(leaf_modules.unset_z3_leaf_modules(model, ["torch.nn.modules.normalization.LayerNorm"])) == 2
    assert not leaf_modules.z3_leaf_module(model.get_submodule("first.norm"))
    assert len(leaf_modules.get_z3_leaf_modules(model)) == 2
    for function in (leaf_modules.set_z3_leaf_modules, leaf_modules.unset_z3_leaf_modules):
        with pytest.raises(ValueError, match="has no module of Conv2d"):
            function(model, ["Conv2d"])
        assert function(model, ["Conv2d"], raise_if_not_found=False) == []


def test_modules_are_marked_by_name_and_by_the_end_of_names(model: nn.Module) -> None:
    first, second = model.get_submodule("first.moe"), model.get_submodule("second.moe")
    assert leaf_modules.set_z3_leaf_modules_by_name(model, ["second.moe", "first.moe"]) == (
        [second, first],
        [],
    )
    assert leaf_modules.get_z3_leaf_modules(model) == [first, second]
    assert leaf_modules.set_z3_leaf_modules_by_name(model, ["first.moe"], flag=False) == ([first], [])
    assert leaf_modules.get_z3_leaf_modules(model) == [second]
    assert leaf_modules.set_z3_leaf_modules_by_suffix(model, [".moe", "d.moe"]) == ([first, second], [])
    assert leaf_modules.set_z3_leaf_modules_by_suffix(model, ["e"], False) == ([first, second], [])
    assert leaf_modules.get_z3_leaf_modules(model) == []
    with pytest.raises(ValueError, match="no module with the name third, fourth; see"):
        leaf_modules.set_z3_leaf_modules_by_name(model, ["third", "first", "fourth"])
    with pytest.raises(ValueError, match="no module with the suffix third"):
        leaf_modules.set_z3_leaf_modules_by_suffix(model, ["third"])
    assert leaf_modules.get_z3_leaf_modules(model) == []
    found = leaf_modules.set_z3_leaf_modules_by_name(model, ["third", "first"], raise_if_not_found=False)
    assert found == ([model.get_submodule("first")], ["third"])
    assert leaf_modules.set_z3_leaf_modules_by_suffix(model, ["third"], raise_if_not_found=False) == (
        [],
        ["third"],
    )


def test_one_module_is_marked(model: nn.Module) -> None:
    leaf_modules.set_z3_leaf_module(model, True)
    assert leaf_modules.z3_leaf_module(model)
    leaf_modules.set_z3_leaf_module(model, flag=False)
    assert not leaf_modules.z3_leaf_module(model)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("mixtral.modeling_mixtral", "MixtralSparseMoeBlock"),
        ("qwen2_moe.modeling_qwen2_moe", "Qwen2MoeSparseMoeBlock"),
        ("qwen3_moe.modeling_qwen3_moe", "Qwen3MoeSparseMoeBlock"),
    ],
)
def test_known_blocks_of_experts_are_marked_unless_the_ds_config_names_classes(
    module: str, name: str
) -> None:
    block = type(name, (nn.Linear,), {"__module__": f"transformers.models.{module}"})
    model = nn.Sequential(block(1, 1), nn.Linear(1, 1))
    leaf_modules.mark_configured(model, LeafModuleConfig.model_validate({"classes": ["Other"]}))
    assert leaf_modules.get_z3_leaf_modules(model) == []
    leaf_modules.mark_configured(model, LeafModuleConfig())
    assert leaf_modules.get_z3_leaf_modules(model) == [model[0]]
