"""What the engine does on a machine with GPUs, on the fake device: where it trains, what it waits for, and
what it holds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import dslaunch
from dslaunch.runtime.checkpoint.files.snapshot import Snapshot
from dslaunch.runtime.checkpoint.files.tensor_runs import TensorRuns, runs_of_tensors
from dslaunch.runtime.checkpoint.saver import Saver
from dslaunch.runtime.comm.collectives import Collectives
from dslaunch.runtime.comm.mesh import make_mesh, make_shard_axis
from dslaunch.runtime.comm.process_group import start_process_group
from dslaunch.runtime.compat.grad_norm import clip_grad_norm_
from dslaunch.runtime.environment import read_environment
from dslaunch.runtime.offload.device_copies import Arrival
from dslaunch.runtime.zero.parameters import writes
from tests.exhaustive import few
from tests.fake_cuda.features import FEATURES, WIDTH, Feature, waits_of
from tests.fake_cuda.torch_cuda import device
from tests.runtime.models import Blocks, batch, loss_of, make_config, make_model
from tests.runtime.ranks import Ranks

PINNED = {"device": "cpu", "pin_memory": True}
PIECE = 1024
SELDOM = (  # of `make test`; a feature that waits at the same places is there
    *("stage 0", "stage 1", "stage 2", "fp16", "two micro batches", "layers over ranks"),
    *("MoE", "MoE over ranks, Jitter", "MoE over ranks, RSample", "MoE over ranks, no drop_tokens"),
    *("Hugging Face experts", "packed sequences over ranks", "pipeline of one stage", "pipeline zbv"),
)
BF16 = {"bf16": {"enabled": True}, "gradient_clipping": 0.05}


def step(engine: dslaunch.Engine, number: int = 0) -> None:
    """Train on one batch."""
    dtype = next(engine.module.parameters()).dtype
    with torch.device("cpu"):
        own = batch(number).chunk(dist.get_world_size())[dist.get_rank()]
    engine.backward(loss_of(engine, own.to(engine.device, dtype)))
    engine.step()


@contextlib.contextmanager
def another_group(backend: str | None) -> Iterator[None]:
    """The default group is this one meanwhile. Its store is the attempt's own: a second attempt that found
    the addresses of the first would connect to nothing.
    """
    own: dict[str, Any] = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()  # who left while others still form a group would make them fail
    dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.PrefixStore("another", store), **own)
    try:
        yield
    finally:
        dist.destroy_process_group()
        after = dist.PrefixStore("after", store)
        dist.init_process_group("nccl", store=after, device_id=torch.device("cuda", own["rank"]), **own)


# ---- where it trains


def _chosen(rank: int, backend: str | None, folder: str) -> tuple[str, list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dslaunch").addHandler(handler)
    try:
        with another_group(backend):
            engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(stage=2))
            step(engine)
            found = str(engine.device)
            engine.save_checkpoint(folder)
            engine.destroy()
    finally:
        logging.getLogger("dslaunch").removeHandler(handler)
    return found, [text for text in said if "CPU" in text]


def test_a_group_without_the_name_of_a_back_end_trains_on_the_gpu(cuda_ranks: Ranks, tmp_path: Path) -> None:
    """As `torch.distributed.init_process_group()` makes it: gloo and NCCL, and a name that is 'undefined'."""
    assert cuda_ranks(_chosen, None, str(tmp_path), world_size=2) == [("cuda:0", []), ("cuda:1", [])]


def test_a_group_that_cannot_send_from_gpus_trains_on_the_cpu_and_says_so(
    cuda_ranks: Ranks, tmp_path: Path
) -> None:
    (first, said), second = cuda_ranks(_chosen, "gloo", str(tmp_path), world_size=2)
    assert (first, second) == ("cpu", ("cpu", []))
    assert len(said) == 1
    assert "training on the CPU, though there is a GPU: the process group's back end is 'gloo'" in said[0]


def _flights(rank: int) -> tuple[int, bool]:
    engine, *_ = dslaunch.initialize(
        model=make_model(), config=make_config(stage=3, reduce_bucket_size=50, **BF16)
    )
    for number in range(3):
        step(engine, number)
    recorder = engine._wire.recorder
    held = sum(flight._work is not None for flight in recorder._under_way)
    torch.cuda.synchronize()
    is_quiet = not recorder.under_way()
    engine.destroy()
    return held, is_quiet


def test_a_collective_that_was_waited_for_holds_no_memory(cuda_ranks: Ranks) -> None:
    """A work of NCCL's keeps its outputs, and is completed only when the host has waited for the device."""
    assert cuda_ranks(_flights, world_size=2) == [(0, True)] * 2


