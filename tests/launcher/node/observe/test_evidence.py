from __future__ import annotations

import json
import os
import resource
import signal
from pathlib import Path

import pytest
from hypothesis import example, given, strategies as st

from dslaunch.launcher.node.observe.evidence import (
    MAX_LINE_BYTES,
    MemoryWatch,
    Tail,
    evidence_of,
    is_in_kernel_log,
    last_traceback,
    memory_groups,
    read_error_file,
    read_place,
    size_of,
)
from tests.launcher.node.no_file import KINDS, put_no_file

EXITED_WITH_1 = 1 << 8
KILLED = int(signal.SIGKILL)
DUMPED_CORE = signal.SIGSEGV | 0x80

# Tracebacks.

PLAIN = [
    "Traceback (most recent call last):",
    '  File "a.py", line 1, in <module>',
    "    f()",
    "ValueError: x",
]
LONG = [PLAIN[0], *[f'  File "a.py", line {n}, in f{n}' for n in range(100)], "RecursionError: deep"]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ([], []),
        (["epoch 1", "ValueError: not from Python"], []),
        (PLAIN, PLAIN),
        (["epoch 1", *PLAIN, "[W socket.cpp] closed", "bye"], PLAIN),
        (LONG, LONG),
        ([*PLAIN[:-1], "KeyError: 'a'", *PLAIN], PLAIN),  # the last one counts
        (PLAIN[:-1], []),  # it was cut off, as by a SIGKILL
        ([*PLAIN, *PLAIN[:-1]], PLAIN),
        (PLAIN[:1], []),
        # torch.distributed says whose it is.
        ([f"[rank3]: {line}" for line in PLAIN], [f"[rank3]: {line}" for line in PLAIN]),
        # A message of several lines.
        (
            [*PLAIN, "\tMissing key: a", "\tMissing key: b", "end"],
            [*PLAIN, "\tMissing key: a", "\tMissing key: b"],
        ),
        # Both parts of a chain, which one link joins.
        (
            [*PLAIN, "", "During handling of the above exception, another exception occurred:", "", *PLAIN],
            [*PLAIN, "", "During handling of the above exception, another exception occurred:", "", *PLAIN],
        ),
        (
            [*PLAIN, "", "The above exception was the direct cause of the following exception:", "", *PLAIN],
            [*PLAIN, "", "The above exception was the direct cause of the following exception:", "", *PLAIN],
        ),
        # Python went on after this one.
        ([*PLAIN, "Exception ignored in: <function A.__del__ at 0x7f>", *PLAIN], PLAIN),
        (["Exception ignored in: <function A.__del__ at 0x7f>", *PLAIN], []),
        (["Exception in thread Thread-1 (work):", *PLAIN], PLAIN),
    ],
)
def test_the_last_complete_traceback_is_found(lines: list[str], found: list[str]) -> None:
    assert last_traceback(lines) == found


@example([*PLAIN[:2], "During handling of the above exception,", *PLAIN[:1], *PLAIN[:2], *PLAIN[:1]])
@given(st.lists(st.sampled_from([*PLAIN, "", "During handling of the above exception,", "x", "[rank1]: "])))
def test_a_traceback_is_a_part_of_what_was_written(lines: list[str]) -> None:
    found = last_traceback(lines)
    assert any(lines[start : start + len(found)] == found for start in range(len(lines) + 1))


@given(st.lists(st.text("ab\n", max_size=9)), st.integers(1, 4))
def test_a_tail_is_the_last_lines(pieces: list[str], num_lines: int) -> None:
    tail = Tail(num_lines)
    pieces = [piece + "\n" for piece in pieces]
    for piece in pieces:
        tail.add(piece.encode())
    assert tail.lines == "".join(pieces).split("\n")[:-1][-num_lines:]


def test_a_tail_keeps_the_beginning_of_a_very_long_line() -> None:
    tail = Tail(3)
    tail.add(b"a" * (MAX_LINE_BYTES + 7) + b"\nb\xff\n")
    assert tail.lines == ["a" * MAX_LINE_BYTES + " ... (7 bytes more)", "b\udcff"]


# torch's error file.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ("", [])),
        ("", ("", [])),
        ("[]", ("", [])),
        ('{"other": 1}', ("", [])),
        ('{"message": "words"}', ("words", [])),
        (
            json.dumps({"message": {"message": "E: x", "extraInfo": {"py_callstack": "T\n  F\nE: x\n"}}}),
            ("E: x", ["T", "  F", "E: x"]),
        ),
        ('{"message": {"message": "E: x"}}', ("E: x", [])),
        ('{"message": {"message": "E: x", "extraInfo": null}}', ("E: x", [])),
    ],
)
def test_what_torch_recorded_is_read(
    text: str | None, expected: tuple[str, list[str]], tmp_path: Path
) -> None:
    path = tmp_path / "error.json"
    if text is not None:
        path.write_text(text)
    assert read_error_file(str(path)) == expected


