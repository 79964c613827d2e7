"""The fake CUDA device finds what would go wrong on a true one: each test plants a fault, and does it rightly
beside it.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dslaunch.runtime.comm.collectives import reduce_scatter_single
from tests.fake_cuda.message_queue import EAGER_ENV
from tests.fake_cuda.ranks import ROOT
from tests.fake_cuda.torch_cuda import device, num_visible
from tests.runtime.ranks import RankFailed, Ranks

UNORDERED = "nothing has put the two in order"
N = 1000
EVERYWHERE = "tests/fake_cuda/everywhere"


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
        assert device().touched() == {0: "its own", 1: "memory"}
        device().forget_touched()
        assert (here + torch.tensor(1.0)).sum().item() == 2 * N


def test_tensors_of_two_devices_do_not_meet(cuda_ranks: Ranks) -> None:
    cuda_ranks(_devices, world_size=2)


def _asked_for(what: str) -> Any:
    """Have something of the current device."""
    if what == "memory":
        return torch.empty(N, device="cuda")
    if what == "a stream":
        return torch.cuda.Stream()
    if what == "an event":
        return torch.cuda.current_stream().record_event()
    if what == "a wait for all":
        return torch.cuda.synchronize()
    if what == "a question for the free memory":
        return torch.cuda.mem_get_info()
    if what == "a registration of host memory":
        pages = mmap.mmap(-1, mmap.PAGESIZE)
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        torch.cuda.cudart().cudaHostRegister(address, mmap.PAGESIZE, 0)
        return torch.cuda.cudart().cudaHostUnregister(address)
    values = torch.ones(N, device=f"cuda:{os.environ['RANK']}")
    if what == "a copy":
        return values.to("cuda")
    assert what == "a collective"  # which is done where its values are
    return dist.all_reduce(values)


KINDS = (
    "memory", "a stream", "an event", "a wait for all", "a question for the free memory",
    "a registration of host memory", "a copy",
)  # fmt: skip


def _touched(rank: int) -> dict[str, list[dict[int, str]]]:
    """Return which devices a new thread has touched by each, as it begins and on this rank's device."""
    found: dict[str, list[dict[int, str]]] = {}

    def in_thread(what: str) -> None:
        device().forget_touched()
        _asked_for(what)
        found.setdefault(what, []).append(device().touched())

    def on_own(what: str) -> None:
        with torch.cuda.device(rank):
            in_thread(what)

    for what in (*KINDS, "a collective"):
        for run in (in_thread, on_own):
            thread = threading.Thread(target=run, args=(what,))
            thread.start()
            thread.join()
    device().forget_touched()
    device().captures.broken_by.clear()  # these threads are not the runtime's
    return found


def test_a_new_thread_begins_on_the_first_device(cuda_ranks: Ranks) -> None:
    """Whatever it asks for makes a context there, unless it chooses its own rank's first."""
    found = cuda_ranks(_touched, world_size=2)[1]
    assert {what: len(devices) for what, devices in found.items()} == dict.fromkeys(
        (*KINDS, "a collective"), 2
    )
    for what, (at_first, on_own) in found.items():
        assert (0 in at_first) == (what != "a collective"), (what, at_first)
        assert [*on_own] == [1], (what, on_own)


def _in_a_thread(rank: int) -> None:
    thread = threading.Thread(target=torch.cuda.Stream)
    thread.start()
    thread.join()


def test_a_rank_that_touches_the_device_of_another_fails(cuda_ranks: Ranks) -> None:
    text = r"rank 1 has touched devices of others, each first by \{0: 'a stream, in a thread of its own'\}"
    with pytest.raises(RankFailed, match=text):
        cuda_ranks(_in_a_thread, world_size=2)


