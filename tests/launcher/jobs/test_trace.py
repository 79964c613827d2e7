"""--trace: steps of a job's ranks in one file, and where their time went."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.detached_job import tell
from tests.launcher.local_job import Job, Start, assert_short
from tests.launcher.trace.test_merge import Event, load
from tests.small_disk import small_disk_at

pytestmark = pytest.mark.slow

SHIFT_S = 5000
IN_ITS_OWN_TIME = ("unshare", "--time", "--fork", f"--monotonic={SHIFT_S}", "--")
TRAINING_S = 120.0  # torch is imported, on a machine that may be busy

# Four units; what it is asked to do is in its variables.
TRAIN = """
    import torch
    from torch import nn
    import dslaunch
    print('clock', time.monotonic(), flush=True)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    stage = {'stage': 3, 'stage3_param_persistence_threshold': 0, 'reduce_bucket_size': 5000}
    config = {'train_micro_batch_size_per_gpu': 4, 'zero_optimization': stage}
    config['optimizer'] = {'type': 'AdamW', 'params': {'lr': 1e-3}}
    engine, *_ = dslaunch.initialize(model=model, config=config)
    for step in range(1, 5):
        engine.backward(engine(torch.ones(4, 64)).square().mean())
        engine.step()
        if os.environ.get('KILLED') == f'{rank} after {step}':
            os.kill(os.getpid(), signal.SIGKILL)
    units = [unit.name for unit in engine._model.units if unit.sub_buffers]
    print('units', *units, sep='|', flush=True)
"""

# What a rank writes that is traced, without the time that torch takes.
WRITE = """
    import json
    def trace(steps, *, end='whole'):
        path = os.environ.get('DSLAUNCH_TRACE_FILE')
        if path is None:
            return
        now = time.monotonic_ns()
        lines = [{'rank': rank, 'thread': 1, 'clock': [now, time.time_ns(), 0]}]
        for step in steps:
            began, ended = now + step * 10**6, now + (step + 1) * 10**6
            spans = [['forward', 'forward', began, ended, 1]]
            lines.append({'step': step, 'began': began, 'ended': ended, 'spans': spans})
        if end is not None:
            lines.append({'end': end, 'problem': '', 'num_dropped': 0, 'clock': lines[0]['clock']})
        with open(path + '.spans', 'w') as file:
            file.writelines(json.dumps(line) + '\\n' for line in lines)
        if end is None:
            return
        with open(path + '.torch.json', 'w') as file:
            json.dump({'traceEvents': []}, file)
