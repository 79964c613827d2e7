"""Which ranks the groups of a job's domains hold, what they send each other, and that they end."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dslaunch.runtime.comm.collectives import Collectives
from dslaunch.runtime.comm.flight_recorder import JOB_LANE, NUM_LANES
from dslaunch.runtime.comm.mesh import Axis, make_mesh
from dslaunch.runtime.comm.rank_group import Job, RankGroup
from dslaunch.runtime.comm.wire import Wire
from dslaunch.runtime.mesh.domain import Domains
from dslaunch.shared.axes import Axes
from tests.runtime.ranks import Ranks


def _num_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def _ranks_of(axis: Axis | None) -> list[int]:
    assert axis is not None
    assert axis.group is not None
    return dist.get_process_group_ranks(axis.group)


def _made(rank: int) -> tuple[Any, ...]:
    """Pairs of ranks share what the others have apart: 0 and 2, 1 and 3."""
    num_groups = _num_groups()
    domains = Domains(Axes(dp=4), shard_size=2, states_by_chunk=True)
    experts = domains.add("experts", sharers=[(0, 2), (1, 3)], shard_size=2, divisor=4)
    alone = domains.add("alone", sharers=[(0,), (1,), (2,), (3,)], shard_size=1, divisor=4)
    wide = domains.add("wide", sharers=[(0, 1, 2, 3)], shard_size=4)
    domains.gather_beside()
    dense, mesh, beside = domains.dense, experts.comm.mesh, experts.comm._own_gather_axis
    assert _ranks_of(wide.comm._own_gather_axis) == [0, 1, 2, 3]
    assert (dense.comm.mesh.num_states, mesh.num_states) == (4, 2)
    assert beside is not None
    assert beside.group is not mesh.shard.group
    assert mesh.sharers.group is mesh.shard.group  # one group for one line
    lines = [
        _ranks_of(axis) for axis in (dense.comm.mesh.shard, dense.comm.mesh.replicate, mesh.shard, beside)
    ]
    factors = [(one.comm.mesh.rescale, one.comm.mesh.has_average) for one in (dense, experts, alone)]
    labels = [one.label("a") for one in (dense, experts)]
    spoken = torch.tensor(float(rank))
    experts.comm.broadcast(spoken, what="x", source=1)
    heard = experts.comm.sharers.gather_objects(rank, what="x")
    domains.close()
    assert _num_groups() == num_groups
    return lines, factors, labels, domains.summands, float(spoken), heard


def test_a_domain_talks_with_its_sharers_and_ends_with_its_groups(ranks: Ranks) -> None:
    for rank, (lines, factors, labels, summands, spoken, heard) in enumerate(ranks(_made, world_size=4)):
        row, column = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert lines == [row, column, column, column]
        assert factors == [(1.0, True), (0.5, True), (0.25, True)]
        assert labels == ["unit 'a'", "unit 'a' (experts)"]
        assert summands == (0, 2, 1, 3)  # in the order of the chunks
        assert spoken == column[1]
        assert heard == (column if rank < 2 else None)


def _copies(rank: int) -> tuple[float, bool, int, dict[str, int]]:
    domains = Domains(Axes(dp=2, tp=2), shard_size=1)
    value = torch.tensor(float(rank))
    domains.dense.comm.broadcast(value, what="x")
    counted = domains.dense.comm.mesh.is_counted
    num_groups = _num_groups()
    domains.close()
    return float(value), counted, num_groups - _num_groups(), domains.wire.meter.bytes_by_kind()


def test_copies_get_the_first_ranks_values_and_one_of_them_counts(ranks: Ranks) -> None:
    """Rank 0 tells rank 2, whose data are others, and both tell their copies."""
    results = ranks(_copies, world_size=4)
    assert [value for value, *_ in results] == [0.0] * 4
    assert [is_counted for _, is_counted, *_ in results] == [True, False, True, False]
    assert [num_ended for *_, num_ended, _ in results] == [2] * 4
    assert [sent["broadcast"] for *_, sent in results] == [8, 4, 4, 0]


def _holders(rank: int, axes: Axes) -> tuple[tuple[int, ...], list[int]]:
    domains = Domains(axes, shard_size=1)
    told = domains.holders.all_gather_objects(rank, what="x")
    ranks_of_them = domains.holder_ranks
    domains.close()
    return ranks_of_them, told


def test_who_holds_a_model_are_all_ranks_but_for_a_pipelines_other_stages(ranks: Ranks) -> None:
    for axes, expected in (
        (Axes(dp=2, tp=2), [(0, 1, 2, 3)] * 4),
        (Axes(pp=2, dp=2), [(0, 1), (0, 1), (2, 3), (2, 3)]),
    ):
        for own, (known, told) in zip(expected, ranks(_holders, axes, world_size=4), strict=True):
            assert (known, tuple(told)) == (own, own)


def _states(rank: int, by_chunk: bool) -> list[float]:
    """Each rank's states are the number of its chunk, or of its shard."""
    comm = Collectives(make_mesh(shard_size=2, states_by_chunk=by_chunk))
    own = torch.full((2,), float(comm.mesh.state_index))
    whole: list[float] = comm.gather_states(own, what="x").tolist()
    comm.close()
    return whole


