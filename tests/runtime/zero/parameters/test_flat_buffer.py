"""How many tensors lie in a flat buffer's memory: torch's count, and ours for builds of torch without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dslaunch.runtime.zero.parameters.flat_buffer import FlatBuffer, num_users, references_to_storage
from dslaunch.runtime.zero.parameters.layout import plan_layout

NUM_VIEWS = 70_000  # more than 16 bits hold


def _counts(tensor: Tensor) -> tuple[int, int]:
    """torch's count of the users of this tensor's memory, and ours."""
    address = tensor.untyped_storage()._cdata
    return torch._C._storage_Use_Count(address), references_to_storage(address)  # type: ignore[attr-defined]


@pytest.mark.skipif(not hasattr(torch._C, "_storage_Use_Count"), reason="this torch has no count of its own")
def test_the_references_that_are_read_are_those_that_torch_counts() -> None:
    tensor = torch.zeros(NUM_VIEWS)
    seen = [_counts(tensor)]
    storage = tensor.untyped_storage()
    seen.append(_counts(tensor))
    views = list(tensor.split(1))
    seen.append(_counts(tensor))
    del storage, views[1:]
    seen.append(_counts(tensor))
    assert [ours for torchs, ours in seen] == [torchs for torchs, ours in seen]
    assert seen[2][1] >= NUM_VIEWS


def test_users_of_a_memory_are_its_tensors_and_a_constant() -> None:
    tensor = torch.zeros(8)
    alone = num_users(tensor)
    parameter, kept = torch.nn.Parameter(tensor[2:5]), tensor.detach()
    assert num_users(tensor) == alone + 2
    del parameter
    assert num_users(tensor) == alone + 1
    del kept
    assert num_users(tensor) == alone


def _as_array(view: Tensor) -> Any:
    return view.detach().numpy()


def _shared(view: Tensor) -> Any:
    return view.detach().share_memory_()


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("export", [_as_array, _shared])
def test_memory_that_cannot_be_resized_is_left_to_who_has_it(
    export: Callable[[Tensor], Any], is_kept: bool
) -> None:
    """A numpy array, or a tensor of other processes: torch resizes such a storage no more, or crashes."""
    layout = plan_layout([(3,), (2, 2)], groups=[0, 0], num_shards=1, itemsize=4)
    buffer = FlatBuffer(layout, dtype=torch.float32, device=torch.device("cpu"))
    buffer.views[1].fill_(7.0)
    moved: list[int] = []
    buffer.on_new_memory = moved.append
    exported: Any = export(buffer.views[1])
    if not is_kept:
        exported = None
    assert buffer.free_unless_referred_to() == (not is_kept)
    buffer.allocate()
    buffer.views[1].fill_(8.0)
    assert buffer.views[1].sum() == 32.0
    assert len(moved) == 1
    if is_kept:
        assert float(exported.sum()) == 28.0
    del exported
    assert buffer.free_unless_referred_to()
    buffer.allocate()
    assert buffer.views[0].shape == (3,)
