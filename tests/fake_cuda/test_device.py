"""The fake CUDA device finds what would go wrong on a true one: each test plants a fault, and does it rightly
beside it.
"""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from dslaunch.runtime.comm.collectives import reduce_scatter_single
from tests.fake_cuda.torch_cuda import device
from tests.runtime.ranks import Ranks

UNORDERED = "nothing has put the two in order"
N = 1000


def conflict() -> pytest.RaisesExc[RuntimeError]:
    """The next thing to happen is found to be in conflict with an earlier one."""
    return pytest.raises(RuntimeError, match=UNORDERED)


def side_stream() -> torch.cuda.Stream:
    """One that comes after all that there is."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def _touched_by_the_host(rank: int) -> int:
    values = torch.ones(N, device="cuda")
    child = os.fork()
    if child == 0:
        os.close(2)
        device().peek(values)
        os._exit(0)
    return os.waitpid(child, 0)[1] & 127


def test_the_host_cannot_touch_the_memory_of_the_device(cuda_ranks: Ranks) -> None:
    assert cuda_ranks(_touched_by_the_host, world_size=1) == [signal.SIGSEGV]


def _read_too_early(rank: int) -> None:
    host, values = torch.ones(N, pin_memory=True), torch.empty(N, device="cuda")
    stream = side_stream()
    with torch.cuda.stream(stream):
        values.copy_(host, non_blocking=True)
    with conflict():
        values + 1
    torch.cuda.current_stream().wait_stream(stream)
    assert (values + 1).sum().item() == 2 * N
    device().clear_conflicts()


def test_the_device_reads_what_another_stream_still_copies(cuda_ranks: Ranks) -> None:
    cuda_ranks(_read_too_early, world_size=1)


def _copied_too_early(rank: int) -> None:
    host, stream = torch.empty(N, pin_memory=True), torch.cuda.Stream()
    values = torch.ones(N, device="cuda") * 3
    with torch.cuda.stream(stream), conflict():
        host.copy_(values, non_blocking=True)  # the product may not be there yet
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        host.copy_(values, non_blocking=True)
    stream.synchronize()
    assert host.sum().item() == 3 * N
    device().clear_conflicts()


def test_a_copy_begins_before_its_values_are_there(cuda_ranks: Ranks) -> None:
    """Every order of execution but one would hide it."""
    cuda_ranks(_copied_too_early, world_size=1)


def _computed_elsewhere(rank: int) -> None:
    own = torch.cuda.Stream()  # as a program that trains in a stream of its own
    values = torch.zeros(N, device="cuda")
    own.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(own):
        values += 1
    with conflict():
        values.clone()
    torch.cuda.current_stream().wait_stream(own)
    assert values.clone().sum().item() == N
    device().clear_conflicts()


def test_a_stream_of_the_programs_own_is_not_waited_for(cuda_ranks: Ranks) -> None:
    cuda_ranks(_computed_elsewhere, world_size=1)


def _not_recorded(rank: int) -> None:
    host, values = torch.ones(N, pin_memory=True), torch.empty(N, device="cuda")
    stream, never, before, after = side_stream(), *(torch.cuda.Event() for _ in range(3))
    with torch.cuda.stream(stream):
        before.record()
        values.copy_(host, non_blocking=True)
    for event in (never, before):
        event.wait()  # in the current stream
        event.synchronize()  # on the host
        assert event.query()
        with conflict():
            values.clone()
    after.record(stream)
    after.wait()
    assert values.clone().sum().item() == N
    device().clear_conflicts()


def test_an_event_that_was_recorded_before_the_copy_or_never_puts_nothing_in_order(cuda_ranks: Ranks) -> None:
    cuda_ranks(_not_recorded, world_size=1)


def _host_too_early(rank: int) -> None:
    host, values = torch.zeros(N, pin_memory=True), torch.ones(N, device="cuda")
    for stream in (side_stream(), torch.cuda.current_stream()):
        with torch.cuda.stream(stream):
            host.copy_(values, non_blocking=True)
        assert host.isnan().all()
        stream.synchronize()
        assert host.sum().item() == N


def test_the_host_reads_what_is_still_copied_and_sees_nan(cuda_ranks: Ranks) -> None:
    cuda_ranks(_host_too_early, world_size=1)


def _host_changes(rank: int) -> None:
    host, values = torch.ones(N, pin_memory=True), torch.empty(N, device="cuda")
    for stream in (side_stream(), torch.cuda.current_stream()):
        with torch.cuda.stream(stream):
            values.copy_(host, non_blocking=True)
        host += 1
        with pytest.raises(RuntimeError, match="the host changed 4000 bytes of pinned memory"):
            stream.synchronize()
        stream.synchronize()
        device().clear_conflicts()
    values.copy_(host)  # which waits
    host += 1
    torch.cuda.synchronize()


def test_the_host_changes_what_a_copy_still_reads(cuda_ranks: Ranks) -> None:
    cuda_ranks(_host_changes, world_size=1)


def _freed_too_early(rank: int) -> None:
    host, stream = torch.empty(N, pin_memory=True), side_stream()
    values = torch.ones(N, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        host.copy_(values, non_blocking=True)
    del values
    with conflict():
        torch.full((N,), 7.0, device="cuda")  # gets the memory
    torch.cuda.synchronize()
    assert host.isnan().all()
    device().clear_conflicts()

    values = torch.ones(N, device="cuda")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        host.copy_(values, non_blocking=True)
    values.record_stream(stream)
    del values
    torch.full((N,), 7.0, device="cuda")
    torch.cuda.synchronize()
    assert host.sum().item() == N


def test_memory_is_freed_while_a_copy_reads_it(cuda_ranks: Ranks) -> None:
    cuda_ranks(_freed_too_early, world_size=1)


def _freed_in_order(rank: int) -> None:
    own = side_stream()
    with torch.cuda.stream(own):
        values = torch.ones(N, device="cuda")
        copied = torch.empty(N, device="cuda")
        copied.copy_(values)
        del values
        torch.full((N,), 7.0, device="cuda")  # gets the memory, later in the same stream
        assert copied.sum().item() == N


def test_memory_may_be_freed_before_its_own_stream_has_read_it(cuda_ranks: Ranks) -> None:
    """As torch's allocator has it, which gives it to no other stream."""
    cuda_ranks(_freed_in_order, world_size=1)


