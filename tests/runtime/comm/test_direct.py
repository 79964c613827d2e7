"""Chunks that ranks send each other over gloo: where they lie, and what memory that takes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dslaunch.runtime.comm import direct
from dslaunch.runtime.comm.direct import Scratch, send_chunks, send_to_all
from dslaunch.runtime.comm.mesh import Axis
from dslaunch.runtime.comm.process_group import destroy_group
from tests.runtime.comm.watchdog.test_watchdog import wait_until
from tests.runtime.ranks import Ranks

MB = 2**20
LATE_S = 1.0  # for what must not come; it came within hundredths of it


def _axis(rank: int) -> Axis:
    return Axis(size=dist.get_world_size(), index=rank, group=None)


def _two_at_once(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All begin them in the same order, and end them in another one."""
    axis = _axis(rank)
    gathered, received = torch.empty(axis.size), torch.empty(2 * (axis.size - 1), dtype=torch.bfloat16)
    sent = (100.0 * rank + torch.arange(2 * axis.size)).to(torch.bfloat16)
    first = send_to_all(torch.full((1,), float(rank)), gathered, axis, lane=0)
    second = send_chunks(sent, received, axis, lane=0)
    for work in (second, first) if rank else (first, second):
        assert not work.is_completed()
        work.wait()
        work.wait()  # with comms_logger each is waited for twice
        assert work.is_completed()
    return gathered, received


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_chunks_come_to_their_places(ranks: Ranks, world_size: int) -> None:
    for rank, (gathered, received) in enumerate(ranks(_two_at_once, world_size=world_size)):
        assert gathered.tolist() == list(range(world_size))
        others = [other for other in range(world_size) if other != rank]
        there = [100.0 * other + 2 * rank + place for other in others for place in (0, 1)]
        assert received.tolist() == torch.tensor(there, dtype=torch.bfloat16).tolist()


def _fails_with_one(rank: int, folder: str) -> list[float]:
    """Of rank 0's messages one fails, as rank 2 is gone; then rank 1 sends its own. Return the memory."""
    group, posted, failed = dist.new_group([0, 1, 2]), Path(folder) / "posted", Path(folder) / "failed"
    if rank == 2:
        wait_until(posted.exists)
        destroy_group(group)
        return []
    axis, flat = Axis(size=3, index=rank, group=group), torch.full((3,), 7.0)
    if rank == 1:
        wait_until(failed.exists)
        tag = direct._next_tag(
            axis, 0, flat.nbytes
        )  # that of rank 0's, of which this is the part that is late
        late = dist.isend(torch.full((1,), 2.0).view(torch.uint8), group=group, group_dst=0, tag=tag)
        wait_until(lambda: len(list(Path(folder).iterdir())) == 3)
        del late
        return []
    work = send_to_all(torch.zeros(1), flat, axis, lane=0)
    posted.touch()
    with pytest.raises(RuntimeError, match=r"Connection closed|Connection reset"):
        work.wait()
    failed.touch()
    deadline = time.monotonic() + LATE_S
    while flat[1] == 7.0 and time.monotonic() < deadline:
        time.sleep(0.01)
    (Path(folder) / "seen").touch()
    return flat.tolist()


def test_nothing_is_received_into_memory_once_a_message_has_failed(ranks: Ranks, tmp_path: Path) -> None:
    (found, *_) = ranks(_fails_with_one, str(tmp_path), world_size=3)
    assert found == [0.0, 7.0, 7.0]


def _peak_growth(rank: int) -> int:
    """In bytes, of a gather of 64 MiB."""
    axis = _axis(rank)
    flat, own = torch.ones(16 * MB), torch.ones(8 * MB)
    send_to_all(own[:2], flat[:4], axis, lane=0).wait()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _peak()
    send_to_all(own, flat, axis, lane=0).wait()
    return _peak() - before


def _peak() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def test_what_is_gathered_lies_in_memory_once(ranks: Ranks) -> None:
    assert max(ranks(_peak_growth, world_size=2)) < 16 * MB


def test_scratch_is_used_again_for_whatever_fits() -> None:
    scratch, like, halves = Scratch(), torch.empty(0), torch.empty(0, dtype=torch.bfloat16)
    first, second = scratch.take(100, like), scratch.take(40, like)
    assert (first.shape, first.dtype) == ((100,), torch.float32)
    assert first.data_ptr() != second.data_ptr()
    places = [first.data_ptr(), second.data_ptr()]
    scratch.give_back(first)
    scratch.give_back(second)
    again = scratch.take(80, halves)  # 160 bytes: the smaller one of the two
    assert again.data_ptr() == places[1]
    assert (again.shape, again.dtype) == ((80,), torch.bfloat16)
    assert scratch.take(50, like).data_ptr() == places[0]


def test_scratch_that_is_too_small_gives_way_to_a_larger_one() -> None:
    scratch, like = Scratch(), torch.empty(0)
    scratch.give_back(scratch.take(10, like))
    larger = scratch.take(20, like)
    scratch.give_back(larger)
    assert [one.numel() for one in scratch._free] == [80]