def _begun(rank: int) -> float:
    config = make_config(stage=3, reduce_bucket_size=64, **BF16)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with dslaunch.zero.Init(config_dict_or_path=config):
        model = make_model(partial(Blocks, WIDTH, 12))
    engine, *_ = dslaunch.initialize(model=model, config=config)
    at_most = torch.cuda.max_memory_allocated() - before
    engine.destroy()
    unit = 4 * (WIDTH + 1) * WIDTH
    return at_most / unit


def test_a_model_that_begins_in_shards_is_never_whole_on_the_device(cuda_ranks: Ranks) -> None:
    """In units of one block in float32: masters, moments and 16 bits of half of 12 blocks are 21."""
    for found in cuda_ranks(_begun, world_size=2):
        assert found < 21 + 9


def _lines(rank: int) -> tuple[dict[str, int], list[float], list[str]]:
    made = {"split_group": 0, "new_group": 0}

    def counted(name: str) -> Callable[..., Any]:
        make = getattr(dist, name)

        def count(*args: Any, **more: Any) -> Any:
            made[name] += 1
            return make(*args, **more)

        return count

    with pytest.MonkeyPatch.context() as patch:
        for name in made:
            patch.setattr(dist, name, counted(name))
        # Of a job's ranks. These processes have been ranks of other jobs, and not all of the same.
        patch.setattr("dslaunch.runtime.comm.mesh._numbers", itertools.count())
        mesh = make_mesh(shard_size=2)
        gathers = make_shard_axis(shard_size=2)
    sums, told = [], []
    for axis in (mesh.shard, mesh.replicate, gathers):
        value = torch.full((1,), 10.0**rank, device="cuda")
        dist.all_reduce(value, group=axis.group)
        sums.append(float(value))
        assert axis.group is not None
        told.append(axis.group.getGroupDesc())
        axis.without_group()
    return made, sums, told


def test_the_groups_of_an_axis_are_made_at_once(cuda_ranks: Ranks) -> None:
    found = cuda_ranks(_lines, world_size=4)
    assert [made for made, *_ in found] == [{"split_group": 3, "new_group": 0}] * 4
    assert [sums for _, sums, _ in found] == [
        [11, 101, 11],
        [11, 1010, 11],
        [1100, 101, 1100],
        [1100, 1010, 1100],
    ]
    (told,) = {tuple(told) for *_, told in found}  # as torch's reports call a group, on all ranks
    assert len(set(told)) == 3
    assert all(one.startswith("dslaunch:") for one in told)


# ---- what it waits for


def _counted(rank: int, stage: int, zero: dict[str, Any], depth: int) -> dict[str, Any]:
    model = make_model(partial(Blocks, WIDTH, depth))
    config = make_config(stage=stage, reduce_bucket_size=64, **BF16)
    config["zero_optimization"].update(zero)
    engine, *_ = dslaunch.initialize(model=model, config=config)
    own = torch.ones(2, WIDTH, dtype=torch.bfloat16, device=engine.device)
    for number in range(3):
        if number == 2:
            torch.cuda.synchronize()
            device().clear_counters()
        engine.backward(engine(own).float().pow(2).mean())
        engine.step()
    found = {"launches": device().launches(), "waits": device().host_waits(), "copies": device().copies()}
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_host_waits_for_the_device_once_a_step(cuda_ranks: Ranks, stage: int, world_size: int) -> None:
    """For the norm."""
    for found in cuda_ranks(_counted, stage, {}, 12, world_size=world_size):
        assert found["waits"] == {"copy to the host": 1}


@pytest.mark.parametrize(
    "feature",
    few(FEATURES, lambda one: one.name not in SELDOM),
    ids=lambda feature: feature.name,
)
def test_the_host_waits_in_a_step_for_what_the_page_says_and_no_more(
    cuda_ranks: Ranks, feature: Feature
) -> None:
    """The table "Host waits by feature" of docs/design/gpu.md has the reasons."""
    found = cuda_ranks(waits_of, feature.name, world_size=feature.num_ranks)
    assert found == [feature.waits] * feature.num_ranks


