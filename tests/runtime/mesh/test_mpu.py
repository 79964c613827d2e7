"""The mpu that a program gives initialize(): an object or a module with methods of old or of new Megatron."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dslaunch
from dslaunch.runtime.compat.pipeline.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from dslaunch.runtime.errors import ConfigError
from tests.runtime.models import make_config
from tests.runtime.ranks import Ranks

MICRO = 3
OLD, NEW = "model_parallel", "tensor_model_parallel"


def _not_made() -> int:
    raise AssertionError("sequence parallel group is not initialized")


def _groups(lines: Iterable[Iterable[int]]) -> Any:
    """The group of the line that this rank is in."""
    made = {tuple(line): dist.new_group(list(line)) for line in lines}
    return next(group for line, group in made.items() if dist.get_rank() in line)


def _methods(
    tp: int, kind: str, *, is_strided: bool = False, has_pipe: bool = False
) -> dict[str, Callable[[], Any]]:
    """Those of an mpu whose layers are divided over `tp` ranks: neighbours, unless they are strided."""
    world = dist.get_world_size()
    dp = world // tp
    near = [[first + step for step in range(tp)] for first in range(0, world, tp)]
    far = [[first + step * dp for step in range(tp)] for first in range(dp)]
    tensor, data = (far, near) if is_strided else (near, [list(line) for line in zip(*near, strict=True)])
    group, data_group = _groups(tensor), _groups(data)
    found: dict[str, Callable[[], Any]] = {
        f"get_{kind}_world_size": lambda: tp,
        f"get_{kind}_rank": lambda: dist.get_rank(group),
        f"get_{kind}_group": lambda: group,
        "get_data_parallel_world_size": lambda: dp,
        "get_data_parallel_rank": lambda: dist.get_rank(data_group),
        "get_data_parallel_group": lambda: data_group,
    }
    if has_pipe:
        found |= {
            "get_pipeline_model_parallel_world_size": lambda: 1,
            "get_pipeline_model_parallel_rank": lambda: 0,
            "get_sequence_parallel_world_size": _not_made,
        }
    return found


def _object(methods: dict[str, Callable[[], Any]]) -> Any:
    return type("Mpu", (), {name: staticmethod(method) for name, method in methods.items()})()


def _module(methods: dict[str, Callable[[], Any]]) -> Any:
    made = ModuleType("mpu")
    vars(made).update(methods)
    return made


class OwnLinear(nn.Module):
    """Megatron's ColumnParallelLinear, as far as a layer says how it is divided."""

    def __init__(self, input_size: int, output_size: int, *, num_parts: int) -> None:
        super().__init__()
        self.input_size, self.output_size = input_size, output_size
        self.output_size_per_partition = output_size // num_parts
        self.weight = nn.Parameter(torch.ones(self.output_size_per_partition, input_size))
        _marked(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight)


def _marked(module: nn.Module) -> nn.Module:
    for param in module.parameters():
        vars(param)["tensor_model_parallel"] = True
    return module


def _initialize(mpu: Any, tp: int, first: nn.Module | None = None, **changes: Any) -> Any:
    rules = [
        {"patterns": [r"0\.weight$"], "partition_type": "column"},
        {"patterns": [r"1\.weight$"], "partition_type": "row"},
    ]
    divided = {"autotp_size": tp, "partition_config": {"layer_specs": rules}}
    config = make_config(
        train_batch_size=None,
        train_micro_batch_size_per_gpu=MICRO,
        gradient_accumulation_steps=1,
        **({"tensor_parallel": divided} if tp > 1 else {}),
    )
    torch.manual_seed(1)
    model = nn.Sequential(first or nn.Linear(4, 8), nn.Linear(8, 4))
    given = {key: value for key, value in (config | changes).items() if value is not None}
    engine, *_ = dslaunch.initialize(model=model, mpu=mpu, config=given, is_lenient=True)
    return engine


