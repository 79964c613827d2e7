"""A job that stands still: it is ended, the rank that the others wait for is named, and it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launcher.local_job import WORKER, Job

pytestmark = pytest.mark.slow

HANGS = """
import json, torch, dslaunch
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = torch.nn.Linear(4, 4)
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
engine, *_ = dslaunch.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.load_checkpoint("checkpoints")
def stand_still():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
for step in range(engine.global_steps, 30):
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    if step == 5:
        engine.save_checkpoint("checkpoints")
    time.sleep(0.02)
    if attempt == 0 and step == 20 and rank == 1:
        stand_still()
say("done", engine.global_steps, attempt)
os._exit(0)  # on a busy machine Python takes long to end, in no step
"""


def test_a_rank_that_stands_still_is_named_and_the_job_goes_on_without_waiting(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER + HANGS)
    words = ["--num_gpus=2", "--max_restarts=1", "--min_uptime=0", "--report=end.json"]
    job = Job(tmp_path, [*words, "--hang_limit=step=12", "--metrics_interval=0.2", "train.py"])
    try:
        assert job.wait(90.0) == 0, job.err
    finally:
        job.end()
    assert job.out.count("done 30 1") == 2
    assert (
        "whose limit is 12 s (as --hang_limit says); the others wait for rank 1: what 2 ranks do" in job.err
    )
    assert "in stand_still" in job.err, "the stacks are shown"
    assert "rank 1 on localhost hangs: nothing has moved for " in job.err
    first, second = json.loads((tmp_path / "end.json").read_text())["attempts"]
    assert first["culprit"]["kind"] == "hang"
    assert (first["culprit"]["rank"], first["culprit"]["host"], first["exit_code"]) == (1, "localhost", 124)
    assert second["exit_code"] == 0
    end_s = first["end_s"]
    assert end_s["stopped"] - end_s["detected"] < 10, "the worker that ignores SIGTERM is not waited for"
    job.assert_nothing_is_left()