def test_the_norm_is_one_launch_however_many_units_there_are(cuda_ranks: Ranks) -> None:
    few, many = (cuda_ranks(_counted, 2, {}, depth, world_size=2)[0]["launches"] for depth in (3, 12))
    norms = [{name: n for name, n in found.items() if "norm" in name} for found in (few, many)]
    assert norms[0] == norms[1]


def _awaited(rank: int) -> list[list[str]]:
    """What the watchdog's thread would see each time that the host asks the device for numbers."""
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(stage=2, **BF16))
    step(engine)
    awaited: list[list[str]] = []
    read = Tensor.tolist

    def tolist(tensor: Tensor) -> Any:
        flights = engine._wire.recorder._under_way
        awaited.append([str(flight.label) for flight in flights if flight.is_awaited])
        return read(tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "tolist", tolist)
        step(engine)
    engine.destroy()
    return awaited


def test_while_the_host_waits_for_the_norm_the_oldest_collective_is_what_it_waits_for(
    cuda_ranks: Ranks,
) -> None:
    """NCCL's wait() returns at once, so that without it every rank would look as if it went on."""
    for awaited in cuda_ranks(_awaited, world_size=2):
        assert [len(labels) for labels in awaited] == [1]


# ---- what scripts do


def _with_default_device(rank: int, stage: int, zero: dict[str, Any], folder: str) -> None:
    torch.set_default_device("cuda")
    try:
        config = make_config(stage=stage, reduce_bucket_size=50, **BF16)
        config["zero_optimization"].update(
            {
                name: {**value, "nvme_path": folder} if value["device"] == "nvme" else value
                for name, value in zero.items()
            }
        )
        with torch.device("cpu"):
            model = make_model()
        engine, *_ = dslaunch.initialize(model=model, config=config)
        for number in range(2):
            step(engine, number)
        for sub_buffer in engine._model.trained:
            assert sub_buffer.optimizer_shard.master.device.type == "cpu"
        engine.save_checkpoint(folder)
        engine.load_checkpoint(folder)
        engine.destroy()
    finally:
        torch.set_default_device("cpu")


@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        (2, {"offload_optimizer": {"device": "cpu", "pin_memory": False}}),
        (2, {"offload_optimizer": PINNED}),
        (3, {"offload_param": PINNED, "offload_optimizer": PINNED}),
        (2, {"offload_optimizer": {"device": "nvme", "nvme_path": ""}}),
    ],
)
def test_what_is_offloaded_lies_in_host_memory_whatever_the_default_device_is(
    cuda_ranks: Ranks, tmp_path: Path, stage: int, zero: dict[str, Any]
) -> None:
    cuda_ranks(_with_default_device, stage, zero, str(tmp_path), world_size=2)


def _in_own_stream(rank: int, folder: str) -> None:
    """What the host copies or agrees on before the save begins waits for that stream in any case."""
    config = make_config(stage=3, reduce_bucket_size=50, checkpoint={"async_save": True}, **BF16)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        engine, *_ = dslaunch.initialize(model=make_model(), config=config)
        for number in range(3):
            step(engine, number)
            assert 0.0 < (engine.get_global_grad_norm() or 0.0) < 100.0
        saved = [sub_buffer.optimizer_shard.master.clone() for sub_buffer in engine._model.trained]
        engine.save_checkpoint(folder)
        step(engine, 4)
        engine.load_checkpoint(folder)
        for before, sub_buffer in zip(saved, engine._model.trained, strict=True):
            assert torch.equal(before, sub_buffer.optimizer_shard.master)
        engine.destroy()
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_save_beside_training_holds_what_was_trained_in_a_stream_of_the_programs_own(
    cuda_ranks: Ranks, tmp_path: Path, world_size: int
) -> None:
    cuda_ranks(_in_own_stream, str(tmp_path), world_size=world_size)


@dataclass
class ToBeWritten:
    """As save.py's Prepared; what it writes is kept."""

    all_runs: tuple[TensorRuns, ...]
    written: list[Tensor] = field(default_factory=list)
    rank: int = 1  # which logs nothing

    def write(self) -> None:
        """Of each shelf the one value."""
        self.written += [
            tensor_runs.flats()["x"] for tensor_runs in self.all_runs
        ]  # raises what the copy did


