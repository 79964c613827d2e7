"""The peak of a load, as a plan predicts it and on the fake device, and what the program gets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

import dslaunch
from dslaunch import ConfigError
from dslaunch.runtime.checkpoint.pretrained.weight_file import SafetensorsFile
from tests.exhaustive import few
from tests.runtime.plan.beside import Row, answer_of_row, in_own_process, seen_of
from tests.runtime.plan.layouts import layout
from tests.runtime.plan.loads import measure_load, measure_resumed, save, save_trained
from tests.runtime.plan.programs import LOAD_FROM
from tests.runtime.plan.test_api import NUM_BYTES, PLAIN, Stack, batch
from tests.runtime.ranks import Ranks

if TYPE_CHECKING:
    from tests.fake_cuda.ranks import Parent

TOLERANCE = 0.03
BATCH_BYTES = 3072  # of the program: a run loads when it has the tokens of the next step
LOAD = "loading a checkpoint"
CONFIG = PLAIN | {"optimizer": {"type": "AdamW"}}
ADAFACTOR = "blocks, torch.optim.Adafactor"  # its states are those of whole parameters
FEW = [("blocks", "stage 1"), (ADAFACTOR, "stage 3")]
OTHERS = [
    *(("blocks", zero) for zero in ("stage 0", "stage 2", "stage 3")),
    *(("blocks", f"stage 3, {where}") for where in ("optimizer on cpu", "optimizer on nvme", "both on cpu")),
    ("blocks", "stage 2, optimizer on cpu"),
    ("blocks, torch.optim.AdamW", "stage 2"),
    ("blocks, tied", "stage 2"),
    (ADAFACTOR, "stage 2"),
]


def assert_alike(device: Parent, program: str, zero: str, folder: Path) -> None:
    name, config = layout(zero)
    row = Row(program=program, layout=name, config=config)
    (planned,) = (
        one["peaks"]["device"]["bytes"] for one in in_own_process(row, 0, {})["phases"] if one["name"] == LOAD
    )
    ranks = Ranks(device.fork)
    try:
        real = ranks(measure_load, row, str(folder), world_size=row.world_size)[0]
    finally:
        ranks.stop()
    assert planned == pytest.approx(real, rel=TOLERANCE, abs=BATCH_BYTES)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("program", "zero"), FEW)
def test_a_plan_says_what_a_load_needs(device: Parent, program: str, zero: str, tmp_path: Path) -> None:
    assert_alike(device, program, zero, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(("program", "zero"), OTHERS)
def test_a_plan_says_what_a_load_needs_in_every_layout(
    device: Parent, program: str, zero: str, tmp_path: Path
) -> None:
    assert_alike(device, program, zero, tmp_path)


RESUMED = [
    ("blocks", "stage 2", "bf16", 0),
    ("blocks", "stage 3, optimizer on cpu", "bf16", 0),
    ("pipeline", "stage 1", "bf16, 4 micro batches", 0),
    ("pipeline", "stage 1", "bf16, 4 micro batches", 1),
]


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("program", "zero", "rest", "rank"), few(RESUMED, lambda *row: row[:2] == ("blocks", "stage 2"))
)
def test_a_plan_says_what_a_new_engine_needs_that_loads(
    device: Parent, program: str, zero: str, rest: str, rank: int, tmp_path: Path
) -> None:
    """The first step has states then, which are made in it else."""
    name, config = layout(zero, rest)
    saved = Row(program=program, layout=name, config=config)
    row = replace(
        saved, program=f"{program}, resumed", config={**config, LOAD_FROM: str(tmp_path)}, rank=rank
    )
    for of_row, do, given in ((saved, save_trained, [str(tmp_path)]), (row, measure_resumed, [])):
        ranks = Ranks(device.fork)
        try:
            found = ranks(do, of_row, *given, world_size=2)[rank]
        finally:
            ranks.stop()
    load_bytes, steps = found
    answer = answer_of_row(row)
    first = next(one for one in answer["phases"] if one["name"] == LOAD)
    assert first["peaks"]["device"]["bytes"] == pytest.approx(load_bytes, rel=TOLERANCE)
    planned = seen_of(answer)
    assert planned.problem == ""
    assert planned.peaks == pytest.approx(steps.peaks, rel=TOLERANCE)
    assert planned.sent == steps.sent


def _phases(folder: Path, expected: object) -> list[dict[str, Any]]:
    """Return the phases of a program that loads a checkpoint before its first step, and gets that."""

    def resuming() -> Stack:
        plain = dslaunch.Engine.forward
        loaded: list[object] = []

        def forward(engine: Any, *args: Any) -> Any:
            if not loaded:
                loaded.append(engine.load_checkpoint(folder))
                assert loaded == [expected]
            return plain(engine, *args)

        dslaunch.Engine.forward = forward  # type: ignore[method-assign]
        return Stack()

    planned = dslaunch.plan(resuming, batch, CONFIG, hosts=2)
    phases: list[dict[str, Any]] = planned.answer["phases"]
    return phases


def test_a_program_that_resumes_begins_anew_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    """Its load has a phase where it is called, and one after the steps; both take the buffers of a reader."""
    phases = _phases(tmp_path, (None, {}))
    names = [one["name"] for one in phases]
    assert names.index(LOAD) < names.index("step 1: backward")
    assert names[-1] == LOAD
    read_bytes = [one["peaks"]["host"]["bytes"] for one in phases if one["name"] == LOAD]
    assert len(read_bytes) == 2
    assert min(read_bytes) > 2 * NUM_BYTES  # two buffers of the largest piece of a file, a layer


@pytest.mark.slow
@pytest.mark.ranks
def test_a_program_that_resumes_gets_what_the_checkpoint_here_says(ranks: Ranks, tmp_path: Path) -> None:
    """It is given its own counters, and the tensors have no values."""
    (place,) = ranks(save, str(tmp_path), CONFIG, world_size=1)
    assert LOAD in [one["name"] for one in _phases(tmp_path, (place, {"epoch": 3}))]


def test_weights_of_files_are_compared_with_the_model_and_not_read(tmp_path: Path) -> None:
    """A folder that this machine does not have counts as loaded."""
    reads: list[int] = []

    def pretrained() -> Stack:
        plain, read = dslaunch.Engine.forward, SafetensorsFile.read_into
        folders = [tmp_path / "elsewhere", tmp_path]

        def counted(self: Any, out: memoryview, offset: int) -> None:
            reads.append(len(out))
            read(self, out, offset)
            assert sum(reads) < NUM_BYTES / 2  # headers

        def forward(engine: Any, *args: Any) -> Any:
            while folders:
                engine.load_weights(folders.pop(0))
            return plain(engine, *args)

        dslaunch.Engine.forward = forward  # type: ignore[method-assign]
        SafetensorsFile.read_into = counted  # type: ignore[method-assign]
        with torch.device("meta"):
            return Stack()

    weights = dict(Stack().state_dict())
    save_file(weights, tmp_path / "model.safetensors")
    planned = dslaunch.plan(pretrained, batch, CONFIG, hosts=2)
    names = [one["name"] for one in planned.answer["phases"]]
    assert names.count(LOAD) == 3  # two of the program's, and one of a checkpoint after the steps
    name = next(iter(weights))
    save_file(weights | {name: torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"'{name}' has shape \(3,\) in the checkpoint"):
        dslaunch.plan(pretrained, batch, CONFIG, hosts=2)
