"""SIGTERM asks for a last checkpoint; a job that starts again finds it."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import dslaunch
from dslaunch import CheckpointError
from tests.runtime.checkpoint.states import make, run, whole_state
from tests.runtime.models import assert_same_bits, make_config, make_model
from tests.runtime.ranks import Ranks


def _preempted(rank: int, folder: str) -> int:
    engine = make(2, False, checkpoint={"preemption_save_dir": folder, "async_save": True})
    run(engine, first=0, steps=2)
    assert not Path(folder, "latest").exists()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run(engine, first=2, steps=1)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    again = make(2, False, seed=5)
    again.load_checkpoint(folder)
    assert_same_bits(whole_state(again), whole_state(engine))
    assert isinstance(ended.value.code, int)
    assert again.global_steps == 3
    return ended.value.code


def test_sigterm_to_one_rank_saves_the_next_step_on_all_and_ends_them(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(_preempted, str(tmp_path), world_size=2) == [143, 143]


def _without_checkpoint(rank: int, folder: str) -> tuple[list[Any], list[str]]:
    """What a program gets that was written for DeepSpeed, and is told."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dslaunch").addHandler(handler)
    engine, *_ = dslaunch.initialize(model=make_model(), config=make_config(stage=1), is_lenient=True)
    answers: list[Any] = [engine.load_checkpoint(folder)]
    engine.save_checkpoint(folder, "mine", save_latest=False)
    answers.append(engine.load_checkpoint(folder))
    with pytest.raises(CheckpointError, match="other is no checkpoint"):
        engine.load_checkpoint(folder, tag="other")
    answers.append(engine.load_checkpoint(folder, tag="mine"))
    logging.getLogger("dslaunch").removeHandler(handler)
    return answers, [line for line in told if "latest does not exist" in line]


def test_to_a_program_for_deepspeed_a_folder_without_latest_is_no_error(ranks: Ranks, tmp_path: Path) -> None:
    nothing, found = (None, None), (str(tmp_path / "mine"), {})
    beginning = f"{tmp_path}/latest does not exist: nothing is loaded; the folder holds "
    told = [[f"{beginning}no checkpoint", f"{beginning}mine"], []]
    assert ranks(_without_checkpoint, str(tmp_path), world_size=2) == [
        ([nothing, nothing, found], one) for one in told
    ]


def _first_start(rank: int, folder: str) -> Any:
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
    try:
        engine = make(1, False)
        answer = engine.load_checkpoint(folder)
        with pytest.raises(CheckpointError, match="no checkpoint"):
            engine.load_checkpoint(folder, tag="mine")
    finally:
        del os.environ["TORCHELASTIC_MAX_RESTARTS"]
    with pytest.raises(CheckpointError, match="latest does not exist"):
        make(1, False).load_checkpoint(folder)
    torch.distributed.barrier()
    return answer


def test_a_job_that_may_be_started_again_begins_where_there_is_no_checkpoint_yet(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks(_first_start, str(tmp_path), world_size=2) == [(None, {})] * 2