"""


def writing(program: str) -> str:
    return textwrap.dedent(WRITE) + textwrap.dedent(program)


def slices(events: list[Event]) -> dict[int, list[Event]]:
    """By rank."""
    found: dict[int, list[Event]] = defaultdict(list)
    for one in events:
        if one["ph"] == "X":
            found[one["pid"]].append(one)
    return found


def _has_time_namespaces() -> bool:
    try:
        return subprocess.run([*IN_ITS_OWN_TIME, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def test_a_job_is_traced_on_hosts_whose_clocks_differ(start: Start, tmp_path: Path) -> None:
    """Both hosts are this machine, and the second has a clock that is 5000 s ahead, where that is allowed."""
    is_shifted = _has_time_namespaces()
    prefix = f' exec_prefix="{" ".join(IN_ITS_OWN_TIME)}"' if is_shifted else ""
    (tmp_path / "hosts").write_text(f"localhost slots=1\n127.0.0.1 devices=1{prefix}\n")
    (tmp_path / "result.txt").write_text("mine")
    job = start(textwrap.dedent(TRAIN), "-H", "hosts", "--trace=2-3", "--collect", "result.txt")
    assert job.wait(TRAINING_S) == 0, job.err
    clocks = [float(line.split()[-1]) for line in job.out.splitlines() if " clock " in line]
    assert (abs(clocks[0] - clocks[1]) > SHIFT_S / 2) == is_shifted
    units = next(line.partition("|")[2].split("|") for line in job.lines(0) if line.startswith("units"))
    assert len(units) == 4
    ranks = slices(load(tmp_path / "trace-train.json.gz"))
    assert sorted(ranks) == [0, 1]
    sends = []
    for found in ranks.values():
        names = [one["name"] for one in found]
        for unit in units:
            assert f"all_gather of unit '{unit}'" in names
            assert f"reduce_scatter of unit '{unit}'" in names
            assert f"forward of {unit}" in names
            assert f"update of unit '{unit}'" in names
        assert [name for name in names if name.startswith("step ")] == ["step 2", "step 3"]
        assert "aten::addmm" in names
        about = [one for one in found if one["cat"] == "communication"]
        sends.append({(one["args"]["key"], one["name"]): one for one in about})
    # No rank has a collective before every other one has come to it.
    assert sends[0].keys() == sends[1].keys()
    error_us = 1000.0 if "brought together, to" not in job.err else _error_us(job)
    for key, one in sends[0].items():
        other = sends[1][key]
        assert one["ts"] + one["dur"] >= other["ts"] - 2 * error_us, (one, other)
        assert other["ts"] + other["dur"] >= one["ts"] - 2 * error_us, (one, other)
    assert (tmp_path / "collected" / "localhost" / "result.txt").read_text() == "mine"
    told = tell(tmp_path, "trace", "trace-train.json.gz")
    assert told.code == 0
    printed = [line.removeprefix("dslaunch: ") for line in job.err.splitlines()]
    assert "where the time of steps 2-3 went:" in printed
    assert [line for line in told.out.splitlines() if line] == [
        line for line in printed if line in told.out.splitlines() and line
    ]
    assert_short(job)
    job.assert_nothing_is_left()


def _error_us(job: Job) -> float:
    (line,) = [one for one in job.err.splitlines() if "brought together, to" in one]
    return float(line.split()[-2]) * 1000


def test_a_rank_that_is_killed_is_named_with_what_is_missing(start: Start, tmp_path: Path) -> None:
    program = """
        trace([1, 2] if rank == 1 else [1, 2, 3], end=None if rank == 1 else 'whole')
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    """
    job = start(writing(program), "--num_gpus=2", "--trace=1-3", "--trace_ranks=all", "--kill_grace=5")
    assert job.wait() == 137
    found = slices(load(tmp_path / "trace-train.json.gz"))
    assert [one["name"] for one in found[1] if one["cat"] == "step"] == ["step 1", "step 2"]
    assert "dslaunch: warning: --trace: rank 1: without step 3: it was killed by SIGKILL" in job.err
    assert "rank 1: torch's operators are missing: the rank ended before it wrote them" in job.err
    assert_short(job)
    job.assert_nothing_is_left()


@pytest.mark.exhaustive
def test_of_a_rank_that_is_killed_in_its_training_the_steps_are_there(start: Start, tmp_path: Path) -> None:
    job = start(
        textwrap.dedent(TRAIN),
        "--num_gpus=2",
        "--trace=1-4",
        "--trace_ranks=1,0",
        "--kill_grace=1",
        env={"KILLED": "1 after 3"},
    )
    assert job.wait(TRAINING_S) == 137, job.err
    found = slices(load(tmp_path / "trace-train.json.gz"))
    assert [one["name"] for one in found[1] if one["cat"] == "step"] == ["step 1", "step 2", "step 3"]
    assert "dslaunch: warning: --trace: rank 1: without step 4: it was killed by SIGKILL" in job.err
    assert "rank 1: torch's operators are missing: the rank ended before it wrote them" in job.err
    assert "dslaunch: warning: --trace: rank 0: without step 4: " in job.err


def test_the_first_rank_of_each_host_is_traced_unless_others_are_named(start: Start, tmp_path: Path) -> None:
    job = start(writing("trace([5])"), "--num_gpus=3", "--trace=5")
    assert job.wait() == 0, job.err
    assert "dslaunch: trace of 1 rank, " in job.err
    assert slices(load(tmp_path / "trace-train.json.gz")).keys() == {0}
    job = start(writing("trace([5])"), "--num_gpus=3", "--trace=5", "--trace_ranks=1-2", "--collect=train.py")
    assert job.wait() == 0, job.err
    assert (tmp_path / "collected" / "localhost" / "train.py").is_file()
    found = slices(load(tmp_path / "trace-train-2.json.gz"))  # the first one is still there
    assert found.keys() == {1, 2}
    job = start("pass", "--num_gpus=3", "--trace=5-6", "--trace_ranks=0,2", "--dry_run")
    assert job.wait() == 0
    assert job.out.endswith("traced: step 5-6 of rank 0,2\n")


def test_steps_that_were_never_made_are_said(start: Start, tmp_path: Path) -> None:
    program = """
        if rank < 2:
            trace([] if rank else [10], end='the program ended')
    """
    job = start(writing(program), "--num_gpus=3", "--trace=10-12", "--trace_ranks=all")
    assert job.wait() == 0
    assert "dslaunch: warning: --trace: rank 0: without steps 11-12: the program ended" in job.err
    assert "dslaunch: warning: --trace: rank 1: without steps 10-12: the program ended" in job.err
    assert (
        "dslaunch: warning: --trace: rank 2: it has written nothing; does its program train with "
        "dslaunch.initialize(), or call dslaunch.report(step=...)?"
    ) in job.err
    job = start(writing("trace([], end='the program ended')"), "--trace=10-12", "--trace_to=none.json")
    assert job.wait() == 0
    assert "dslaunch: warning: --trace: no rank has made a step of 10-12, so there is no file" in job.err
    assert not (tmp_path / "none.json").exists()
    job.assert_nothing_is_left()


def test_where_no_file_can_be_written_the_times_are_said_all_the_same(start: Start, tmp_path: Path) -> None:
    program = "trace([10], end='whole'); os.mkdir('taken.json')"
    job = start(writing(program), "--trace=10", f"--trace_to={tmp_path}/taken.json")
    assert job.wait() == 0
    assert "dslaunch: where the time of step 10 went" in job.err
    assert f"dslaunch: --trace: {tmp_path}/taken.json: Is a directory; give --trace_to a file" in job.err
    assert [one.name for one in tmp_path.glob("taken*")] == ["taken.json"]


LARGE = """
    trace([10], end='whole')
    event = {'ph': 'X', 'cat': 'cpu_op', 'name': 'aten::mm', 'pid': 1, 'tid': 1, 'dur': 1.5}
    with open(os.environ['DSLAUNCH_TRACE_FILE'] + '.torch.json', 'w') as file:
        lines = [json.dumps({**event, 'ts': time.time_ns() / 1e3 + 2 * i}) for i in range(200000)]
        file.write('{"traceEvents": [' + ','.join(lines) + ']}')
    sys.exit(int(os.environ.get('CODE', '0')))