FORKS = """
import os
import torch

def fork(answer):
    child = os.fork()
    if child == 0:
        print(answer(), flush=True)
        os._exit(0)
    os.waitpid(child, 0)

def with_slices():
    os.environ["CUDA_VISIBLE_DEVICES"] = "MIG-a,MIG-b"
    return torch.cuda.device_count(), torch.cuda._is_in_bad_fork()

def used():
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        return torch.cuda._is_in_bad_fork(), "Cannot re-initialize CUDA in forked subprocess" in str(error)

fork(torch.cuda._is_in_bad_fork)
fork(with_slices)
print(torch.cuda.device_count(), flush=True)
fork(used)
torch.ones(1, device="cuda")
fork(used)
"""


def test_a_child_that_is_forked_once_devices_were_asked_for_cannot_use_them(cuda_ranks: Ranks) -> None:
    """And a process sees one slice of a divided GPU."""
    environ = {**os.environ, "FAKE_CUDA_DEVICES": "4", "PYTHONPATH": f"{ROOT}:{ROOT / EVERYWHERE}"}
    environ.pop("CUDA_VISIBLE_DEVICES", None)
    said = subprocess.run(
        [sys.executable, "-c", FORKS], env=environ, capture_output=True, text=True, check=True, timeout=120
    )
    assert said.stdout.split("\n")[:5] == ["False", "(1, False)", "4", "(True, True)", "(True, True)"]


