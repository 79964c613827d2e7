"""Who shares sequences after the process groups were made anew."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from dslaunch.runtime.comm.process_group import destroy_group
from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.sequence import parallel_state
from tests.runtime.ranks import Ranks


def _start_again(folder: Path, *, rank: int, world_size: int) -> None:
    destroy_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=world_size)


def _divided_twice(rank: int, folder: Path) -> list[str]:
    """Two jobs of two ranks, of which one divides sequences; then all four are one, with groups for something
    else that have the names of groups of before.
    """
    pair, place = divmod(rank, 2)
    _start_again(folder / f"pair-{pair}", rank=place, world_size=2)
    if pair == 0:
        parallel_state.initialize_sequence_parallel(2)
        before = parallel_state.sequence_ranks()
        assert before.group is parallel_state.get_sequence_parallel_group()
    dist.barrier()
    _start_again(folder / "all", rank=rank, world_size=4)
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


def test_a_group_that_was_destroyed_is_not_taken_for_one_of_the_same_name(
    ranks: Ranks, tmp_path: Path
) -> None:
    for names in ranks(_divided_twice, tmp_path, world_size=4, deadline_s=60.0):
        assert names[0] == names[1] != names[2] == names[3]
