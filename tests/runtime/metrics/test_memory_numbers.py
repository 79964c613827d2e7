"""When a rank looks at what its memory is used for, which takes a look at each tensor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dslaunch.runtime.metrics import memory_numbers
from dslaunch.runtime.metrics.device_memory import Kinds


def test_kinds_that_do_not_change_are_looked_at_less_and_less(monkeypatch: pytest.MonkeyPatch) -> None:
    now, looks = 0.0, []
    held = Kinds(parameters=100, gathered=10, gradients=20, optimizer=0)

    def look(*_: object) -> Kinds:
        looks.append(now)
        return held

    monkeypatch.setattr(memory_numbers, "bytes_by_kind", look)
    monkeypatch.setattr(memory_numbers.time, "monotonic", lambda: now)
    memory = memory_numbers.MemoryNumbers(torch.device("cpu"))
    told = []
    for now in range(400):
        if now == 200:
            held = held._replace(optimizer=500)
        told.append(memory.look())
    assert looks == [0, 2, 6, 14, 30, 62, 122, 182, 242, 244, 248, 256, 272, 304, 364]
    assert [one["mem_parameters"] for one in told] == [110] * 400
    assert [one["mem_optimizer"] for one in told] == [0] * 242 + [500] * 158
    assert all(
        one["mem_used"]
        == sum(one[f"mem_{kind}"] for kind in ("parameters", "gradients", "optimizer", "other"))
        for one in told
    )


def test_a_program_may_close_all_files_and_open_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_numbers, "_LOOK_S", 0.0)
    memory = memory_numbers.MemoryNumbers(torch.device("cpu"))
    before = memory.look()["mem_used"]
    assert memory._statm is not None
    fd = memory._statm[0]
    (tmp_path / "own").write_text("1 2 3 4 5 6 7")
    own = os.open(tmp_path / "own", os.O_RDONLY)
    os.dup2(own, fd)
    after = memory.look()["mem_used"]
    assert abs(after - before) < before / 2
    assert os.read(fd, 100) == b"1 2 3 4 5 6 7"  # and is not closed
    os.close(fd)
    os.close(own)
    assert abs(memory.look()["mem_used"] - before) < before / 2


def test_memory_is_looked_at_again_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    now, used = 0.0, 0
    memory = memory_numbers.MemoryNumbers(torch.device("cpu"))
    monkeypatch.setattr(memory_numbers.time, "monotonic", lambda: now)
    monkeypatch.setattr(memory, "_of_process", lambda: {"mem_used": used})
    told = []
    for second in range(6):
        now, used = float(second), 10 * second
        told.append(memory.look()["mem_used"])
    assert told == [0, 0, 20, 20, 40, 40]
