"""The program of the README runs as it is printed there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()


@pytest.mark.slow
def test_the_program_trains_with_the_config_and_the_command_beside_it(tmp_path: Path) -> None:
    text = README[README.index("## Train") :]
    for name, kind in (("train.py", "python"), ("ds_config.json", "json")):
        (found,) = re.findall(rf"`{name}`[^\n]*:\n\n```{kind}\n(.*?)```", text, re.DOTALL)
        (tmp_path / name).write_text(found)
    (command,) = re.findall(r"^    (dslaunch .* train\.py .*)$", text, re.MULTILINE)
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