def _two_copies(rank: int) -> None:
    host, values = torch.empty(N, pin_memory=True), torch.ones(N, device="cuda")
    first, second = side_stream(), side_stream()
    with torch.cuda.stream(first):
        host.copy_(values, non_blocking=True)
    with torch.cuda.stream(second), conflict():
        torch.empty(N, device="cuda").copy_(host, non_blocking=True)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        back = torch.empty(N, device="cuda")
        back.copy_(host, non_blocking=True)
    second.synchronize()
    assert back.sum().item() == N
    device().clear_conflicts()


def test_a_copy_reads_host_memory_that_another_still_writes(cuda_ranks: Ranks) -> None:
    cuda_ranks(_two_copies, world_size=1)


class Operators(TorchDispatchMode):
    """Those that this thread calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _watched(rank: int) -> list[str]:
    host, values = torch.empty(N, pin_memory=True), torch.ones(N, device="cuda")
    stream = side_stream()
    with Operators() as operators:
        with torch.cuda.stream(stream):
            host.copy_(values, non_blocking=True)
        stream.synchronize()
    assert host.sum().item() == N
    return operators.names


def test_what_the_device_does_late_asks_no_mode_of_python_s(cuda_ranks: Ranks) -> None:
    """It is done under a lock, which another thread may want that holds Python's."""
    assert cuda_ranks(_watched, world_size=1) == [["aten.copy_.default"]]


def _devices(rank: int) -> None:
    if rank == 0:
        here, there = torch.ones(N, device="cuda:0"), torch.ones(N, device="cuda:1")
        with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
            here + there
        with pytest.raises(RuntimeError, match="cuda:0 and cpu"):
            here + torch.ones(N)
        with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
            torch.ones(1, device="cuda:2")
        assert (here + there.to("cuda:0")).sum().item() == 2 * N
        assert (here + torch.tensor(1.0)).sum().item() == 2 * N


