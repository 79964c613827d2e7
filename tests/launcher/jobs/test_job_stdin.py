"""Who reads what `dslaunch` reads: the only worker of this machine, or the one that was named."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.inputs.selection import Selected
from dslaunch.launcher.job.plan import NodePlan, plan_nodes, plan_program
from dslaunch.launcher.options import Options
from dslaunch.launcher.options.process import ProcessOptions
from dslaunch.launcher.run.make_plan import with_stdin
from tests.launcher.local_job import Job

READ_ALL = "import os, sys\nprint(os.environ['RANK'], 'read', sys.stdin.read().split(), flush=True)\n"


@contextlib.contextmanager
def running(folder: Path, program: str, *words: str, stdin: int) -> Iterator[Job]:
    (folder / "train.py").write_text(program)
    job = Job(folder, [*words, "train.py"], stdin=stdin)
    try:
        yield job
    finally:
        job.end()


def text_in(folder: Path, text: str) -> int:
    (folder / "input").write_text(text)
    return os.open(folder / "input", os.O_RDONLY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--num_gpus=2", "--stdin=1"), ["0 read []", "1 read ['a', 'b']"]),
        (("--preload=json",), ["0 read ['a', 'b']"]),
    ],
)
def test_the_only_rank_or_the_one_that_is_named_reads_the_input(
    words: tuple[str, ...], expected: list[str], tmp_path: Path
) -> None:
    stdin = text_in(tmp_path, "a\nb\n")
    with running(tmp_path, READ_ALL, *words, stdin=stdin) as job:
        os.close(stdin)
        assert job.wait() == 0, job.err
        assert sorted(line.rpartition(" | ")[2] for line in job.out.splitlines()) == expected


@pytest.mark.slow
def test_a_debugger_in_a_job_of_one_process_has_the_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with running(
        tmp_path, "value = 6 * 7\nbreakpoint()\nprint('went on', flush=True)\n", stdin=theirs
    ) as job:
        os.close(theirs)
        job.wait_for("(Pdb)")
        os.write(ours, b"p value\n")
        job.wait_for("42")
        os.write(ours, b"c\n")
        assert job.wait() == 0, job.err
        assert "went on" in job.out
    os.close(ours)


@pytest.mark.slow
def test_an_input_that_was_closed_is_empty(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(READ_ALL)
    job = Job(tmp_path, ["train.py"], shell='exec "$@" <&-', stdin=subprocess.DEVNULL)
    try:
        assert job.wait() == 0, job.err
        assert "0 read []" in job.out
    finally:
        job.end()


def nodes_of(*slots: int) -> tuple[NodePlan, ...]:
    hosts = tuple(
        Selected(host=Host(name=f"n{place}", slots=count), devices=tuple(map(str, range(count))))
        for place, count in enumerate(slots)
    )
    return plan_nodes(hosts, plan_program("a.py", (), python="py"), local_names=frozenset({"n0"}))


def options(rank: int | None) -> Options:
    return Options(program="a.py", process=ProcessOptions(stdin_rank=rank))


def test_a_rank_elsewhere_or_none_at_all_cannot_be_named() -> None:
    nodes = nodes_of(1, 2)
    assert [one.stdin_rank for one in with_stdin(nodes, options(None))] == [None, None]
    assert [one.stdin_rank for one in with_stdin(nodes, options(0))] == [0, None]
    with pytest.raises(LaunchError, match="--stdin=2: rank 2 runs on n1; allowed is a rank on this machine"):
        with_stdin(nodes, options(2))
    with pytest.raises(LaunchError, match="--stdin=3: the job has 3 ranks; give 0 to 2"):
        with_stdin(nodes, options(3))
