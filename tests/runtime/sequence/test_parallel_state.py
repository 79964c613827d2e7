"""Who shares sequences after the process groups were made anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # torch forgot to list it

from dslaunch.runtime.comm.process_group import destroy_group
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.sequence import parallel_state
from tests.runtime.ranks import Ranks


def _start_again(store: Any, name: str, *, rank: int, world_size: int) -> None:
    """Leave the group for another, whose ranks find each other under this name of the store."""
    dist.barrier()  # a rank that leaves closes connections on which the others may still make the group
    destroy_group()
    dist.init_process_group("gloo", store=PrefixStore(name, store), rank=rank, world_size=world_size)


def _divided_twice(rank: int) -> list[str]:
    """Two jobs of two ranks, of which one divides sequences; then all four are one, with groups for something
    else that have the names of groups of before.
    """
    pair, place = divmod(rank, 2)
    store = dist.distributed_c10d._get_default_store()  # new in each call of `ranks`, a second attempt too
    _start_again(store, f"pair-{pair}", rank=place, world_size=2)
    if pair == 0:
        parallel_state.initialize_sequence_parallel(2)
        before = parallel_state.sequence_ranks()
        assert before.group is parallel_state.get_sequence_parallel_group()
    _start_again(store, "all", rank=rank, world_size=4)
    others = [[dist.new_group(pair) for pair in ([0, 1], [2, 3])] for _ in range(3)]
    if pair == 0:
        assert before.name in [made.group_name for made, _ in others]  # the name is that of another one now
        with pytest.raises(ConfigError, match="is gone"):
            _ = before.group
    parallel_state.initialize_sequence_parallel(2)
    own = parallel_state.get_sequence_parallel_group()
    assert dist.get_process_group_ranks(own) == [2 * pair, 2 * pair + 1]
    assert all(own is not made for pairs in others for made in pairs)
    parallel_state.initialize_sequence_parallel(2)
    assert parallel_state.get_sequence_parallel_group() is own  # and no other one
    names: list[str] = [""] * 4
    dist.all_gather_object(names, own.group_name)
    return names


def test_a_group_that_was_destroyed_is_not_taken_for_one_of_the_same_name(ranks: Ranks) -> None:
    for names in ranks(_divided_twice, world_size=4, deadline_s=60.0):
        assert names[0] == names[1] != names[2] == names[3]
