"""Marking modules that are gathered as one: by class, by name, by the end of names, one by one."""

from __future__ import annotations

import pytest
from torch import nn

from dslaunch.runtime.config.zero import LeafModuleConfig
from dslaunch.runtime.zero import leaf


@pytest.fixture
def model() -> nn.Module:
    def block() -> nn.Module:
        return nn.ModuleDict({"moe": nn.Sequential(nn.Linear(1, 1)), "norm": nn.LayerNorm(1)})

    return nn.ModuleDict({"first": block(), "second": block()})


def test_modules_are_marked_by_class_and_the_mark_is_taken_away(model: nn.Module) -> None:
    found = leaf.set_z3_leaf_modules(model, [nn.LayerNorm, "Sequential"])
    assert found == leaf.get_z3_leaf_modules(model)
    assert len(found) == 4
    config = LeafModuleConfig()
    assert leaf.is_leaf("any", model.get_submodule("first.moe"), config)
    assert len(leaf.unset_z3_leaf_modules(model, ["torch.nn.modules.normalization.LayerNorm"])) == 2
    assert not leaf.is_leaf("any", model.get_submodule("first.norm"), config)
    assert len(leaf.get_z3_leaf_modules(model)) == 2
    for function in (leaf.set_z3_leaf_modules, leaf.unset_z3_leaf_modules):
        with pytest.raises(ValueError, match="has no module of Conv2d"):
            function(model, ["Conv2d"])
        assert function(model, ["Conv2d"], raise_if_not_found=False) == []


def test_modules_are_marked_by_name_and_by_the_end_of_names(model: nn.Module) -> None:
    first, second = model.get_submodule("first.moe"), model.get_submodule("second.moe")
    assert leaf.set_z3_leaf_modules_by_name(model, ["second.moe", "first.moe"]) == ([second, first], [])
    assert leaf.get_z3_leaf_modules(model) == [first, second]
    assert leaf.set_z3_leaf_modules_by_name(model, ["first.moe"], flag=False) == ([first], [])
    assert leaf.get_z3_leaf_modules(model) == [second]
    assert leaf.set_z3_leaf_modules_by_suffix(model, [".moe", "d.moe"]) == ([first, second], [])
    assert leaf.set_z3_leaf_modules_by_suffix(model, ["e"], False) == ([first, second], [])
    assert leaf.get_z3_leaf_modules(model) == []
    with pytest.raises(ValueError, match="no module with the name third, fourth; see"):
        leaf.set_z3_leaf_modules_by_name(model, ["third", "first", "fourth"])
    with pytest.raises(ValueError, match="no module with the suffix third"):
        leaf.set_z3_leaf_modules_by_suffix(model, ["third"])
    assert leaf.get_z3_leaf_modules(model) == []
    found = leaf.set_z3_leaf_modules_by_name(model, ["third", "first"], raise_if_not_found=False)
    assert found == ([model.get_submodule("first")], ["third"])
    assert leaf.set_z3_leaf_modules_by_suffix(model, ["third"], raise_if_not_found=False) == ([], ["third"])


def test_one_module_is_marked(model: nn.Module) -> None:
    leaf.set_z3_leaf_module(model, True)
    assert leaf.z3_leaf_module(model)
    leaf.set_z3_leaf_module(model, flag=False)
    assert not leaf.z3_leaf_module(model)
