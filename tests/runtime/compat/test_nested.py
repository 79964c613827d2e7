"""Tensors in containers: copies, moves and bytes."""

from __future__ import annotations

import io
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from dslaunch.runtime.compat.nested import (
    clone_tensors_for_torch_save,
    copy_to_device,
    get_tensor_bytes,
    move_to_device,
)


class Pair(NamedTuple):
    left: Any
    right: Any


def test_clones_are_small_and_containers_keep_their_types() -> None:
    whole = torch.arange(1000.0)
    weight = nn.Parameter(whole[10:20])
    counts: defaultdict[str, Any] = defaultdict(int, a=torch.ones(1))
    item = {
        "tuple": (whole[:4].view(2, 2).t(), 3),
        "pair": Pair(weight, None),
        "list": [torch.ones(1).expand(3), "text"],
        "counts": counts,
        1: OrderedDict(b=torch.ones(2, dtype=torch.int8)),
    }
    made = clone_tensors_for_torch_save(item)
    assert [type(value) for value in made.values()] == [tuple, Pair, list, defaultdict, OrderedDict]
    assert made["tuple"][0].tolist() == [[0.0, 2.0], [1.0, 3.0]]
    assert made["tuple"][1] == 3
    assert made["pair"].left.tolist() == list(range(10, 20))
    assert not made["pair"].left.requires_grad
    assert made["list"][0].tolist() == [1.0] * 3
    assert made["list"][1] == "text"
    assert made["counts"].default_factory is int
    for new, old, numel in (
        (made["tuple"][0], whole, 4),
        (made["pair"].left, whole, 10),
        (made["counts"]["a"], counts["a"], 1),
    ):
        assert new.untyped_storage().nbytes() == 4 * numel
        assert new.data_ptr() != old.data_ptr()
    sizes = []
    for each in (item, made):
        file = io.BytesIO()
        torch.save(each, file)
        sizes.append(file.tell())
    assert sizes[0] - sizes[1] > 3500
    with pytest.raises(KeyError):
        made["new"]
    assert made is not item


def test_a_state_dict_keeps_the_versions_of_its_modules() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3))
    state = model.state_dict()
    made = clone_tensors_for_torch_save(state, "cpu")
    assert made._metadata == state._metadata
    model.load_state_dict(made)
    meta = clone_tensors_for_torch_save(state, device="meta")
    assert {value.device.type for value in meta.values()} == {"meta"}
    assert {value.device.type for value in state.values()} == {"cpu"}


def test_what_is_moved_or_copied_is_chosen() -> None:
    wide, whole = torch.ones(2, 3), torch.ones(4, dtype=torch.int64)
    item = {"a": [wide, whole], "b": (1, Pair(wide, "x"))}
    made = copy_to_device(item, "meta", lambda value: torch.is_tensor(value) and value.is_floating_point())
    assert [one.device.type for one in made["a"]] == ["meta", "cpu"]
    assert made["b"][1].left.device.type == "meta"
    assert (made["b"][0], made["b"][1].right) == (1, "x")
    moved = move_to_device([wide, (whole,)], "meta")
    assert [moved[0].device.type, moved[1][0].device.type, wide.device.type] == ["meta", "meta", "cpu"]
    stays = move_to_device({"a": wide}, "cpu", criterion_func=torch.is_tensor)
    assert stays["a"] is wide
    with pytest.raises(AttributeError):
        move_to_device(["no tensor"], "cpu")


def test_bytes_are_those_of_elements() -> None:
    item = [torch.ones(3), {"a": (torch.ones(100)[:2].to(torch.bfloat16), None)}, "x"]
    assert get_tensor_bytes(item) == 12 + 4
