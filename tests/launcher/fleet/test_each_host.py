"""One command on hosts that are channels in this process: what one host does wrong is its own."""

from __future__ import annotations

import io

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.fleet.each_host import EachHost, HostsOutcome, describe_failures
from dslaunch.launcher.fleet.host_output import HostOutput
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.wire.frames import (
    MAGIC,
    Done,
    Exited,
    Frame,
    Output,
    Prepare,
    Problem,
    Start,
    Started,
)
from tests.launcher.memory_host import HELLO, Change, MemoryHost, after, first, plan_of, way_to


def run(*hosts: MemoryHost | Exception) -> tuple[HostsOutcome, list[str], str]:
    """How it ended, the sentences on that, and what is shown of the command's output."""
    out = io.BytesIO()
    console = Console(log_level="error", out=out, err=io.BytesIO())
    plan = plan_of(len(hosts), slots=1)
    output = HostOutput([node.host.name for node in plan.nodes], console.put, is_folding=True)
    ended = EachHost(plan, connect=way_to(hosts), console=console, output=output, fails_fast=False).run()
    output.finish()
    console.drain()
    return ended, describe_failures(ended, plan), out.getvalue().decode()


def saying(rank: int, *answers: Frame | bytes) -> Change:
    """What the host says when it is told to start."""
    return after(Start, Started(rank, 7), *answers)


def good(rank: int) -> MemoryHost:
    return MemoryHost((rank,), saying(rank, Output(rank, 1, "fine\n"), Exited(rank, 0, 0, 1.0), Done(0)))


WRONG = [  # of the host with node rank 1
    (LaunchError("n1 port 22 refused the connection"), "n1 port 22 refused the connection"),
    (first(MAGIC, b"\xff\xff\xff\xff"),
     "not a frame: b'\\xff\\xff\\xff\\xff' would have 4294967295 bytes; at most 67108864 are allowed"),
    (first(MAGIC, HELLO, Done(0)), "its agent sent Done before the start"),
    (first(MAGIC, HELLO, Output(1, 1, "x\n")), "its agent sent Output before the start"),
    (after(Prepare, Problem("no", 0)), "its agent sent Problem with exit code 0"),
    (saying(1, Output(1, 9, "x\n")), "its agent sent Output with stream 9"),
    (saying(1, Output(0, 1, "x\n")), "its agent sent Output with rank 0, which is not on this host"),
    (saying(1, Exited(1, 256, 0, 1.0)), "its agent sent Exited with exit code 256"),
    (saying(1, Done(0)), "its agent sent Done, but 1 of its workers did not end"),
    (saying(1, b"\0\0\0\2[]"), "not a frame: b'[]'"),
    (saying(1, b""), "the connection ended before the job did"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "reason"), WRONG, ids=[reason for _, reason in WRONG])
def test_what_one_host_does_wrong_keeps_no_other_from_it(wrong: Change | Exception, reason: str) -> None:
    host = wrong if isinstance(wrong, Exception) else MemoryHost((1,), wrong)
    ended, sentences, out = run(good(0), host, good(2))
    assert ended.exit_code == 3
    assert sentences == [f"n1: {reason}"]
    assert out == "n[0,2]: fine\n"


def test_on_honest_hosts_it_ends_well() -> None:
    assert run(good(0), good(1)) == (HostsOutcome(failures=(), interrupted_by=None), [], "n[0-1]: fine\n")
