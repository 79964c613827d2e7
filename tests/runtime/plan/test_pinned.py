"""Pages of pinned memory that are planned: they count until they are given back."""

from __future__ import annotations

from typing import Any

from dslaunch.runtime.plan.memory import KEPT, PINNED, PROGRAM, RunMemory
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