@pytest.mark.parametrize(
    ("given", "count"),
    [
        (None, 4), ("", 0), ("2", 1), ("0,3,1", 3), ("0,7,1", 1), ("-1,0", 0), ("MIG-a", 1),
        ("MIG-a,MIG-b", 1),
    ],
)  # fmt: skip
def test_cuda_visible_devices_says_how_many_there_are(
    monkeypatch: pytest.MonkeyPatch, given: str | None, count: int
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert num_visible(4) == count


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


CIRCLE = [(0, 2), (0, 1), (1, 2)]  # messages: who sends, and who receives
ORDERS = [[(0, 2), (0, 1)], [(0, 1), (1, 2)], [(1, 2), (0, 2)]]  # in which each rank issues its own


def _send_in_a_circle(rank: int, kind: str) -> None:
    groups: dict[tuple[int, int], Any] = dict.fromkeys(CIRCLE)
    if kind == "a group that is not bound to a device":
        group = dist.new_group(device_id=None)
        assert group is not None
        group.bound_device_id = None
        groups = dict.fromkeys(CIRCLE, group)
    if kind == "a group for each two":
        groups = {pair: dist.new_group([*pair]) for pair in CIRCLE}
    messages = []
    for pair in ORDERS[rank]:
        values = torch.full((N,), 10.0 * pair[0] + pair[1] if rank == pair[0] else 0.0, device="cuda")
        messages.append((pair, values))
    operations = [
        dist.P2POp(dist.isend, values, pair[1], group=groups[pair])
        if rank == pair[0]
        else dist.P2POp(dist.irecv, values, pair[0], group=groups[pair])
        for pair, values in messages
    ]
    if kind == "a batch":
        works = dist.batch_isend_irecv(operations)
    else:
        works = [one.op(one.tensor, one.peer, group=one.group) for one in operations]
    for work in works:
        work.wait()
    for pair, values in messages:
        assert values.eq(10.0 * pair[0] + pair[1]).all()


@pytest.mark.parametrize("kind", ["a group for each two", "a group that is not bound to a device", "a batch"])
def test_messages_in_a_circle_arrive_if_none_holds_up_another(cuda_ranks: Ranks, kind: str) -> None:
    cuda_ranks(_send_in_a_circle, kind, world_size=3)


def test_messages_of_one_group_hold_each_other_up_without_end(cuda_ranks: Ranks) -> None:
    """As on NCCL, in whose streams large ones end when both sides have come to them."""
    with pytest.raises(RankFailed) as raised:
        cuda_ranks(_send_in_a_circle, "one group", world_size=3)
    said = str(raised.value)
    assert "ranks wait for each other's messages without end" in said
    for rank, message in [(0, "sends rank 2"), (1, "receives from rank 0"), (2, "receives from rank 1")]:
        assert f"rank {rank} {message} 4000 bytes, message 1 between the two" in said


def _send_little_in_a_circle(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(EAGER_ENV, str(4 * N))
        _send_in_a_circle(rank, "one group")


def test_messages_that_fit_into_nccl_s_buffers_hold_up_none(cuda_ranks: Ranks) -> None:
    cuda_ranks(_send_little_in_a_circle, world_size=3)


def _not_sent(rank: int) -> None:
    values = torch.ones(N, device="cuda")
    if rank == 0:
        dist.recv(values, 1)
    else:
        dist.recv(values, 0)


def test_ranks_that_both_receive_wait_without_end(cuda_ranks: Ranks) -> None:
    with pytest.raises(RankFailed, match=r"rank 0 receives from rank 1 .* which rank 1 has not asked for"):
        cuda_ranks(_not_sent, world_size=2)


def _not_received(rank: int) -> None:
    if rank == 0:
        dist.isend(torch.ones(N, device="cuda"), 1)


def test_a_message_that_is_never_received_is_told_at_the_end(cuda_ranks: Ranks) -> None:
    message = r"rank 0 sends rank 1 4000 bytes, message 1 between the two on stream 'all ranks'"
    text = f"{message}, which rank 1 has not asked for"
    with pytest.raises(RankFailed, match=text):
        cuda_ranks(_not_received, world_size=2)


def _memory(rank: int) -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    values = torch.empty(N, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4096
    assert "GPU reserved memory" in torch.cuda.memory_summary()
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


WAITS: list[tuple[str, Callable[[Tensor], object], int]] = [
    ("add", lambda x: x + 1, 0),
    ("item", lambda x: x.sum().item(), 1),
    ("bool", lambda x: bool((x > 1).any()), 1),
    ("equal", lambda x: torch.equal(x, x), 1),
    ("tolist", lambda x: x.tolist(), 1),
    ("to the host", lambda x: x.cpu(), 1),
    ("to the host, pinned", lambda x: torch.empty(N, pin_memory=True).copy_(x, non_blocking=True), 0),
    ("a value", lambda x: torch.tensor(1.0, device=x.device), 1),
    ("a value that is filled in", lambda x: torch.full((), 1.0, device=x.device), 0),
    ("values", lambda x: x.new_tensor([1.0, 2.0]), 1),
    ("values, pinned", lambda x: torch.ones(2, pin_memory=True).to(x.device, non_blocking=True), 0),
    ("nonzero", lambda x: x.nonzero(), 1),
    ("where", lambda x: torch.where(x > 1), 1),
    ("a mask", lambda x: x[x > 1], 1),
    ("a mask to write to", lambda x: x.clone().index_put_((x > 0,), x), 1),
    ("a mask to fill in", lambda x: x.clone().masked_fill_(x > 1, 0.0), 0),
    ("numbers as an index", lambda x: x[torch.arange(3, device=x.device)], 0),
    ("masked_select", lambda x: x.masked_select(x > 1), 1),
    ("unique", lambda x: x.unique(), 1),
    ("repeat_interleave", lambda x: x.repeat_interleave(x.long()), 2),
    ("of known size", lambda x: x.repeat_interleave(x.long(), output_size=N), 0),
    ("as often each", lambda x: x.repeat_interleave(2), 0),
    ("bincount", lambda x: x.long().bincount(minlength=4), 2),
    ("one_hot", lambda x: torch.nn.functional.one_hot(x.long(), 4), 0),
]


def _waits(rank: int) -> dict[str, int]:
    values, found = torch.ones(N, device="cuda"), {}
    for name, work, _ in WAITS:
        torch.cuda.synchronize()
        device().clear_counters()
        kept = work(values)
        found[name] = sum(device().host_waits().values())
        torch.cuda.synchronize()
        del kept
    return found


def test_the_host_waits_where_it_needs_values_and_nowhere_else(cuda_ranks: Ranks) -> None:
    """As torch's kernels for CUDA have it."""
    assert cuda_ranks(_waits, world_size=1) == [{name: number for name, _, number in WAITS}]


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
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.rand(N, device="cuda", generator=torch.Generator())


def test_the_device_has_random_numbers_of_its_own(cuda_ranks: Ranks) -> None:
    cuda_ranks(_random_numbers, world_size=1)
