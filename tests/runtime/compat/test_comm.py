"""Collectives for programs: one team of three ranks does all of them once, and every element is compared."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

import dslaunch
from dslaunch.runtime.compat import comm as dist
from dslaunch.runtime.errors import ConfigError
from tests.runtime.ranks import Ranks

DEEPSPEED = Path(sys.prefix) / "deepspeed" / "deepspeed" / "comm" / "comm.py"  # `make setup` puts it there
WORLD = 3
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
OPS: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def _values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: exact in every dtype, in any order of adding, and their products as well."""
    return torch.randint(1, 5, (numel,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def _is_possible(op: str, dtype: torch.dtype) -> bool:
    return not (
        dtype.is_floating_point if op.startswith("B") else op == "AVG" and not dtype.is_floating_point
    )


def _expected(op: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    wide = torch.float64 if dtype.is_floating_point else dtype
    total = reduce(OPS[op], [_values(rank, numel, dtype).to(wide) for rank in range(WORLD)])
    return (total / WORLD if op == "AVG" else total).to(dtype)


def _reductions(rank: int) -> dict[tuple[str, str, torch.dtype], torch.Tensor]:
    found: dict[tuple[str, str, torch.dtype], torch.Tensor] = {}
    for name in OPS:
        op = getattr(dist.ReduceOp, name)
        for dtype in DTYPES:
            if not _is_possible(name, dtype):
                continue
            key = (name, dtype)
            whole = _values(rank, 6, dtype)
            dist.all_reduce(whole, op)
            found[("all_reduce", *key)] = whole
            later = _values(rank, 6, dtype)
            work = dist.all_reduce(later, op=op, async_op=True)
            work.wait()
            found[("all_reduce later", *key)] = later
            first = _values(rank, 6, dtype)
            dist.reduce(first, 0, op)
            found[("reduce", *key)] = first
            own = torch.zeros(2, dtype=dtype)
            dist.reduce_scatter_tensor(own, _values(rank, 6, dtype), op)
            found[("reduce_scatter_tensor", *key)] = own
            parts = list(_values(rank, 6, dtype).split([1, 2, 3]))  # type: ignore[no-untyped-call]
            uneven = torch.zeros(rank + 1, dtype=dtype)
            work = dist.reduce_scatter(uneven, parts, op, async_op=True)
            assert not work.is_completed()
            work.wait()
            assert work.is_completed()
            work.wait()  # once more changes nothing
            found[("reduce_scatter", *key)] = uneven
    return found


@pytest.mark.slow
def test_every_reduction_of_every_dtype(ranks: Ranks) -> None:
    by_rank = ranks(_reductions, world_size=WORLD)
    for rank, found in enumerate(by_rank):
        for (what, op, dtype), got in found.items():
            expected = _expected(op, 6, dtype)
            if what == "reduce_scatter_tensor":
                expected = expected[2 * rank : 2 * rank + 2]
            elif what == "reduce_scatter":
                expected = expected.split([1, 2, 3])[rank]  # type: ignore[no-untyped-call]
            elif what == "reduce" and rank:
                continue
            assert torch.equal(got, expected), (what, op, dtype, rank)
    assert len(by_rank[0]) == 5 * (5 * 2 + 7)


def _moves(rank: int) -> dict[str, Any]:  # noqa: PLR0915  (a list of calls)
    found: dict[str, Any] = {}
    own = torch.tensor([10.0 * rank, 10.0 * rank + 1])
    gathered = [torch.zeros(2) for _ in range(WORLD)]
    dist.all_gather(gathered, own)
    found["all_gather"] = torch.cat(gathered)
    for name in ("all_gather_into_tensor", "allgather_fn"):
        found[name] = torch.zeros(6)
        getattr(dist, name)(found[name], own)
    one, two = torch.zeros(6), torch.zeros(WORLD, 1)
    dist.all_gather_coalesced([one, two], [own, own[1:]])
    found["all_gather_coalesced"] = (one, two)
    many = [own.clone(), own[:1].clone()]
    work = dist.all_reduce_coalesced(many, async_op=True)
    work.wait()
    found["all_reduce_coalesced"] = (work.is_completed(), *many)
    quick = own.clone()
    dist.inference_all_reduce(quick)
    found["inference_all_reduce"] = quick
    scattered = torch.zeros(2)
    dist.reduce_scatter_fn(scattered, torch.arange(6.0) + rank)
    found["reduce_scatter_fn"] = scattered
    objects: list[Any] = [None] * WORLD
    dist.all_gather_object(objects, {"rank": rank})
    found["all_gather_object"] = objects
    told = [{"from": rank}] if rank == 1 else [None]
    dist.broadcast_object_list(told, 1)
    found["broadcast_object_list"] = told
    sent = own.clone()
    dist.broadcast(sent, 2)
    found["broadcast"] = sent
    to_first = [torch.zeros(2) for _ in range(WORLD)] if rank == 0 else None
    dist.gather(own, to_first)
    found["gather"] = to_first
    mine = torch.zeros(1)
    dist.scatter(mine, [torch.full((1,), 5.0 + n) for n in range(WORLD)] if rank == 1 else None, src=1)
    found["scatter"] = mine
    arrived = torch.zeros(3)
    dist.all_to_all_single(arrived, torch.arange(3.0) + 10 * rank)
    found["all_to_all_single"] = arrived
    # From rank s to rank r: s + 1 rows of [s, r].
    inputs = [torch.tensor([[float(rank), float(to)]]).expand(rank + 1, 2) for to in range(WORLD)]
    outputs = [torch.zeros(source + 1, 2) for source in range(WORLD)]
    dist.all_to_all(outputs, inputs)
    found["all_to_all"] = outputs
    right, left = (rank + 1) % WORLD, (rank - 1) % WORLD
    passed = torch.zeros(2)
    operations = [dist.P2POp(dist.isend, own, right), dist.P2POp(torch_dist.irecv, passed, left)]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    found["batch_isend_irecv"] = passed
    if rank == 0:
        dist.send(own, 1)
        dist.isend(own + 1, 1, tag=7).wait()
    if rank == 1:
        first, second = torch.zeros(2), torch.zeros(2)
        source = dist.recv(first)
        dist.irecv(second, 0, tag=7).wait()
        found["recv"] = (source, first, second)
    dist.barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=60))
    return found


def test_every_way_to_move_tensors_and_objects(ranks: Ranks) -> None:
    everything = torch.tensor([0.0, 1.0, 10.0, 11.0, 20.0, 21.0])
    for rank, found in enumerate(ranks(_moves, world_size=WORLD)):
        for name in ("all_gather", "all_gather_into_tensor", "allgather_fn"):
            assert torch.equal(found[name], everything), name
        one, two = found["all_gather_coalesced"]
        assert torch.equal(one, everything)
        assert two.tolist() == [[1.0], [11.0], [21.0]]
        assert [
            found["all_reduce_coalesced"][0],
            *map(torch.Tensor.tolist, found["all_reduce_coalesced"][1:]),
        ] == [
            True,
            [30.0, 33.0],
            [30.0],
        ]
        assert found["inference_all_reduce"].tolist() == [30.0, 33.0]
        assert found["reduce_scatter_fn"].tolist() == [6.0 * rank + 3, 6.0 * rank + 6]
        assert found["all_gather_object"] == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert found["broadcast_object_list"] == [{"from": 1}]
        assert found["broadcast"].tolist() == [20.0, 21.0]
        assert found["scatter"].tolist() == [5.0 + rank]
        assert found["all_to_all_single"].tolist() == [rank, 10.0 + rank, 20.0 + rank]
        assert [one.tolist() for one in found["all_to_all"]] == [
            [[source, rank]] * (source + 1) for source in range(WORLD)
        ]
        left = (rank - 1) % WORLD
        assert found["batch_isend_irecv"].tolist() == [10.0 * left, 10.0 * left + 1]
        if rank == 0:
            assert torch.equal(torch.cat(found["gather"]), everything)
        if rank == 1:
            source, first, second = found["recv"]
            assert (source, first.tolist(), second.tolist()) == (0, [0.0, 1.0], [1.0, 2.0])


def _groups(rank: int) -> dict[str, Any]:
    group = dist.new_group([2, 0])
    found: dict[str, Any] = {
        "sizes": (dist.get_world_size(), dist.get_world_size(group)),
        "ranks": (dist.get_rank(), dist.get_rank(group)),
        "world": dist.get_all_ranks_from_group(),
        "global": [dist.get_global_rank(None, n) for n in range(WORLD)],
        "has": (
            dist.is_available(),
            dist.is_initialized(),
            dist.has_reduce_scatter_tensor(),
            dist.has_all_gather_into_tensor(),
            dist.has_all_reduce_coalesced(),
        ),
        "local": dist.get_local_rank(),
        "mesh": tuple(dist.initialize_mesh_device((WORLD, 1), ("data_parallel", "sequence_parallel")).shape),
    }
    if rank != 1:
        found["members"] = dist.get_all_ranks_from_group(group)
        average = torch.tensor([float(rank)])
        dist.all_reduce(average, dist.ReduceOp.AVG, group=group)
        found["average"] = average.item()
        own = torch.zeros(1)
        dist.reduce_scatter_tensor(own, torch.tensor([1.0, 2.0]) + rank, group=group)
        found["own"] = own.item()
        dist.destroy_process_group(group)
    return found


@pytest.mark.slow
def test_groups_of_some_ranks(ranks: Ranks) -> None:
    answers = ranks(_groups, world_size=WORLD)
    for rank, found in enumerate(answers):
        assert found["sizes"] == (3, -1 if rank == 1 else 2)
        assert found["ranks"] == (rank, {0: 0, 1: -1, 2: 1}[rank])  # torch sorts a group's ranks
        assert found["world"] == found["global"] == [0, 1, 2]
        assert found["has"] == (True,) * 5
        assert found["mesh"] == (3, 1)
        if rank != 1:
            assert found["members"] == [0, 2]
            assert found["average"] == 1.0
            assert found["own"] == {0: 4.0, 2: 6.0}[rank]


def _mistakes(rank: int) -> list[str]:
    told = []
    for call in (
        lambda: dist.all_reduce(torch.ones(1, dtype=torch.int64), dist.ReduceOp.AVG),
        lambda: dist.reduce_scatter(torch.ones(1), [torch.ones(1)] * 3),
        lambda: dist.reduce_scatter(torch.ones(2), [torch.ones(1)] * 2),
        lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(5)),
        lambda: dist.P2POp(torch_dist.broadcast, torch.ones(1), 0),
    ):
        try:
            call()
        except ConfigError as error:
            told.append(str(error))
    return told


