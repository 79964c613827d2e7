"""Who shares what: all ranks train on data of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import dslaunch
from dslaunch.runtime.compat import groups
from dslaunch.runtime.errors import ConfigError
from tests.runtime.models import make_config, make_model
from tests.runtime.ranks import Ranks


def _ask(rank: int) -> tuple[Any, ...]:
    total = torch.tensor([rank + 1])
    dist.all_reduce(total, group=groups.data_parallel_group())
    return (
        total.item(),
        groups.data_parallel_group_ranks(),
        groups.data_parallel_world_size(),
        groups.data_parallel_rank(),
        groups.broadcast_src_rank(),
        (groups.model_parallel_world_size(), groups.model_parallel_rank()),
        (groups.sequence_parallel_world_size(), groups.sequence_parallel_rank()),
    )


def test_all_ranks_share_the_data_and_nothing_else(ranks: Ranks) -> None:
    assert ranks(_ask, world_size=2) == [(3, [0, 1], 2, rank, 0, (1, 0), (1, 0)) for rank in range(2)]


_kept: list[Any] = []


def _keep(rank: int) -> int:
    _kept.append(dslaunch.initialize(model=make_model(), config=make_config())[0])
    return groups.data_parallel_world_size()


def _ask_later(rank: int) -> tuple[Any, ...]:
    try:
        return _ask(rank)
    finally:
        _kept.clear()


def test_an_engine_of_an_earlier_process_group_does_not_answer_for_a_later_one(ranks: Ranks) -> None:
    assert ranks(_keep, world_size=3) == [3, 3, 3]
    assert [one[1:4] for one in ranks(_ask_later, world_size=2)] == [([0, 1], 2, 0), ([0, 1], 2, 1)]


def test_there_is_no_group_of_a_sequence_nor_one_before_the_start() -> None:
    with pytest.raises(KeyError, match="no sequence is divided"):
        groups.sequence_parallel_group()
    with pytest.raises(ConfigError, match="call init_distributed"):
        groups.data_parallel_group()