def _taken(rank: int) -> None:
    grids = {tp: PipelineParallelGrid(PipeModelDataParallelTopology(1, tp, 4 // tp)) for tp in (1, 2)}
    data_only = {name: one for name, one in _methods(1, OLD).items() if "data" in name}
    cases: list[tuple[int, Any]] = [
        (1, _object(_methods(1, OLD))),
        (2, _object(_methods(2, OLD))),
        (2, _object(_methods(2, NEW, has_pipe=True))),
        (1, _module(_methods(1, NEW, has_pipe=True))),
        (1, _object(data_only)),
        *grids.items(),
    ]
    for tp, mpu in cases:
        first = OwnLinear(4, 8, num_parts=1) if tp == 1 else None  # marked in a job of one rank, too
        engine = _initialize(mpu, tp, first, train_batch_size=MICRO * 4 // tp)
        assert (engine.mpu, engine.mp_world_size, engine.dp_world_size) == (mpu, tp, 4 // tp)
        engine.backward(engine(torch.ones(MICRO, 4)).sum())
        engine.step()
        engine.destroy()


def test_an_mpu_with_the_ranks_of_the_job_is_taken(ranks: Ranks) -> None:
    """Its data-parallel ranks are those that a batch is counted by."""
    ranks(_taken, world_size=4)


def _refused(rank: int) -> dict[str, str]:
    alone, pair, strided = _methods(1, NEW), _methods(2, NEW), _methods(2, OLD, is_strided=True)
    numbers = {name: method for name, method in strided.items() if not name.endswith("group")}
    pipe = {"get_pipe_parallel_world_size": lambda: 2, "get_data_parallel_world_size": lambda: 2}
    cases: dict[str, tuple[int, Any]] = {
        "strided": (2, _object(strided)),
        "numbers": (2, _object(numbers)),
        "undivided": (1, _object(pair)),
        "divided": (2, _object(alone)),
        "pipe": (1, _object(alone | pipe)),
        "data": (1, _object(alone | {"get_data_parallel_world_size": lambda: 3})),
        "raises": (1, _object(alone | {"get_data_parallel_world_size": _not_made})),
        "object": (1, object()),
        "layer": (1, _object(pair)),
        "layer alone": (1, None),
        "layer, planned": (2, _object(pair)),
        "marked": (1, _object(pair)),
    }
    models = {"marked": _marked(nn.Linear(4, 8))} | {
        case: OwnLinear(4, 8, num_parts=2) for case in cases if case.startswith("layer")
    }
    said = {}
    for case, (tp, mpu) in cases.items():
        with pytest.raises(ConfigError) as caught:
            _initialize(mpu, tp, first=models.get(case))
        said[case] = str(caught.value)
        dist.barrier()
    return said


def test_an_mpu_with_other_ranks_is_refused_by_name(ranks: Ranks) -> None:
    words = {
        "undivided": "is 2, and the number of ranks that divide layers is 1 here, as the ds_config's "
        "tensor_parallel.autotp_size says; set autotp_size to 2, which divides a model that is given whole",
        "layer": "layer '0' (OwnLinear) has output_size_per_partition 4 of 8: the program divides its layers",
        "layer alone": "layer '0' (OwnLinear) has output_size_per_partition 4 of 8: the program divides its",
        "layer, planned": 'let the ds_config divide it: "tensor_parallel": {"autotp_size": ...}',
        "marked": "parameter '0.weight' has tensor_model_parallel=True, and the mpu divides layers over 2",
        "divided": "its get_tensor_model_parallel_world_size() is 1, and the number of ranks that divide",
        "pipe": "its get_pipe_parallel_world_size() is 2, and the number of ranks that hold the stages of a",
        "data": "world_size() is 3, get_tensor_model_parallel_world_size() is 1; their product must be the 4",
        "raises": "its get_data_parallel_world_size() raises AssertionError: sequence parallel group is not",
        "object": "has none of the methods of an mpu",
    }
    for rank, said in enumerate(ranks(_refused, world_size=4)):
        near, far = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert f"ranks {far} divide layers there, and {near} here" in said["strided"]
        if rank in (1, 2):
            assert f"rank {rank} is number {rank - 1} of the 2 that divide layers there" in said["numbers"]
        else:
            assert "on rank 1: rank 1 is number" in said["numbers"]
        for case, text in words.items():
            assert text in said[case], said[case]