@pytest.mark.parametrize(
    ("written", "place"),
    [
        (b"stage 1 of 2, tp 0", "stage 1 of 2, tp 0"),
        (b"", ""),
        (b"\xff", ""),
        (b"stage 1\nof 2", ""),
        (b"\x1b[31m", ""),
        (b"x" * 10_000, "x" * 200),
    ],
)
def test_a_place_is_a_short_text_of_one_line(written: bytes, place: str, tmp_path: Path) -> None:
    path = tmp_path / "place"
    assert read_place(None) == read_place(str(path)) == ""
    path.write_bytes(written)
    assert read_place(str(path)) == place


# Memory.


class Machine:
    """A /proc and a memory cgroup `job` below a cgroup `slurm`, as files."""

    def __init__(self, folder: Path, version: int) -> None:
        self.version = version
        self.proc = folder / "proc"
        self.mount = folder / "cgroup"
        self.job = self.mount / "slurm" / "job"
        self.job.mkdir(parents=True)
        (self.proc / "self").mkdir(parents=True)
        mount = f"30 25 0:26 / {self.mount} rw - "
        if version == 1:
            self.write_self("9:cpu:/other\n4:memory,x:/slurm/job\n0::/unified\n")
            other = "31 25 0:27 / /nowhere rw - cgroup cgroup rw,cpu\n"
            (self.proc / "self" / "mountinfo").write_text(f"{other}{mount}cgroup cgroup rw,memory,x\n")
        else:
            self.write_self("0::/slurm/job\n")
            (self.proc / "self" / "mountinfo").write_text(f"{mount}cgroup2 cgroup2 rw\n")
        for group in (self.mount, self.job.parent, self.job):
            self.count(group, kills=0, hits=0)
            self.limit(group, None)

    def write_self(self, text: str) -> None:
        (self.proc / "self" / "cgroup").write_text(text)

    def count(self, group: Path, *, kills: int, hits: int) -> None:
        if self.version == 1:
            (group / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
            (group / "memory.failcnt").write_text(f"{hits}\n")
        else:
            (group / "memory.events").write_text(f"low 0\nmax 9\noom {hits}\noom_kill {kills}\n")

    def limit(self, group: Path, num_bytes: int | None) -> None:
        if self.version == 1:
            text = str(9223372036854771712 if num_bytes is None else num_bytes)
            (group / "memory.limit_in_bytes").write_text(text + "\n")
        else:
            (group / "memory.max").write_text(f"{'max' if num_bytes is None else num_bytes}\n")

    def watch(self) -> MemoryWatch:
        return MemoryWatch(proc=str(self.proc))


@pytest.fixture(params=[1, 2], ids=["v1", "v2"])
def machine(tmp_path: Path, request: pytest.FixtureRequest) -> Machine:
    return Machine(tmp_path, request.param)


def test_the_limit_that_was_hit_is_named(machine: Machine) -> None:
    machine.count(machine.job, kills=3, hits=5)  # from before
    machine.limit(machine.job.parent, 512 << 20)
    machine.limit(machine.job, 1 << 40)
    watch = machine.watch()
    machine.count(machine.job, kills=4, hits=5)
    machine.count(machine.job.parent, kills=4, hits=1)
    assert watch.explain(7, KILLED, is_our_kill=False) == (
        True,
        ["the kernel killed it for memory (cgroup limit 512 MiB)"],
    )


@pytest.mark.parametrize(
    ("most", "expected"),
    [(1 << 20, "cgroup limit 1 MiB"), ((1 << 20) - 4096, "the whole machine ran out of it")],
)
def test_a_limit_of_memory_with_swap_is_seen_by_the_most_that_was_used(
    most: int, expected: str, tmp_path: Path
) -> None:
    """As in a container of cgroup version 1 without swap: the kernel counts no hit of either limit."""
    machine = Machine(tmp_path, 1)
    machine.limit(machine.job, 1 << 20)
    (machine.job / "memory.memsw.limit_in_bytes").write_text(f"{1 << 20}\n")
    (machine.job / "memory.memsw.max_usage_in_bytes").write_text(f"{most}\n")
    watch = machine.watch()
    machine.count(machine.job, kills=1, hits=0)
    assert watch.explain(7, KILLED, is_our_kill=False)[1] == [f"the kernel killed it for memory ({expected})"]


def test_without_a_limit_it_was_the_machine(machine: Machine) -> None:
    watch = machine.watch()
    machine.count(machine.job, kills=1, hits=0)
    assert watch.explain(7, KILLED, is_our_kill=True)[1] == [
        "the kernel killed it for memory (the whole machine ran out of it)"
    ]


def test_one_kill_explains_one_worker(machine: Machine) -> None:
    machine.limit(machine.job, 4096)
    watch = machine.watch()
    machine.count(machine.job, kills=1, hits=1)
    assert watch.explain(7, KILLED, is_our_kill=False)[0]
    assert watch.explain(8, EXITED_WITH_1, is_our_kill=False) == (False, [])
    assert watch.explain(9, KILLED, is_our_kill=False) == (
        False,
        ["the kernel counts no lack of memory here, so a person or a program sent SIGKILL"],
    )
    assert watch.explain(9, KILLED, is_our_kill=True) == (False, [])


def test_a_worker_may_fail_because_its_child_was_killed(machine: Machine) -> None:
    watch = machine.watch()
    machine.limit(machine.job, 4096)
    machine.count(machine.job, kills=2, hits=9)
    assert watch.explain(7, EXITED_WITH_1, is_our_kill=False) == (
        True,
        ["before it failed, the kernel killed a process here for memory (cgroup limit 4 KiB)"],
    )
    assert watch.explain(8, EXITED_WITH_1, is_our_kill=False) == (False, [])


def test_where_nothing_can_be_read_it_says_where_to_look(tmp_path: Path) -> None:
    is_out_of_memory, (sentence,) = MemoryWatch(proc=str(tmp_path)).explain(-1, KILLED, is_our_kill=False)
    assert not is_out_of_memory
    assert "dmesg" in sentence


def test_a_limit_of_cpu_time_is_named_as_what_may_have_killed_a_worker(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: {resource.RLIMIT_CPU: (600, 600)}[kind])
    limit = "the limit of 600 s of CPU time that a process has here (ulimit -t)"
    _, (counted,) = machine.watch().explain(9, KILLED, is_our_kill=False)
    assert counted == f"it was not memory; it may be {limit}, or a person or a program sent SIGKILL"
    _, (hidden,) = MemoryWatch(proc=str(tmp_path / "none")).explain(9, KILLED, is_our_kill=False)
    assert hidden.startswith(f"who sent SIGKILL cannot be read here; it may be {limit}")


def test_in_a_container_the_path_may_be_one_of_the_host(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 2)
    mountinfo = machine.proc / "self" / "mountinfo"
    for path, root, folders in (
        ("/slurm/job", "/", [machine.job, machine.job.parent, machine.mount]),
        ("/docker/7", "/docker/7", [machine.mount]),
        ("/docker/7/slurm", "/docker/7", [machine.mount / "slurm", machine.mount]),
        ("/docker/8", "/docker/7", [machine.mount]),
        ("/docker/77", "/docker/7", [machine.mount]),
        ("/gone", "/", [machine.mount]),
        ("/../other", "/", [machine.mount]),
    ):
        machine.write_self(f"0::{path}\n")
        mountinfo.write_text(f"30 25 0:26 {root} {machine.mount} rw - cgroup2 cgroup2 rw\n")
        assert [group.folder for group in memory_groups(str(machine.proc))] == [str(one) for one in folders]


LOG = """\
<6>[   10.000001] Out of memory: Killed process 77 (python3) total-vm:1kB
<6>[ 5000.250000] Memory cgroup out of memory: Killed process 78 (my prog) total-vm:1kB, anon-rss:2kB
<6>[ 6000.000000] oom_reaper: reaped process 79 (python3)
"""


@pytest.mark.parametrize(
    ("pid", "since_s", "expected"),
    [
        (77, 5.0, True),
        (77, 20.0, False),
        (78, 20.0, True),
        (78, 5001.0, True),
        (7, 5.0, False),
        (79, 5.0, False),
    ],
)
def test_the_kernel_s_log_is_searched_for_the_pid(pid: int, since_s: float, expected: bool) -> None:
    assert is_in_kernel_log(LOG, pid, since_s=since_s) is expected


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"), (1000, "1000 bytes"), (4096, "4 KiB"), (512 << 20, "512 MiB"), (1 << 30, "1 GiB"),
        (3 << 29, "1536 MiB"), (50_000_000, "48 MiB"), (123 << 30, "123 GiB"), (50_000_000_000, "47 GiB"),
    ],
)  # fmt: skip
def test_sizes_are_readable(num_bytes: int, text: str) -> None:
    assert size_of(num_bytes) == text


