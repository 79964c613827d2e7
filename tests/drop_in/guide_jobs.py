"""The commands of docs/libraries/hugging-face.md, run with a script of the tests in place of the guide's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.drop_in.jobs import asked_for

HERE = Path(__file__).parent
WORLD_SIZES = [pytest.param(1, marks=pytest.mark.exhaustive), 2]
GUIDE = HERE.parents[1] / "docs" / "libraries" / "hugging-face.md"
BIN = Path(sys.executable).parent
LIMIT_S = 800  # on a machine that does many other things; alone it is done in 20
NOT_INSTALLED = [name for name in ("transformers", "accelerate") if find_spec(name) is None]

requires_hugging_face = pytest.mark.skipif(bool(NOT_INSTALLED), reason=f"needs {', '.join(NOT_INSTALLED)}")


def command_of(program: str, *, world_size: int, script: Path, more: tuple[str, ...] = ()) -> list[str]:
    """The guide's command that begins with `program`, for this many processes,
    with `more` options before the script.
    """
    lines = [line.split() for line in GUIDE.read_text().splitlines() if line.startswith("    ")]
    found = next(words for words in lines if words[0] == program)
    *options, guides = found[1:]
    assert guides == "train.py"
    numbered = [f"{word[:-1]}{world_size}" if word.endswith("=2") else word for word in options]
    assert numbered != options or world_size == 2
    return [str(BIN / program), *numbered, *more, str(script)]


def ask_for_cases(request: pytest.FixtureRequest, path: Path) -> None:
    """Write down the cases of this file's tests that are to be run, and what they ask for beside."""
    names = [*(case.name for case in asked_for(request, "case")), *asked_for(request, "extra")]
    path.write_text(json.dumps(sorted(names)))


class Job:
    """What came out of one job, which ran all cases."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: dict[str, Any] = json.loads((folder / "results.json").read_text())

    def weights(self, name: str, kind: str = "model") -> dict[str, Any]:
        """Return what a case has saved; a tied weight may be there once or by all its names."""
        saved = load_file(self.folder / name / kind / "model.safetensors")
        return {"lm_head.weight": saved["model.embed_tokens.weight"], **saved}


def run(commands: dict[Path, list[str]], **environ: str) -> list[Job]:
    """Run commands beside each other, each with its folder as the script's argument; fail with the end of
    what one has said.
    """
    mine = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    mine |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", **environ}
    deadline = time.monotonic() + LIMIT_S
    with ExitStack() as started:
        processes = [
            started.enter_context(_started([*command, str(folder)], folder, mine))
            for folder, command in commands.items()
        ]
        for (folder, command), process in zip(commands.items(), processes, strict=True):
            code = process.wait(max(0.0, deadline - time.monotonic()))
            if code:
                said = (folder / "log").read_text()[-8000:]
                pytest.fail(f"{' '.join(command)}: exit code {code}\n{said}", pytrace=False)
    return [Job(folder) for folder in commands]


@contextmanager
def _started(command: list[str], folder: Path, environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, env=environ, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # the launchers end their workers
        process.wait()


def largest_difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Return that of two models' weights, over every element."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[name].float() - theirs[name].float()).abs().max()) for name in ours)
