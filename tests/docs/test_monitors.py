"""The programs in the guide to monitors run, and leave and print what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.metrics.told import Reader

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "train" / "monitors.md").read_text(encoding="utf-8")


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE, re.DOTALL)


def run(program: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def shape(line: str) -> str:
    """A line without its numbers and the spaces between columns."""
    return re.sub(r" +", " ", re.sub(r"[0-9]+(\.[0-9]+)?", "N", line))


@pytest.mark.slow
def test_the_program_leaves_the_files_and_prints_lines_of_these_shapes(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text(*blocks("json"), encoding="utf-8")
    said = run(blocks("python")[0], tmp_path)
    files, times, throughput, table, _ = blocks("text")
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*") if "logs" in path.parts)
    assert found == files.split()
    lines = said.splitlines()
    assert next(line for line in lines if "samples/s=" in line).startswith("step=4, epoch=0, micro_step=4")
    shapes = {shape(line) for line in lines}
    assert shape(times.strip()) in shapes
    assert shape(throughput.strip()) in shapes
    assert not {line for line in table.splitlines() if line} & set(lines)
    assert "no collective has been timed; one process sends nothing" in lines
    assert (tmp_path / "logs" / "first" / "Train_Samples_lr.csv").read_text().split() == [
        "step,lr",
        *(f"{4 * step},0.01" for step in (1, 2, 3, 4)),
    ]
    assert "parameters of the model:" in (tmp_path / "logs" / "profile.txt").read_text()


def test_a_model_is_profiled_without_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    exec(blocks("python")[1], {})
    assert capsys.readouterr().out == blocks("text")[-1]
    places = 30 * 30
    assert 8 * places * 3 * 9 + 8 * places * 10 == 266_400
    assert 8 * 3 * 9 + 8 + 8 * places * 10 + 10 == 72_234


def test_a_program_tells_the_launcher_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(tmp_path)
    monkeypatch.setenv("DSLAUNCH_METRICS_PIPE", str(reader.path))
    monkeypatch.setenv("DSLAUNCH_METRICS_INTERVAL", "0")
    run(blocks("python")[2], tmp_path)
    rows = [row for of_rank in reader.lines().values() for row in of_rank]
    assert [row["accuracy"] for row in rows] == [0.0, 0.5, 1 - 1 / 3]
    assert [row.get("steps") for row in rows] == [None, 1, 1]
    reader.close()