def test_tensors_of_two_devices_do_not_meet(cuda_ranks: Ranks) -> None:
    cuda_ranks(_devices, world_size=2)


def _collective(rank: int) -> None:
    values = torch.full((N,), float(rank + 1), device="cuda")
    work = dist.all_reduce(values, async_op=True)
    assert work is not None
    with conflict():
        values.clone()
    work.wait()
    assert not work.is_completed()  # the host has waited for nothing
    assert values.sum().item() == 3 * N
    assert work.is_completed()
    device().clear_conflicts()
    sent = torch.ones(N, device="cuda")
    work = dist.all_reduce(sent, async_op=True)
    with conflict():
        sent.zero_()
    assert work is not None
    work.wait()
    device().clear_conflicts()


def test_the_result_of_a_collective_is_used_before_it_is_there(cuda_ranks: Ranks) -> None:
    cuda_ranks(_collective, world_size=2)


def _rounded(rank: int) -> tuple[float, float]:
    """1 and three times a quarter of the last place: lost one by one, and not if they are added first."""
    values = torch.full((4,), 1.0 if rank == 0 else 2.0**-9, dtype=torch.bfloat16, device="cuda")
    own = torch.empty(1, dtype=torch.bfloat16, device="cuda")
    reduce_scatter_single(own, values.clone())
    dist.all_reduce(values)
    return float(own), float(values[0])


def test_sums_of_16_bits_are_rounded_at_each_hop(cuda_ranks: Ranks) -> None:
    found = cuda_ranks(_rounded, world_size=4)
    assert [one for _, one in found] == [1.0] * 4
    assert {one for one, _ in found} == {1.0, 1.0 + 2.0**-7}


def _memory(rank: int) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    values = torch.empty(N, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4096
    del values
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 4096
    device().set_capacity(rank, torch.cuda.memory_reserved() + 2**20)
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory\. Tried to allocate 4194304 bytes"):
        torch.empty(2**20, device="cuda")
    device().set_capacity(rank, 2**36)


def test_memory_is_counted_and_has_an_end(cuda_ranks: Ranks) -> None:
    cuda_ranks(_memory, world_size=1)


def _counted(rank: int) -> None:
    host, values = torch.ones(N), torch.ones(N, device="cuda")
    torch.cuda.synchronize()
    device().clear_counters()
    values.add_(1)
    values.copy_(host.pin_memory(), non_blocking=True)
    counted = device().launches(), device().host_waits()
    assert counted == ({"aten::add": 1}, {}), counted
    torch.tensor(1.0, device="cuda")
    float(values.sum())
    assert device().host_waits() == {"copy from pageable memory": 1, "aten::_local_scalar_dense": 1}
    assert device().copies() == {"host to device": (2, 4 * N + 4)}


def test_launches_waits_and_copies_are_counted(cuda_ranks: Ranks) -> None:
    cuda_ranks(_counted, world_size=1)


def _said_to_wait(rank: int) -> list[int]:
    values = torch.ones(N, device="cuda")
    found = []
    for mode in ("default", "warn"):
        torch.cuda.set_sync_debug_mode(mode)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            values.add_(1)
            values.sum().item()
            values.cpu()
            torch.cuda.current_stream().synchronize()
            found.append(len(said))
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        values.sum().item()
    torch.cuda.set_sync_debug_mode("default")
    return found


def test_the_device_says_when_the_host_waits_for_it(cuda_ranks: Ranks) -> None:
    assert cuda_ranks(_said_to_wait, world_size=1) == [[0, 3]]


def _random_numbers(rank: int) -> None:
    torch.manual_seed(7)
    first = torch.rand(N, device="cuda")
    torch.rand(N)
    state = torch.cuda.get_rng_state()
    second = torch.rand(N, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(second, torch.rand(N, device="cuda"))
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(N, device="cuda"))


def test_the_device_has_random_numbers_of_its_own(cuda_ranks: Ranks) -> None:
    cuda_ranks(_random_numbers, world_size=1)
