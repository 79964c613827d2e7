"""How many tensors lie in a flat buffer's memory: torch's count, and ours for builds of torch without it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dslaunch.runtime.zero.flat_buffer import num_users, references_to_storage

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
