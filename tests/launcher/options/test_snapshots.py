"""--snapshot_every: what it takes, and where it is refused."""

from __future__ import annotations

import pytest

from tests.launcher.command_line.test_cli import Fail, Parse, fail, parse

__all__ = ["fail", "parse"]  # fixtures


@pytest.mark.parametrize(
    ("given", "meant"), [("20", "20"), ("020", "20"), ("30s", "30s"), ("0.50s", "0.5s"), (" 7 ", "7")]
)
def test_steps_or_seconds(parse: Parse, given: str, meant: str) -> None:
    options = parse("--max_restarts=1", f"--snapshot_every={given}", "train.py")
    assert options.snapshots.every == meant


@pytest.mark.parametrize("given", ["0", "0s", "-1", "1.5", "s", "30 s", "1e3", "30m", "nan", "9" * 30])
def test_nothing_else(fail: Fail, given: str) -> None:
    said = fail("--max_restarts=1", f"--snapshot_every={given}", "train.py")
    assert f"{given!r} is not allowed; give a number of steps, as 20, or of seconds, as 30s" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [],
            "--snapshot_every=20 has no effect in a job that does not start again; add --max_restarts=3, or",
        ),
        (["--max_restarts=1", "--launcher=slurm"], "--launcher=slurm"),
        (["--max_restarts=1", "--tree_above=4"], "--snapshot_every=20 and --tree_above exclude each other"),
    ],
)
def test_not_where_no_agent_outlives_the_workers(fail: Fail, words: list[str], said: str) -> None:
    assert said in fail(*words, "--snapshot_every=20", "train.py")