def test_what_does_not_fit_is_refused_before_it_is_sent(ranks: Ranks) -> None:
    told = ranks(_mistakes, world_size=2)[0]
    assert [text.split(":")[0] for text in told[:4]] == [
        "ReduceOp.AVG of torch.int64",
        "reduce_scatter() of 3 inputs",
        "reduce_scatter() into (2,) of torch.float32",
        "reduce_scatter_tensor() of 5 elements into 2",
    ]
    assert "must be isend or irecv" in told[4]
    with pytest.raises(ConfigError, match="call init_distributed"):
        dist.get_world_group()


LEFT_OUT = {  # of the arguments: what profiles collectives has them
    "prof",
    "log_name",
    "debug",
}


@pytest.mark.skipif(
    not DEEPSPEED.exists(), reason="without DeepSpeed in .venv/deepspeed; `make setup` puts it there"
)
def test_all_functions_of_deepspeed_are_here_with_its_arguments_in_its_order_or_say_what_to_do() -> None:
    refused = set()
    for node in ast.parse(DEEPSPEED.read_text()).body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        theirs = [arg.arg for arg in node.args.args if arg.arg not in LEFT_OUT]
        if not hasattr(dist, node.name):
            with pytest.raises(AttributeError, match=rf"^dslaunch\.comm\.{node.name}: .* not here; [a-z]"):
                getattr(dist, node.name)
            refused.add(node.name)
            continue
        function = getattr(dist, node.name)
        ours = [name for name in inspect.signature(function).parameters if name not in LEFT_OUT]
        assert ours == theirs, node.name
    assert refused == {
        *("timed_op", "init_deepspeed_backend", "set_backend", "mpi_discovery", "in_aml", "in_aws_sm"),
        *("in_dlts", "patch_aml_env_for_torch_nccl_backend", "patch_aws_sm_env_for_torch_nccl_backend"),
        *("has_coalescing_manager", "enable_symm_mem_for_group"),
    }


def test_a_name_that_deepspeed_has_not_either_is_an_ordinary_attribute_error() -> None:
    assert not hasattr(dist, "all_reduces")
    with pytest.raises(AttributeError, match=r"has no attribute 'all_reduces'; docs/reference/api.md lists"):
        dist.all_reduces  # type: ignore[attr-defined]  # noqa: B018


def test_init_distributed_is_the_one_of_the_facade() -> None:
    assert dist.init_distributed is dslaunch.init_distributed