def _copied_in_another_thread(rank: int) -> bool:
    """Nothing but the event that `save` notes puts the program's stream and the copy in order: the host waits
    for neither in between. There are enough values for memory of their own, which is registered for this
    rank's device.
    """
    stream, values = torch.cuda.Stream(), torch.zeros(2000, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    saver: Any = Saver(Mock(spec=Collectives))
    with torch.cuda.stream(stream):
        values += 1
        prepared = ToBeWritten((replace(runs_of_tensors({"x": values}), exposed=frozenset()),))
        saver.save(prepared, is_async=True, begun_at=0.0)
        saver.close()
    torch.cuda.current_stream().wait_stream(stream)
    (copied,) = prepared.written
    return bool((copied == 1).all())


def test_the_copy_of_a_save_comes_after_what_the_programs_own_stream_was_told(cuda_ranks: Ranks) -> None:
    assert cuda_ranks(_copied_in_another_thread, world_size=2) == [True, True]


class Streams(TorchDispatchMode):
    """In which streams a thread copies from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[1].is_cuda:
            self.used.add(torch.cuda.current_stream().stream_id)
        return func(*args, **(kwargs or {}))


def _beside(rank: int, folder: str) -> set[int]:
    used: set[int] = set()
    take_rest = Snapshot.take_rest

    def seen(self: Snapshot) -> None:
        with Streams() as streams:
            take_rest(self)
        used.update(streams.used)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Snapshot, "take_rest", seen)
        _in_own_stream(rank, folder)
    return used


def test_a_save_beside_training_copies_in_streams_of_its_own(cuda_ranks: Ranks, tmp_path: Path) -> None:
    """In the default stream, with which a thread begins, they would stand between the kernels of training."""
    for used in cuda_ranks(_beside, str(tmp_path), world_size=2):
        assert used
        assert 0 not in used


class WithBuffers(nn.Module):
    """Of dtypes that NCCL does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 1)
        for dtype in (torch.int16, torch.uint16, torch.bool, torch.complex64):
            self.register_buffer(str(dtype).rpartition(".")[2], torch.ones(3).to(dtype))
        self.register_buffer("none", torch.empty(0, 4))
        self.register_buffer("one", torch.tensor(3, dtype=torch.int16))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.first(x)
        return result


def _buffers(rank: int) -> list[str]:
    model = make_model(WithBuffers)
    if rank == 1:
        for buffer in model.buffers():
            buffer.zero_()
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=1))
    step(engine)
    values = [str(buffer.cpu().tolist()) for buffer in engine.module.buffers()]
    engine.destroy()
    return values


def test_buffers_of_every_dtype_are_those_of_rank_0(cuda_ranks: Ranks) -> None:
    first, second = cuda_ranks(_buffers, world_size=2)
    assert first == second
    assert "[1, 1, 1]" in first


def _clipped(rank: int) -> float:
    params = [nn.Parameter(torch.ones(3, device="cuda"))]
    if rank == 0:
        params[0].grad = torch.full((3,), 2.0, device="cuda")
    return float(clip_grad_norm_(params, 1.0))


def test_a_rank_without_gradients_takes_part_in_their_norm(cuda_ranks: Ranks) -> None:
    first, second = cuda_ranks(_clipped, world_size=2)
    assert first == second > 0