# All together.


def tails(err: bytes, out: bytes = b"") -> dict[str, Tail]:
    made = {"err": Tail(500), "out": Tail(20)}
    made["err"].add(err)
    made["out"].add(out)
    return made


def test_last_lines_are_of_stderr_and_of_stdout_only_if_that_is_empty() -> None:
    many = b"".join(b"%d\n" % number for number in range(50))
    found = evidence_of(
        EXITED_WITH_1, facts=[], is_out_of_memory=False, error_file=None, **tails(many, b"out\n")
    )
    assert found["last_lines"] == [str(number) for number in range(30, 50)]
    assert found["last_lines_of"] == "stderr"
    found = evidence_of(
        EXITED_WITH_1, facts=[], is_out_of_memory=False, error_file=None, **tails(b"", b"out\n")
    )
    assert (found["last_lines"], found["last_lines_of"]) == (["out"], "stdout")


def test_a_core_is_told_with_the_place_where_it_goes() -> None:
    found = evidence_of(DUMPED_CORE, facts=["a"], is_out_of_memory=False, error_file=None, **tails(b""))
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    assert found["core_dumped"] is True
    assert found["evidence"] == ["a", f"core dumped (kernel.core_pattern is {pattern!r})"]


def test_full_shared_memory_explains_a_sigbus(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = os.statvfs("/")
    full = os.statvfs_result((4096, 4096, 16384, 0, 0, *disk[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    found = evidence_of(signal.SIGBUS, facts=[], is_out_of_memory=False, error_file=None, **tails(b""))
    assert found["evidence"] == ["/dev/shm is full (64 MiB)"]


def test_what_torch_recorded_comes_before_what_stands_in_stderr(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text(json.dumps({"message": {"message": "E: x", "extraInfo": {"py_callstack": "T\nE: x"}}}))
    err = "\n".join([*PLAIN, ""]).encode()
    found = evidence_of(EXITED_WITH_1, facts=[], is_out_of_memory=False, error_file=str(path), **tails(err))
    assert (found["message"], found["traceback"]) == ("E: x", ["T", "E: x"])
    path.unlink()
    found = evidence_of(EXITED_WITH_1, facts=[], is_out_of_memory=False, error_file=str(path), **tails(err))
    assert (found["message"], found["traceback"]) == ("", PLAIN)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_file_that_is_no_file_is_neither_followed_nor_waited_for(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    (tmp_path / "other.json").write_text('{"message": "of another"}')
    put_no_file(kind, path, linked=tmp_path / "other.json")
    assert read_error_file(str(path)) == ("", [])


@pytest.mark.parametrize(
    ("line", "is_told"),
    [
        ("train.py: error: unrecognized arguments: --local_rank=0", True),
        ("hostname: unrecognized option '--local_rank=0'", True),
        ("Error: No such option: --local_rank", True),
        ("FATAL Flags parsing error: Unknown command line flag 'local_rank'", True),
        ("getopt.GetoptError: option --local_rank not recognized", True),
        ("flag provided but not defined: -local_rank", True),
        ("error: unexpected argument '--local_rank' found", True),
        ("ERROR: Could not consume arg: --local_rank=0", True),
        ("local_rank 0 starts", False),
        ("unrecognized arguments: --lr=1", False),
        # It knows that one, and speaks of another.
        ("Error: No such option: -x Did you mean --local_rank?", False),
        ("FATAL Flags parsing error: Unknown command line flag 'x'. Did you mean: local_rank ?", False),
        ("train.py: error: unrecognized arguments: --local_rank_mode fast", False),
        ("train.py: error: unrecognized arguments: --my-local-rank=0", False),
        ("unexpected key local_rank in the state", False),
        ("warning: unknown argument --local_rank=0", False),
        ("unknown argument --local_rank=0 is ignored", False),
    ],
)
def test_a_program_that_does_not_know_local_rank_is_told_how_to_leave_it_out(
    line: str, is_told: bool
) -> None:
    assert bool(_facts(f"usage: train.py\n{line}\n")) == is_told


def test_other_arguments_that_the_program_does_not_know_are_named_too() -> None:
    (said,) = _facts("train.py: error: unrecognized arguments: --local_rank=0 -x --lr 1\n")
    assert said.endswith("; it does not know -x --lr either, of your command line")


def test_an_argument_that_dslaunch_did_not_add_is_not_put_down_to_it() -> None:
    assert _facts("error: unrecognized arguments: --local_rank=0\n", has_local_rank=False) == []


def test_a_program_that_went_on_and_raised_did_not_fail_of_an_argument() -> None:
    complaint = "unknown argument --local_rank=0\n"
    trace = 'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\n'
    assert _facts(f"{complaint}{trace}ValueError: no data\n") == []
    assert len(_facts(f"{trace}getopt.GetoptError: option --local_rank not recognized\n")) == 1


def test_a_program_that_a_signal_ended_did_not_fail_of_an_argument() -> None:
    assert _facts("unknown argument --local_rank=0\n", status=signal.SIGKILL) == []


def _facts(err: str, *, status: int = 2 << 8, has_local_rank: bool = True) -> list[str]:
    found = evidence_of(
        status,
        facts=[],
        is_out_of_memory=False,
        error_file=None,
        has_local_rank=has_local_rank,
        **tails(err.encode()),
    )
    return list(found["evidence"])
