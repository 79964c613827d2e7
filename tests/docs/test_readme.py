"""The program of the README runs as it is printed there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
BENCHMARKS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "benchmarks.md"
MOST_LINES = 200


@pytest.mark.slow
def test_the_program_trains_with_the_command_beside_it(tmp_path: Path) -> None:
    text = README[README.index("## Train") :]
    (program,) = re.findall(r"`train\.py`[^\n]*:\n\n<!-- run by[^\n]*\n```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    (command,) = re.findall(r"^    (dslaunch --num_gpus .* train\.py)$", text, re.MULTILINE)
    done = subprocess.run(
        [Path(sys.executable).with_name("dslaunch"), *command.split()[1:]],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (loss,) = re.findall(r"localhost:0 \| loss ([0-9.]+) after 64 steps", done.stdout)
    assert float(loss) < 0.5  # ln 2 at the start
    assert (tmp_path / "checkpoints" / "latest").is_file()


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= MOST_LINES


@pytest.mark.parametrize(
    ("said", "rows"),
    [
        ("64 hosts in 1.86 s, where pdsh takes 3.55 s", ["| 64 | 1.86 |  | 3.55 |"]),
        ("16 hosts in 0.60 s, where DeepSpeed takes 21.2 s", ["| 16 | 0.60 | 21.18 |"]),
        (
            "0.42 to 0.88 of DeepSpeed's time and 0.58 to 0.88 of FSDP2's",
            [
                "| comm-bound | 2 | dslaunch 3 | DeepSpeed 3 | 0.42 |",
                "| comm-bound | 2 | dslaunch 3 | FSDP2 | 0.58 |",
                "| compute-bound | 2 | dslaunch 3 | FSDP2 | 0.88 |",
                "| compute-bound | 2 | dslaunch 3 | DeepSpeed 3 | 0.88 |",
            ],
        ),
        ("0.73 to 0.96 of DeepSpeed's at stages 2 and 3", ["469 / 647 = 0.73", "654 / 683 = 0.96"]),
        ("1 GB in 0.56 s, where DeepSpeed takes 1.51 s", ["| dslaunch 2 | 0.56 |", "| DeepSpeed 2 | 1.51 |"]),
        ("and FSDP2 1.89 s", ["| FSDP2 | 1.89 |"]),
        ("1.34 s, where DeepSpeed first converts for 11.05 s", ["nothing | 1.34 |", "11.05 s of conversion"]),
        ("in 14 ms instead of 1.3 s", ["| import deepspeed | 13.6 | 1331.5 |"]),
        ("DeepSpeed's within 1e-6", ["| 9.5e-07 |"]),
        ("waits 0.22 s for an asynchronous save of 1 GB", ["0.220 | 0.97 | 13 |"]),
    ],
)
def test_every_figure_stands_in_the_benchmarks(said: str, rows: list[str]) -> None:
    assert said in " ".join(README.split())
    text = BENCHMARKS.read_text()
    assert [row for row in rows if row not in text] == []
