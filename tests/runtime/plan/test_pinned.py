"""Pages of pinned memory that are planned: they count until they are given back."""

from __future__ import annotations

import gc
from typing import Any

import torch

from dslaunch.runtime.plan.memory import ALL_HOST, HOST, KEPT, PINNED, PROGRAM, RunMemory
from dslaunch.runtime.plan.pinned import PlannedBlock, PlannedPages
from dslaunch.runtime.plan.storages import Storages

BLOCK_BYTES, USED_BYTES = 8192, 5000


def test_pages_that_no_tensor_uses_count_as_kept_until_they_are_used_again_or_given_back() -> None:
    memory = RunMemory()
    pages = PlannedPages(Storages(born=memory.born, died=memory.died), memory)
    block = PlannedBlock(BLOCK_BYTES, pages)
    returned: list[Any] = []

    def now() -> dict[str, int]:
        found = dict(memory.at(memory.clock, PINNED))
        assert sum(found.values()) == memory.now[PINNED]
        memory.tick()
        return found

    for _ in range(2):
        tensor = pages._lend(block, USED_BYTES, returned)
        assert now() == {PROGRAM: BLOCK_BYTES}
        del tensor
        assert returned.pop() is block
        assert now() == {KEPT: BLOCK_BYTES}
    block.unlock()
    assert now() == {}


def test_pages_that_go_before_plain_memory_comes_are_not_counted_with_it() -> None:
    memory = RunMemory()
    storages = Storages(born=memory.born, died=memory.died)
    cpu = torch.device("cpu")

    def peaks() -> dict[str, int]:
        return {place: memory.phases[-1].peaks[place].nbytes for place in (HOST, PINNED, ALL_HOST)}

    pinned = storages.add(torch.empty(1024), cpu, is_pinned=True)
    del pinned
    gc.collect()
    plain = torch.empty(512)
    storages.add(plain, cpu)
    assert peaks() == {HOST: 2048, PINNED: 4096, ALL_HOST: 4096}
    both = torch.empty(1024)
    storages.add(both, cpu, is_pinned=True)
    assert peaks() == {HOST: 2048, PINNED: 4096, ALL_HOST: 6144}
    assert sum(memory.at(memory.clock, ALL_HOST).values()) == 6144
