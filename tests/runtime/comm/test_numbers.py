"""Numbers between the host and a GPU, and what hosts tell each other through GPUs."""

from __future__ import annotations

import torch

from dslaunch.runtime.comm.numbers import ReadBack, on_device
from dslaunch.runtime.comm.rank_group import Job
from dslaunch.runtime.comm.wire import Wire
from tests.fake_cuda.torch_cuda import device
from tests.runtime.ranks import Ranks


def _moved(rank: int) -> tuple[list[int], float, int]:
    device().clear_counters()
    there = on_device([3, 4], dtype=torch.int64, device=torch.device("cuda", rank))
    back = ReadBack(there.sum() / 2)
    before = sum(device().host_waits().values())
    value = float(back.wait())
    return there.tolist(), value, before


def test_numbers_go_to_a_gpu_and_come_back_and_only_who_reads_them_waits(cuda_ranks: Ranks) -> None:
    assert cuda_ranks(_moved, world_size=2) == [([3, 4], 3.5, 0)] * 2


def test_on_a_cpu_they_are_here() -> None:
    values = on_device([0.5], dtype=torch.float64, device=torch.device("cpu"))
    back = ReadBack(values)
    assert back.is_here
    assert back.wait() is values


def _told(rank: int) -> tuple[list[list[float]], bool]:
    job = Job(Wire())
    torch.ones(1000, device="cuda").add_(1)
    computed = torch.cuda.current_stream().record_event()
    told = job.all_gather_numbers([rank, 0.5], device=torch.device("cuda", rank), what="x")
    return told, computed.query()


def test_hosts_that_tell_each_other_numbers_do_not_wait_for_what_gpus_compute(cuda_ranks: Ranks) -> None:
    assert cuda_ranks(_told, world_size=2) == [([[0.0, 0.5], [1.0, 0.5]], False)] * 2
