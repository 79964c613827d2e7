"""How long each phase of a start took, up to the first collective of all ranks."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import pytest

from dslaunch.launcher.controller.timings import Timings, describe, drawn
from dslaunch.launcher.node.workers.milestones import MilestonePipe
from dslaunch.launcher.wire.frames import Milestone
from tests.exhaustive import few
from tests.launcher.local_job import WORKER, Job


def test_a_phase_that_ranks_tell_of_ends_with_the_last_one() -> None:
    timings = Timings(num_ranks=3)
    began = timings.began_at
    for rank, at_s in ((2, 3.0), (0, 5.0), (2, 4.0)):
        timings.take(rank, "process group", began + at_s)
    assert timings.all_s() == {}, "rank 1 is not there"
    timings.take(1, "process group", began + 2.0)
    assert timings.all_s() == pytest.approx({"process group": 5.0})


def test_phases_are_told_in_the_order_of_time() -> None:
    timings = Timings(num_ranks=1)
    timings.heard_output(timings.began_at + 1.5)
    timings.heard_output(timings.began_at + 3.0)
    timings.end("started", timings.began_at + 2.0)
    timings.end("connected", timings.began_at + 1.0)
    assert list(timings.all_s()) == ["connected", "first output", "started"]
    assert (
        describe(timings.all_s().items()) == "timings: connected 1.00 s, first output 1.50 s, started 2.00 s"
    )


def test_each_phase_is_a_bar_that_begins_where_the_one_before_ends() -> None:
    phases = {"connected": 0.5, "agent": 0.5, "started": 1.0, "first collective": 4.0}
    assert drawn(phases.items()) == [
        "connected           0.50 s  #####",
        "agent               0.50 s       |",
        "started             1.00 s       #####",
        "first collective    4.00 s  " + 10 * " " + 30 * "#",
    ]
    assert drawn({}.items()) == []
    assert drawn({"connected": 0.0}.items()) == ["connected    0.00 s  |"]


def test_lines_that_are_no_milestones_are_left_out(tmp_path: Path) -> None:
    pipe = MilestonePipe(str(tmp_path / "pipe"))
    try:
        assert pipe.read() == []
        fd = os.open(tmp_path / "pipe", os.O_WRONLY | os.O_NONBLOCK)
        os.write(fd, b"x 1.0 a\n\n3\n3 \xff b\n4 2.5 first collective\n5 2.5 \xff\n6 3")
        assert pipe.read() == [Milestone(4, "first collective", 2.5)]
        os.write(fd, b".5 process group\n")
        assert pipe.read() == [Milestone(6, "process group", 3.5)]
        os.close(fd)
    finally:
        pipe.close()


TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group('gloo')
if rank == 0: time.sleep(0.3)
if {is_reducing}:
    ones = torch.ones(2)
    dist.all_reduce(ones)
    assert ones.tolist() == [2, 2]
open(f'in-{{rank}}', 'w').close()  # who leaves while the other one still connects makes it fail
while not os.path.exists(f'in-{{1 - rank}}'): time.sleep(0.01)
dist.destroy_process_group()
say(dist.all_reduce.__name__, dist.all_reduce.__module__)
"""


# A torch that is imported at once, whose collectives meet in the folder of the job.
QUICK = """
import os, time
ones = lambda number: FOUND
class FOUND: tolist = lambda: [2, 2]
def init_process_group(backend): pass
def destroy_process_group(): pass
def all_reduce(tensor):
    open(f"reduced-{os.environ['RANK']}", "w").close()
    while not all(os.path.exists(f"reduced-{rank}") for rank in range(2)): time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "is_quick"),
    few(
        [(["--preload=torch"], True), (["--preload=torch"], False), (["--stack_on_hang=0"], False)],
        lambda options, is_quick: is_quick,
    ),
)
def test_the_first_collective_is_timed(options: list[str], is_quick: bool, tmp_path: Path) -> None:
    env = {}
    if is_quick:
        package = tmp_path / "quick" / "torch"
        (package / "distributed").mkdir(parents=True)
        (package / "__init__.py").write_text("from .distributed.distributed_c10d import ones\n")
        (package / "distributed" / "__init__.py").write_text("from .distributed_c10d import *\n")
        (package / "distributed" / "distributed_c10d.py").write_text(QUICK)
        env["PYTHONPATH"] = str(package.parent)
    (tmp_path / "train.py").write_text(WORKER + TRAIN.format(is_reducing=True))
    job = Job(tmp_path, ["--timings", "--num_gpus=2", "--report=end.json", *options, "train.py"], env=env)
    began = time.monotonic()
    try:
        assert job.wait(60.0) == 0, job.err
    finally:
        job.end()
    assert job.lines(1) == ["all_reduce torch.distributed.distributed_c10d"]
    found = re.findall(r"([a-z ]+) ([0-9.]+) s", job.err.partition("timings: ")[2].replace(",", ""))
    names = [name.strip() for name, _ in found]
    assert "started" in names  # whose word may come late from a busy machine
    assert names.index("process group") < names.index("first collective")
    phases = json.loads((tmp_path / "end.json").read_text())["phases_s"]
    # It sleeps for 0.3 s between; but each phase is that of its last rank,
    # and is noted when its word arrives.
    assert phases["process group"] + 0.2 <= phases["first collective"] < time.monotonic() - began


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_only_some_ranks_reach_is_not_a_phase(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER + TRAIN.format(is_reducing=False))
    job = Job(tmp_path, ["--timings", "--preload=torch", "--num_gpus=2", "train.py"])
    try:
        assert job.wait(60.0) == 0, job.err
    finally:
        job.end()
    assert "process group" in job.err
    assert "first collective" not in job.err