"""


def test_an_interrupt_while_a_trace_is_put_together_gives_up_the_trace_alone(
    start: Start, tmp_path: Path
) -> None:
    words = ("--trace=10", "--num_gpus=1", "--report=report.json", "--max_restarts=1", "--min_uptime=0")
    job = start(writing(LARGE), *words, env={"CODE": "3"})
    job.wait_for_err("of the ranks together")
    job.signal(signal.SIGINT)
    assert job.wait() == 130, job.err  # a job that failed is not started again
    assert "dslaunch: warning: --trace: SIGINT (2) while it was written, so there is no file" in job.err
    assert "exited with code 3" in job.err
    (attempt,) = json.loads((tmp_path / "report.json").read_text())["attempts"]
    assert attempt["exit_code"] == 3
    assert not list(tmp_path.glob("trace-*"))
    job.assert_nothing_is_left()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 160 KiB."""
    with small_disk_at(tmp_path / "small", "size=160k") as folder:
        yield folder


def test_a_trace_that_does_not_fit_here_is_not_blamed_on_the_program(start: Start, small_disk: Path) -> None:
    program = """
        trace([10])
        with open(os.environ['DSLAUNCH_TRACE_FILE'] + '.spans', 'a') as file:
            file.write('x' * 100000)  # there once, and not a second time
    """
    job = start(writing(program), "--trace=10", "--num_gpus=1", env={"TMPDIR": str(small_disk)})
    assert job.wait() == 0, job.err
    assert "trace-0.spans cannot be written: No space left on device" in job.err
    assert "dslaunch: warning: --trace: rank 0: what it has written was not brought" in job.err
    assert "does its program" not in job.err


def test_a_detached_job_leaves_its_trace_where_the_command_was_given(start: Start, tmp_path: Path) -> None:
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}
    job = start(writing("trace([1])"), "--trace=1", "--detach", "--name=night", env=state)
    assert job.wait() == 0, job.err
    told = tell(tmp_path, "attach", "night")
    assert told.code == 0, told
    assert slices(load(tmp_path / "trace-night.json.gz")).keys() == {0}
    assert "dslaunch: trace of 1 rank" in told.err
    job.assert_nothing_is_left()


def test_a_later_attempt_takes_no_trace_away(start: Start, tmp_path: Path) -> None:
    program = """
        again = os.environ['TORCHELASTIC_RESTART_COUNT'] != '0'
        trace([9] if again else [1, 2])
        sys.exit(0 if again else 3)
    """
    job = start(writing(program), "--trace=1-9", "--max_restarts=1", "--min_uptime=0")
    assert job.wait() == 0, job.err
    for name, steps in (("trace-train.json.gz", ["step 1", "step 2"]), ("trace-train-2.json.gz", ["step 9"])):
        found = slices(load(tmp_path / name))[0]
        assert [one["name"] for one in found if one["cat"] == "step"] == steps


def test_without_ssh_each_node_writes_its_own(start: Start, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("here slots=2\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ("-H", "hosts", "--no_ssh", "--node_rank=0", "--master_addr=127.0.0.1", f"--master_port={port}")
    job = start(writing("trace([1])"), *words, "--trace=1", "--trace_ranks=all")
    assert job.wait() == 0, job.err
    assert slices(load(tmp_path / "trace-train-node0.json.gz")).keys() == {0, 1}
    job.assert_nothing_is_left()
