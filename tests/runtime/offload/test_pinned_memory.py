"""Page-locked memory is what was asked for, is used again, and not before copies are done with it."""

from __future__ import annotations

import gc
import mmap
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dslaunch
from dslaunch.runtime.offload.device_copies import Arrival
from dslaunch.runtime.offload.pinned_memory import PINNED_MEMORY, PinnedMemory, host_empty
from dslaunch.runtime.step.host_update import make_thread
from tests.fake_cuda.torch_cuda import device
from tests.runtime.models import Blocks, make_config, make_model
from tests.runtime.ranks import Ranks

N = 5000
WIDTH, DEPTH = 65, 8  # two ranks' shards of a unit in float32 are a little more than 8 KiB
BYTES = 5 * mmap.PAGESIZE  # of N elements of float32


def pinned() -> int:
    """Bytes of it on this machine, torch's own included."""
    return int(device().memory(torch.cuda.current_device())["pinned"])


def _trained(rank: int, stage: int, zero: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of the tensors in pinned memory, and of the memory itself at its peak."""
    before = pinned()
    torch.cuda.reset_peak_memory_stats()
    config = make_config(stage=stage, reduce_bucket_size=64, bf16={"enabled": True})
    config["zero_optimization"].update(zero)
    engine, *_ = dslaunch.initialize(model=make_model(partial(Blocks, WIDTH, DEPTH)), config=config)
    own = torch.ones(2, WIDTH, dtype=torch.bfloat16, device=engine.device)
    for _ in range(3):
        engine.backward(engine(own).float().pow(2).mean())
        engine.step()
    held = 0
    for sub_buffer in engine._model.trained:
        shard = sub_buffer.optimizer_shard
        tensors = [*shard.held(), *sub_buffer.gradients.held(), sub_buffer.param_shard.kept]
        tensors.append(sub_buffer.gradients._landed)  # type: ignore[attr-defined]
        for tensor in {id(one): one for one in tensors}.values():
            assert tensor.numel() == 0 or tensor.is_cuda or tensor.is_pinned()
            held += 0 if tensor.is_cuda else tensor.nbytes
    at_most = int(device().memory(rank)["peak_pinned"]) - before
    engine.destroy()
    return held, at_most


@pytest.mark.parametrize(("stage", "more"), [(2, {}), (3, {"offload_param": {"device": "cpu"}})])
def test_offloading_takes_the_pinned_memory_of_its_tensors(
    cuda_ranks: Ranks, stage: int, more: dict[str, Any]
) -> None:
    """A page more for each of five tensors of a unit, and rounded parameters of three units in a step."""
    zero = {"offload_optimizer": {"device": "cpu"}, **more}  # pinned unless the config says otherwise
    shard = (WIDTH + 1) * WIDTH / 2
    units = DEPTH
    for held, at_most in cuda_ranks(_trained, stage, zero, world_size=2):
        assert held >= units * shard * (12 + 2)
        assert at_most <= held + 3 * 2 * shard + (5 * units + 3) * mmap.PAGESIZE


def _not_pinned(rank: int) -> int:
    before = pinned()
    torch.cuda.reset_peak_memory_stats()
    config = make_config(stage=2, bf16={"enabled": True})
    config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
    dslaunch.initialize(model=make_model(partial(Blocks, WIDTH, DEPTH)), config=config)[0].destroy()
    return int(device().memory(rank)["peak_pinned"]) - before


def test_memory_that_the_config_says_is_not_pinned_is_not(cuda_ranks: Ranks) -> None:
    assert cuda_ranks(_not_pinned, world_size=1) == [0]


def _again(rank: int) -> None:
    memory = PinnedMemory()
    first = memory.take(BYTES - 100)
    assert first.is_pinned()
    assert first.data_ptr() % mmap.PAGESIZE == 0
    assert first.untyped_storage().nbytes() == first.numel() == BYTES - 100
    address = first.data_ptr()
    part = first[5:].view(torch.uint8)
    del first
    assert memory.take(BYTES).data_ptr() != address  # a view is left
    del part
    assert memory.num_bytes == 2 * BYTES
    kept = [memory.take(BYTES), memory.take(BYTES - 5)]
    assert address in {one.data_ptr() for one in kept}
    assert memory.num_bytes == 2 * BYTES
    for one in kept:
        one.fill_(rank)
    assert memory.take(100).is_pinned()  # less than a page is torch's
    assert memory.take(0).numel() == 0
    assert memory.num_bytes == 2 * BYTES


def test_freed_memory_is_used_again(cuda_ranks: Ranks) -> None:
    cuda_ranks(_again, world_size=1)


def _while_copied(rank: int) -> None:
    there = torch.empty(N, device="cuda")
    host = host_empty((N,), torch.float32, pin_memory=True).fill_(3.0)
    address = host.data_ptr()
    arrival = Arrival(host, there)
    arrival.wait_on_device()
    del host, arrival
    gc.collect()
    other = host_empty((N,), torch.float32, pin_memory=True).fill_(5.0)
    assert other.data_ptr() != address
    assert there.sum().item() == 3.0 * N
    arrival = Arrival(there, other)  # while it is under way its target ends
    address = other.data_ptr()
    del other
    assert host_empty((N,), torch.float32, pin_memory=True).data_ptr() != address
    arrival.wait()
    torch.cuda.synchronize()
    assert dist.get_rank() == rank


def test_memory_that_a_copy_uses_is_not_used_again(cuda_ranks: Ranks) -> None:
    cuda_ranks(_while_copied, world_size=1)


def _given_up(rank: int) -> None:
    before = pinned()
    memory = PinnedMemory()
    sizes = [2**26 + number * 2**24 for number in range(8)]
    for size in sizes:  # each larger than the one before, so none is used again
        memory.take(size)
    assert sum(sizes) > memory.num_bytes == pinned() - before
    assert memory.num_bytes <= 2**28 + sizes[-1]


def test_memory_that_is_not_used_again_is_given_back(cuda_ranks: Ranks) -> None:
    cuda_ranks(_given_up, world_size=1)


def _not_lockable(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *_: 801)
        memory = PinnedMemory()
        assert memory.take(BYTES).is_pinned()
        assert memory.num_bytes == 0


def test_where_pages_cannot_be_locked_memory_is_torch_s(cuda_ranks: Ranks) -> None:
    cuda_ranks(_not_lockable, world_size=1)


def _taken_by_the_thread_that_steps(rank: int) -> None:
    with make_thread(torch.device("cuda", rank)) as thread:
        take = partial(host_empty, (N,), torch.float32, pin_memory=True)
        assert thread.submit(take).result().is_pinned()


def test_the_thread_that_steps_in_host_memory_locks_pages_for_the_ranks_own_gpu(cuda_ranks: Ranks) -> None:
    """Ranks of the fake device fail if they touch another's, or would break the capture of a CUDA graph."""
    cuda_ranks(_taken_by_the_thread_that_steps, world_size=2)


def test_without_a_device_host_memory_is_plain() -> None:
    assert not host_empty((3, 5), torch.bfloat16, pin_memory=False).is_pinned()
    assert PINNED_MEMORY.num_bytes == 0
