"""A job whose rank is killed: the way back into training, and the time of the job, beside the truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.run_state.event_reader import EventReader
from dslaunch.launcher.run_state.goodput import share_of
from dslaunch.launcher.run_state.run_state import RunState
from tests.launcher.local_job import WORKER, Job

pytestmark = pytest.mark.slow

WITHIN = 0.02  # of the job's time: what it is told to be spent on, beside the truth
TRUTH = """
import json, torch, dslaunch
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = torch.nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
engine, *_ = dslaunch.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.load_checkpoint("checkpoints")
begin = engine.global_steps
truth = open(f"truth-{attempt}-{rank}", "a", buffering=1)
def note(what):
    print(json.dumps([what, engine.global_steps, time.time()]), file=truth)
while engine.global_steps < 60:
    if engine.global_steps > begin and engine.global_steps % 20 == 0:
        note("save")
        engine.save_checkpoint("checkpoints")
        note("saved")
    note("begin")
    engine.backward(engine(torch.ones(1, 4)).sum())
    time.sleep(0.05)
    if attempt == 0 and rank == 1 and engine.global_steps == 33:
        note("fault")
        os.kill(os.getpid(), signal.SIGKILL)
    engine.step()
    note("end")
"""


def told(folder: Path) -> RunState:
    state, reader = RunState(), EventReader(folder / "events")
    for event in reader.events():
        state.take(event)
    return state


def truth(folder: Path, attempt: int, rank: int) -> list[tuple[str, int, float]]:
    lines = (folder / f"truth-{attempt}-{rank}").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines]  # type: ignore[misc]


def seconds(notes: list[tuple[str, int, float]], begin: str, end: str, *, after: int = -1) -> float:
    """The time between notes of the one kind and the next of the other."""
    found, began = 0.0, 0.0
    for what, step, at in notes:
        if what == begin and step > after:
            began = at
        elif what == end and began:
            found, began = found + at - began, 0.0
    return found


def test_the_way_back_and_the_time_are_told_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER + TRUTH)
    words = ["--num_gpus=2", "--max_restarts=1", "--min_uptime=0", "--events=events", "--report=end.json"]
    job = Job(tmp_path, [*words, "train.py"])
    try:
        assert job.wait(90.0) == 0, job.err
    finally:
        job.end()
    state = told(tmp_path)
    first, second = (truth(tmp_path, attempt, 0) for attempt in range(2))
    (fault_at,) = (at for what, _, at in truth(tmp_path, 0, 1) if what == "fault")
    stepped_at = next(at for what, _, at in second if what == "end")
    check_recovery(state, fault_at, stepped_at)
    check_spent(state, first, second, fault_at)
    report: dict[str, Any] = json.loads((tmp_path / "end.json").read_text())
    assert report["goodput"] == pytest.approx(share_of(state.spent_s), abs=WITHIN)
    assert report["recoveries"][0]["total_s"] == pytest.approx(state.recoveries[0].total_s, abs=0.01)
    assert state.recoveries[0].text.partition(" (")[0] in job.err
    assert list(report["attempts"][0]["end_s"]) == ["fault", "detected", "decided", "stopped"]
    assert report["attempts"][1]["phases_s"]["imported"] <= report["attempts"][1]["phases_s"]["first step"]


def check_recovery(state: RunState, fault_at: float, stepped_at: float) -> None:
    (found,) = state.recoveries
    assert list(found.stages_s) == [
        *("detect", "decide", "stop", "connect", "prepare", "start", "import", "groups", "load", "first step")
    ]
    assert found.total_s == pytest.approx(stepped_at - fault_at, abs=0.2)
    assert sum(found.stages_s.values()) == pytest.approx(found.total_s)
    assert found.steps_again is not None, "it went on from step 20"
    assert found.steps_again <= 13, "the last steps before the fault may not have been told"


def check_spent(
    state: RunState,
    first: list[tuple[str, int, float]],
    second: list[tuple[str, int, float]],
    fault_at: float,
) -> None:
    kept = [one for one in first if one[1] < 20 or (one[0] == "end" and one[1] == 20)]
    began, resumed = first[0][2], next(at for what, _, at in second if what == "begin")
    spent, whole = state.spent_s, state.at - state.began_at
    useful = seconds(kept, "begin", "end") + seconds(second, "begin", "end")
    expected = {
        "useful": useful,
        "start": began - state.began_at,
        "restart": resumed - fault_at,
        "redone": fault_at - began - seconds(kept, "begin", "end") - seconds(first, "save", "saved"),
        "save": seconds(first, "save", "saved") + seconds(second, "save", "saved"),
        "hang": 0.0,
        "end": state.at - second[-1][2],
    }
    assert spent == pytest.approx(expected, abs=WITHIN * whole)
    assert sum(spent.values()) == pytest.approx(whole, abs=WITHIN * whole)
