"""Memory of files is used again, and given back where no file needs it."""

from __future__ import annotations

import os

from dslaunch.launcher.node.memory.shelf import Shelf


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_job_that_runs_on_needs_no_more_descriptors_and_no_more_memory() -> None:
    shelf, before = Shelf(lambda: None), _num_descriptors()
    numbers, held = [], []
    for step in range(40):
        tag = f"t0-{step:03}"
        # Small files beside a share of the state, which is another one when the number of hosts changes.
        shelf.put("a", tag, "state", bytes((1 << 20) * (1 + 3 * (step >= 10) + 12 * (step >= 20))))
        for name in ("manifest", "client_state"):
            shelf.put("a", tag, name, b"x" * 300)
        shelf.keep(tag)
        numbers.append(_num_descriptors() - before)
        held.append(shelf.held_bytes())
    usual = 2 * 2 * 3  # two generations of three files, each with a descriptor of its map
    assert max(numbers) <= usual + 6, "a change of sizes"
    assert numbers[-1] == numbers[5] == usual
    assert held[-1] < 2.1 * (16 << 20)
    shelf.close()
    assert _num_descriptors() == before
