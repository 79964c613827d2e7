"""Collectives over a mesh: results, what they send, and their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dslaunch.runtime.comm.byte_meter import Meter
from dslaunch.runtime.comm.collectives import Collectives
from dslaunch.runtime.comm.mesh import make_mesh
from tests.runtime.ranks import Ranks

N = 24  # divides by 1, 2, 3 and 4 ranks


def _values(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _expected(world_size: int, dtype: torch.dtype) -> torch.Tensor:
    """The mean in rank order, in fp32, rounded once."""
    total = _values(0, dtype).float()
    for rank in range(1, world_size):
        total += _values(rank, dtype)
    return (total * (1.0 / world_size)).to(dtype)


def _mesh(rank: int, shard_size: int) -> tuple[Any, ...]:
    mesh = make_mesh(shard_size=shard_size)
    axes = [(axis.size, axis.index) for axis in (mesh.replicate, mesh.shard, mesh.sharers)]
    return *axes, mesh.chunk_index


def test_ranks_of_a_mesh_are_numbered_row_by_row_and_own_a_chunk_of_their_shard(ranks: Ranks) -> None:
    assert ranks(_mesh, 2, world_size=4) == [
        ((2, 0), (2, 0), (4, 0), 0),
        ((2, 0), (2, 1), (4, 1), 2),
        ((2, 1), (2, 0), (4, 2), 1),
        ((2, 1), (2, 1), (4, 3), 3),
    ]
    assert [chunk for *_, chunk in ranks(_mesh, 1, world_size=3)] == [0, 1, 2]
    assert [chunk for *_, chunk in ranks(_mesh, 3, world_size=3)] == [0, 1, 2]


def _reduce(rank: int, shard_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, int], int]:
    comm = Collectives(make_mesh(shard_size=shard_size))
    flat = _values(rank, dtype)
    comm.reduce_scatter_or_all_reduce(flat, what="x").wait()
    comm.all_gather_(flat, what="x").wait()
    return flat, comm.wire.meter.bytes_by_kind(), comm.wire.meter.order_hash


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_axis_gives_the_mean_in_rank_order_to_the_bit(
    ranks: Ranks, world_size: int, dtype: torch.dtype
) -> None:
    for shard_size in {1, world_size}:
        results = ranks(_reduce, shard_size, dtype, world_size=world_size)
        for flat, sent, order in results:
            assert torch.equal(flat, _expected(world_size, dtype))
            ring = N * dtype.itemsize * (world_size - 1) // world_size
            assert sent == ({} if world_size == 1 else {"reduce_scatter": ring, "all_gather": ring})
            assert order == results[0][2]


def test_a_mesh_of_two_axes_gives_the_mean_of_all(ranks: Ranks) -> None:
    for flat, sent, _ in ranks(_reduce, 2, torch.float32, world_size=4):
        torch.testing.assert_close(flat, _expected(4, torch.float32))
        whole = N * 4
        # reduce_scatter of all over 2 ranks, then reduce_scatter and all_gather of half over 2,
        # then all_gather of all
        assert sent == {"reduce_scatter": whole // 2 + whole // 4, "all_gather": whole // 4 + whole // 2}


def _in_flight(rank: int) -> list[torch.Tensor]:
    comm = Collectives(make_mesh(shard_size=1))
    flats = [_values(rank, torch.float32) * (index + 1) for index in range(5)]
    for pending in [comm.reduce_scatter_or_all_reduce(flat, what="x") for flat in flats]:
        pending.wait()
    return flats


def test_several_may_be_in_flight(ranks: Ranks) -> None:
    for flats in ranks(_in_flight, world_size=3):
        for index, flat in enumerate(flats):
            torch.testing.assert_close(flat, _expected(3, torch.float32) * (index + 1))


def _small_things(rank: int) -> tuple[Any, ...]:
    comm = Collectives(make_mesh(shard_size=dist.get_world_size()))
    tensor = torch.full((3,), rank)
    comm.broadcast(tensor, what="x")
    numbers = comm.sharers.all_gather_float64(torch.tensor(rank / 3, dtype=torch.float64), what="x").tolist()
    return (
        tensor.tolist(),
        numbers,
        comm.sharers.gather_objects({"rank": rank}, what="x"),
    )


def test_small_things_arrive_in_rank_order(ranks: Ranks) -> None:
    numbers = [0.0, 1 / 3, 2 / 3]
    objects = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert ranks(_small_things, world_size=3) == [
        ([0, 0, 0], numbers, objects),
        ([0, 0, 0], numbers, None),
        ([0, 0, 0], numbers, None),
    ]
    assert ranks(_small_things, world_size=1) == [([0, 0, 0], [0.0], objects[:1])]


def test_the_hash_depends_on_kind_unit_size_and_order() -> None:
    def order_hash(*calls: tuple[str, str, int]) -> int:
        meter = Meter()
        for kind, what, nbytes in calls:
            meter.record(kind, what, nbytes=nbytes, sent_bytes=0)
        return meter.order_hash

    a, b = ("all_gather", "x", 8), ("reduce_scatter", "x", 8)
    hashes = [
        order_hash(a, b),
        order_hash(b, a),
        order_hash(a),
        order_hash(a, ("reduce_scatter", "x", 4)),
        order_hash(a, ("reduce_scatter", "y", 8)),
        order_hash(),
    ]
    assert len(set(hashes)) == len(hashes)
    assert order_hash(a, b) == order_hash(a, b)


def test_a_shard_axis_must_divide_the_world(ranks: Ranks) -> None:
    ranks(_undividable, world_size=3)


def _undividable(rank: int) -> None:
    with pytest.raises(ValueError, match="shard_size=2 does not divide the 3 ranks"):
        make_mesh(shard_size=2)