def _with_rank_of_device(rank: int, folder: str) -> tuple[str, str]:
    """As a program that counts GPUs in its own way, and has `args.device_rank`."""
    bound = []
    begin = dist.init_process_group

    def init(*args: Any, device_id: Any = None, **more: Any) -> None:
        bound.append(str(device_id))
        begin(*args, device_id=device_id, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", init)
        dist.destroy_process_group()
        start_process_group(
            read_environment(),
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=2,
            device_index=1 - rank,
        )
    args = argparse.Namespace(device_rank=1 - rank)
    engine, *_ = dslaunch.initialize(args=args, model=make_model(), config=make_config(stage=2))
    step(engine)
    device_of_engine = str(engine.device)
    engine.destroy()
    torch.cuda.set_device(rank)
    device().forget_touched()  # the other rank's, as it was told
    return bound[0], device_of_engine


def test_the_group_is_bound_to_the_gpu_that_the_arguments_name(cuda_ranks: Ranks, tmp_path: Path) -> None:
    found = cuda_ranks(_with_rank_of_device, str(tmp_path), world_size=2)
    assert found == [("cuda:1", "cuda:1"), ("cuda:0", "cuda:0")]


def _norm_of_small(rank: int, wire: str | None) -> float:
    """Rank 0 has a gradient of 1, and each of the others less than a 16-bit sum with it can show."""
    more = {} if wire is None else {"communication_data_type": wire}
    config = make_config(stage=2, bf16={"enabled": True}, train_batch_size=dist.get_world_size(), **more)
    engine, *_ = dslaunch.initialize(model=nn.Linear(1, 1, bias=False), config=config)
    own = torch.full((1, 1), 1.0 if rank == 0 else 2.0**-9, dtype=torch.bfloat16, device=engine.device)
    engine.backward(engine(own).sum())
    engine.step()
    norm = engine.get_global_grad_norm()
    engine.destroy()
    assert norm is not None
    return norm


def test_gradients_of_16_bits_are_averaged_in_float32_if_the_config_says_so(cuda_ranks: Ranks) -> None:
    """NCCL rounds at every hop to what is sent; gloo's sums are in float32 in any case."""
    exact = (1 + 3 * 2.0**-9) / 4
    assert cuda_ranks(_norm_of_small, "fp32", world_size=4) == [exact] * 4
    assert all(abs(norm - exact) > 1e-4 for norm in cuda_ranks(_norm_of_small, None, world_size=4))


def _graphs(rank: int, stage: int) -> str:
    engine, *_ = dslaunch.initialize(
        model=make_model(), config=make_config(stage=stage, reduce_bucket_size=50)
    )
    try:
        engine.compile(backend="eager", compile_kwargs={"mode": "reduce-overhead"})
    except dslaunch.ConfigError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_cuda_graphs_of_gathered_parameters_are_refused(cuda_ranks: Ranks) -> None:
    assert "CUDA graphs record addresses" in cuda_ranks(_graphs, 3, world_size=2)[0]
    assert cuda_ranks(_graphs, 2, world_size=2)[0] == ""


def _written(rank: int, stage: int) -> tuple[list[str], bool]:
    """A program that writes through `.data` after every step, from the second on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dslaunch").addHandler(handler)
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(stage=stage, **BF16))
    first = engine.module.first.weight
    for number in range(34):
        step(engine, number)
        if number > 1:
            first.data[0, 0] = 3.0
    master = dslaunch.zero.safe_get_full_fp32_param(first)
    logging.getLogger("dslaunch").removeHandler(handler)
    engine.destroy()
    assert master is not None
    return [text for text in said if ".data" in text], abs(float(master[0, 0]) - 3.0) < 0.1


def test_writes_through_data_are_found_though_the_host_does_not_wait(cuda_ranks: Ranks) -> None:
    (said, is_taken), (_, is_taken_there) = cuda_ranks(_written, 2, world_size=2)
    assert len(said) == 1
    assert "was written through .data" in said[0]
    assert is_taken
    assert is_taken_there


def _beside_a_comparison(rank: int, stage: int) -> list[int]:
    """The most bytes that comparing the values of a unit takes, the first time and later."""
    model = nn.Linear(256, 256, bias=False)  # 65,536 elements
    engine, *_ = dslaunch.initialize(model=model, config=make_config(stage=stage, **BF16))
    (sub_buffer,) = engine._model.trained
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writes, "PIECE_NUMEL", PIECE)
        for _ in range(2):
            sub_buffer.param_shard.writes.must_compare = True
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            sub_buffer.take_writes()
            found.append(torch.cuda.max_memory_allocated() - before)
    assert sub_buffer.param_shard.writes.is_known
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1])
def test_to_compare_values_takes_no_memory_that_grows_with_a_unit(cuda_ranks: Ranks, stage: int) -> None:
    """The formula of memory has nothing for it."""
    for first, later in cuda_ranks(_beside_a_comparison, stage, world_size=2):
        assert first <= 10 * PIECE  # something that lived until then may have gone meanwhile
        assert 0 < later <= 10 * PIECE + 64 * 512  # an answer of each piece, in a block of the allocator


def _both_ways(rank: int) -> tuple[bool, bool]:
    """Whether a copy to the device waits for an earlier one to the host, on the host."""
    there, back = torch.ones(1000, device="cuda"), torch.empty(1000, pin_memory=True)
    here, target = torch.ones(1000, pin_memory=True), torch.empty(1000, device="cuda")
    to_host = Arrival(there, back)
    to_device = Arrival(here, target)
    to_device.wait()
    is_waited_for = to_host.is_done
    to_host.wait()
    return is_waited_for, bool((back == 1).all()) and bool((target == 1).all())


def test_copies_in_one_direction_do_not_wait_for_those_in_the_other(cuda_ranks: Ranks) -> None:
    assert cuda_ranks(_both_ways, world_size=1) == [(False, True)]