def test_states_are_put_together_in_the_order_of_their_places(ranks: Ranks) -> None:
    expected = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
    assert ranks(_states, True, world_size=4) == [expected] * 4
    assert ranks(_states, False, world_size=4) == [[0.0, 0.0, 1.0, 1.0]] * 4


def reduced(rank: int, shard_size: int, by_chunk: bool, device: str) -> tuple[list[float], dict[str, int]]:
    """What this rank holds of the gradients, of which rank r has r + 1 everywhere, and what it has sent."""
    comm = Collectives(make_mesh(shard_size=shard_size, states_by_chunk=by_chunk, divisor=8))
    flat = torch.full((8,), rank + 1.0, device=device)
    comm.reduce_scatter_or_all_reduce(flat, what="x").wait()
    mesh = comm.mesh
    own: list[float] = flat.chunk(mesh.num_states)[mesh.state_index].tolist()
    sent = comm.wire.meter.bytes_by_kind()
    comm.close()
    return own, sent


def test_a_sum_is_divided_once_along_however_many_axes_it_is_made(ranks: Ranks) -> None:
    for shard_size, by_chunk in ((1, False), (2, False), (2, True), (4, False)):
        num_states = 4 if by_chunk else shard_size
        results = ranks(reduced, shard_size, by_chunk, "cpu", world_size=4)
        assert [own for own, _ in results] == [[10 / 8] * (8 // num_states)] * 4


def _told(rank: int) -> tuple[int, list[float], dict[str, int], list[int]]:
    job = Job(Wire(), leaders=(0, 1, 0))
    value = torch.tensor([rank, 0.5], dtype=torch.float64)
    told = job.all_gather_float64(value, what="x")[:, 0].tolist()
    hashes = job.wire.meter._hashes
    return job.lane, told, job.wire.meter.bytes_by_kind(), [int(one != 0) for one in hashes]


def test_what_the_job_sends_is_counted_as_small_and_in_its_own_lane(ranks: Ranks) -> None:
    in_lane = [0] * NUM_LANES
    in_lane[JOB_LANE] = 1
    assert ranks(_told, world_size=3) == [(JOB_LANE, [0.0, 1.0, 2.0], {"scalar": 32}, in_lane)] * 3


def test_a_rank_alone_hears_itself_in_the_shape_that_many_ranks_give(ranks: Ranks) -> None:
    assert ranks(_alone, world_size=1) == [[(1,), (1, 2)]]


def _alone(rank: int) -> list[tuple[int, ...]]:
    group = RankGroup(make_mesh(shard_size=1).sharers, Wire())
    values = (torch.zeros((), dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    assert group.all_gather_numbers([1, False], device=torch.device("cpu"), what="x") == [[1.0, 0.0]]
    return [tuple(group.all_gather_float64(value, what="x").shape) for value in values]


def _exchanged(rank: int) -> tuple[list[float], dict[str, int]]:
    """Rank r has r + 1 numbers for each rank."""
    comm = Collectives(make_mesh(shard_size=3))
    size = rank + 1
    buffer = torch.arange(3).repeat_interleave(size).float() + 10 * rank
    arrived = comm.exchange(buffer, sent=[size] * 3, received=[1, 2, 3], what="x")
    return arrived.tolist(), comm.wire.meter.bytes_by_kind()


def test_what_ranks_have_for_each_other_arrives_and_ones_own_is_not_sent(ranks: Ranks) -> None:
    for rank, (arrived, sent) in enumerate(ranks(_exchanged, world_size=3)):
        assert arrived == [float(rank), *[10.0 + rank] * 2, *[20.0 + rank] * 3]
        assert sent == {"all_to_all": 2 * (rank + 1) * 4}
