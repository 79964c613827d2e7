"""The program of the page about generation runs, and says what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launcher.local_job import Job

PAGE = Path(__file__).resolve().parents[2] / "docs" / "train" / "generate.md"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_program_generates_what_the_page_says(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    program = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[-1]
    (tmp_path / "generate.py").write_text(program)
    job = Job(tmp_path, ["--num_gpus=2", "generate.py"])
    assert job.wait(200.0) == 0, job.out + job.err
    said, answer = (line.partition("| ")[2] or line for line in job.out.splitlines()[-2:])
    shape = re.escape("generation: parameters are gathered once (") + r"\S+ MiB, of \S+ GiB free on rank \d\)"
    assert re.fullmatch(shape, said), job.out
    assert answer in PAGE.read_text()
