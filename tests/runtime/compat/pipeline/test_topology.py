"""Ranks on a grid, under DeepSpeed's names and as DeepSpeed counts them."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from dslaunch.runtime.compat.pipeline.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
    axes_of,
    topology_of,
)
from dslaunch.runtime.errors import ConfigError
from dslaunch.shared.axes import ORDER, Axes
from tests.runtime.ranks import Ranks


def test_ranks_are_counted_along_the_last_axis_first() -> None:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    assert topology.get_axis_names() == ["pipe", "data", "model"]
    assert (topology.world_size(), topology.get_dim("data"), topology.get_dim("none")) == (12, 3, 0)
    assert topology.get_rank(pipe=1, data=2, model=1) == 11
    assert topology.get_coord(8) == (1, 1, 0)
    assert topology.get_coord(8).data == 1
    assert topology.get_axis_comm_lists("pipe") == [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]
    assert topology.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]
    assert topology.get_axis_comm_lists("none") == []
    assert topology.filter_match(pipe=0, data=1) == [2, 3]
    assert topology.get_axis_list("data", 2) == [4, 5, 10, 11]
    assert topology.get_rank_repr(rank=7) == "model_01"
    assert topology.get_rank_repr(rank=7, omit_axes=["data"]) == "pipe_01-model_01"
    with pytest.raises(ValueError, match="it wants pipe, data, model"):
        topology.get_rank(pipe=1)
    with pytest.raises(ValueError, match="rank 12 is not in this topology of 12 ranks"):
        topology.get_coord(12)


def test_a_topology_and_the_axes_of_a_job_are_the_same_thing() -> None:
    for axes in (Axes(pp=2, dp=2), Axes(pp=2, dp=3, tp=2), Axes(dp=4), Axes(pp=2, dp=2, sp=3, tp=2)):
        for order in permutations(ORDER):
            ordered = replace(axes, order=order)
            topology = topology_of(ordered)
            assert axes_of(topology, axes.world_size) == ordered
            for rank in range(axes.world_size):
                place, coord = ordered.coordinates(rank), topology.get_coord(rank)
                assert (coord.pipe, coord.data) == (place["pp"], place["dp"])
    with pytest.raises(ConfigError, match="has 4 ranks, and the job has 2"):
        axes_of(PipeDataParallelTopology(2, 2), 2)
    with pytest.raises(ConfigError, match="has the axes data, expert; give pipe, data, sequence"):
        axes_of(ProcessTopology(["data", "expert"], [2, 2]), 4)


def _grid(rank: int) -> dict[str, Any]:
    grid = PipelineParallelGrid(PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1))
    found = {
        "stage": grid.get_stage_id(),
        "data": (grid.get_data_parallel_rank(), grid.get_data_parallel_world_size()),
        "model": (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()),
        "slice": (grid.get_slice_parallel_rank(), grid.get_tensor_model_parallel_world_size()),
        "pipe": (grid.get_pipe_parallel_rank(), grid.get_pipe_parallel_world_size()),
        "group": grid.get_pipe_parallel_group().size(),
        "there": grid.stage_to_global(1),
        "of data": grid.get_data_parallel_group_ranks(),
    }
    grid.close()
    return found


def test_a_rank_knows_its_place_and_groups(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(_grid, world_size=4)):
        assert found == {
            "stage": rank // 2,
            "data": (0, 1),
            "model": (rank, 4),
            "slice": (rank % 2, 2),
            "pipe": (rank // 2, 2),
            "group": 2,
            "there": 2 + rank % 2,
            "of data": [rank],
        }
