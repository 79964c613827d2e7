"""A process that has imported what the workers need when their job starts again."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.node.workers.shared_import import RESTART_IMPORTS, imports_at_top
from tests.launcher.local_job import Job

pytestmark = pytest.mark.slow

TRAIN = """
import json, os, pathlib, sys, time
import torch
from package import module, name
import unfit
import own
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
heres = [one.HERE for one in (torch, module, unfit, own)]
print(json.dumps([os.getpid(), heres, unfit.RANK, os.nice(0), os.getcwd(), sys.argv[1:]]), flush=True)
if module.HERE == os.getpid() and os.environ["RANK"] == "1":
    time.sleep(600)
if module.HERE == os.getpid() and attempt < 9:  # this attempt imported for itself
    deadline = time.monotonic() + 20
    while attempt == 0 and len(list(pathlib.Path("imported").iterdir())) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)  # until two processes have imported for the next attempt, as the first meets `unfit`
    time.sleep(0.2)
    pathlib.Path("new.py").write_text(f"HERE = {attempt}")
    os.replace("new.py", "own.py")
    sys.exit(1)
"""
HERE = "import os\nHERE = os.getpid()\n"
UNFIT = {
    "asks for a variable of a rank": "RANK = os.environ.get('RANK')\n",
    "has a thread": "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True)"
    ".start()\nRANK = os.environ['R' + 'ANK'] if 'RANK' in dict(os.environ) else None\n",
    "opens a GPU": "import mmap\nFILE = open('dev/nvidia0', 'rb')\n"
    "MAP = mmap.mmap(FILE.fileno(), 0, access=mmap.ACCESS_READ)\n"
    "RANK = dict(os.environ).get('RANK')\n",
}


@pytest.mark.parametrize(
    "unfit",
    [
        "asks for a variable of a rank",
        *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("has a thread", "opens a GPU")),
    ],
)
def test_workers_of_a_job_that_starts_again_are_forked_from_what_was_imported(
    tmp_path: Path, unfit: str
) -> None:
    installed = tmp_path / "lib" / "site-packages"
    for folder in (installed / "package", tmp_path / "imported", tmp_path / "dev"):
        folder.mkdir(parents=True)
    (tmp_path / "dev" / "nvidia0").write_text("x")
    (installed / "torch.py").write_text(HERE)
    (installed / "package" / "__init__.py").write_text("name = 1\n")
    done = f"open(os.path.join({str(tmp_path / 'imported')!r}, str(HERE)), 'w').close()\n"
    (installed / "package" / "module.py").write_text(HERE + done)
    (installed / "unfit.py").write_text(HERE + UNFIT[unfit])
    (tmp_path / "own.py").write_text(HERE)
    (tmp_path / "train.py").write_text(TRAIN)
    words = (
        "--num_gpus=2",
        "--no_local_rank",
        "--max_restarts=9",
        "--min_uptime=0",
        "train.py",
        "--lr=1",
    )
    job = Job(tmp_path, words, env={"PYTHONPATH": str(installed)})
    try:
        assert job.wait() == 0, job.err
        assert not job.survivors()
    finally:
        job.end()
    assert "outlived" not in job.err
    said: list[Any] = [json.loads(line) for line in job.lines(0)]
    first, last = said[0], said[-1]
    assert first[1][1:] == [first[0]] * 3
    pid, heres, rank, nice, folder, arguments = last
    assert heres[0] == heres[1] not in [one[0] for one in said], "what is installed was imported once"
    assert heres[0] != first[1][0]
    assert heres[2:] == [pid, len(said) - 2], "what is unfit, and what is the program's own, by each worker"
    assert (rank, nice, folder, arguments) == ("0", os.nice(0), str(tmp_path), ["--lr=1"])


LINES = [
    ("import torch", [["torch"]]),
    ("import os\nimport numpy as np\nimport torch, torch.nn as nn", [["torch"], ["torch.nn"]]),
    ("import pandas\nfrom transformers import A, B as C\nimport torch\nA.b()\nimport late",
     [["pandas"], ["transformers", "A", "B"], ["torch"]]),
    ("import torch\nimport local\nimport pandas", [["torch"]]),
    ("import torch\nfrom . import local", [["torch"]]),
    ("import deepspeed", [["deepspeed"], ["deepspeed", "initialize"], [RESTART_IMPORTS]]),
    ("from transformers import Trainer", [["transformers", "Trainer"]]),
    ("import os\nos.environ['A'] = '1'\nimport torch", []),
    ("import pandas", []),
    ("import torch as", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "lines"), LINES)
def test_what_is_imported_is_what_the_script_imports_at_its_top(
    tmp_path: Path, text: str, lines: list[list[str]]
) -> None:
    (tmp_path / "local.py").touch()
    (tmp_path / "train.py").write_text(text)
    assert imports_at_top(str(tmp_path / "train.py"), env={}) == lines
    assert imports_at_top(str(tmp_path / "train.py"), env={b"COVERAGE_PROCESS_START": b""}) == []
    assert imports_at_top(None, env={}) == []


def test_the_modules_of_checkpoints_are_there_for_a_program_with_our_engine() -> None:
    found = importlib.import_module(RESTART_IMPORTS)
    assert {found.load.__name__, found.save.__name__, found.resume.__name__} == {
        f"dslaunch.runtime.checkpoint.{name}" for name in ("load", "save", "resume")
    }
