"""What is said of a worker that fails: whole jobs on this machine, and on hosts with little memory."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.lab import Lab, LabError
from tests.launcher.command import Command
from tests.launcher.local_job import Job, Start, poll

pytestmark = pytest.mark.slow


@pytest.fixture
def start(start: Start) -> Start:
    """Starts a job of this worker text with these options; it writes a report."""
    return lambda worker, *words, **given: start(worker, "--report=report.json", *words, **given)


def report(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((job.folder / "report.json").read_text())
    return found


def last_words(job: Job) -> list[str]:
    """What the launcher says after the job, without pids."""
    _, _, text = job.err.partition("; it failed first\n")
    return [re.sub(r"pid \d+", "pid N", line) for line in text.splitlines()]


# Tracebacks.


def test_the_traceback_is_shown_whole_even_if_it_is_long_and_not_the_end(start: Start) -> None:
    job = start(
        """
        import atexit
        def fail(depth):
            if depth == 0: raise ValueError('the reason')
            (fail if depth % 2 else lambda depth: fail(depth))(depth - 1)
        atexit.register(lambda: print('closing', *range(3), sep='\\n', file=sys.stderr))
        fail(30)
        """
    )
    assert job.wait() == 1
    assert last_words(job) == ["dslaunch: its traceback stands above: ValueError: the reason"]
    prefix = "localhost:0 | "
    shown = [line.removeprefix(prefix) for line in job.err.splitlines() if line.startswith(prefix)]
    culprit = report(job)["culprit"]
    assert len(culprit["traceback"]) > 60
    assert shown == [*culprit["traceback"], "closing", "0", "1", "2"]
    assert culprit["last_lines"][-2:] == ["1", "2"]
    assert culprit["last_lines_of"] == "stderr"
    assert (culprit["evidence"], culprit["message"]) == ([], "")


def test_what_torch_records_is_shown_although_the_worker_says_nothing(start: Start) -> None:
    job = start(
        """
        import json, traceback
        try:
            raise KeyError('the reason')
        except KeyError as error:
            stack = {'py_callstack': traceback.format_exc(), 'timestamp': '1790000000'}
        with open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w') as file:
            json.dump({'message': {'message': "KeyError: 'the reason'", 'extraInfo': stack}}, file)
        sys.exit(1)
        """
    )
    assert job.wait() == 1
    words = last_words(job)
    assert words[:2] == ["dslaunch: traceback of rank 0:", "    Traceback (most recent call last):"]
    assert words[-1] == "    KeyError: 'the reason'"
    assert report(job)["culprit"]["message"] == "KeyError: 'the reason'"


def test_a_worker_may_write_the_file_of_torch_itself(start: Start, tmp_path: Path) -> None:
    job = start(
        """
        import json
        path = os.environ['TORCHELASTIC_ERROR_FILE']
        say(path, oct(os.stat(os.path.dirname(path)).st_mode & 0o777), os.path.exists(path))
        with open(path, 'w') as file: json.dump({'message': 'disk 7 is full'}, file)
        open(f'said{rank}', 'w').close()
        while not os.path.exists(f'said{1 - rank}'): time.sleep(0.001)
        if rank: wait()
        sys.exit(4)
        """,
        "--num_gpus=2",
    )
    assert job.wait() == 4
    assert "dslaunch: it reported: disk 7 is full" in last_words(job)
    first, second = (job.lines(rank)[0].split() for rank in range(2))
    assert first[1:] == second[1:] == ["0o700", "False"]
    assert first[0] != second[0]
    assert os.path.dirname(first[0]) == os.path.dirname(second[0])
    poll(lambda: not os.path.exists(os.path.dirname(first[0])), "the end of the private folder")


@pytest.mark.parametrize("victim", ["agent", "keeper"])
def test_the_private_folder_is_removed_whoever_is_killed(victim: str, start: Start) -> None:
    job = start("say(os.environ['TORCHELASTIC_ERROR_FILE']); wait()")
    job.wait_for("localhost:0 | ")
    folder = os.path.dirname(job.lines(0)[0])
    assert os.path.isdir(folder)
    (job.agent if victim == "agent" else job.keeper)().kill()
    assert job.wait() != 0
    poll(lambda: not os.path.exists(folder), "the end of the private folder")


# Who and how.


def test_a_rank_that_ended_too_early_is_the_likely_cause_of_the_failure_of_the_one_that_lost_it(
    start: Start,
) -> None:
    job = start(
        """
        import socket
        if rank == 0:
            with socket.create_server(('127.0.0.1', 0)) as server:
                with open('port.new', 'w') as file: file.write(str(server.getsockname()[1]))
                os.rename('port.new', 'port')
                connection = server.accept()[0]
            if not connection.recv(1): raise RuntimeError('Connection closed by peer')
        while not os.path.exists('port'): time.sleep(0.001)
        sock = socket.create_connection(('127.0.0.1', int(open('port').read())))
        sock.close()
        time.sleep(0.2)  # as an interpreter with torch takes, to leave
        """,
        "--num_gpus=2",
    )
    assert job.wait() == 1
    cause = (
        "dslaunch: rank 1 ended with code 0 before the job was done, and rank 0 then failed with 'Connection "
        "closed by peer': that early end is the likely cause\n"
    )
    assert cause in job.err
    assert "it failed first" not in job.err
    assert job.err.index(cause) < job.err.index("dslaunch: rank 0 on localhost (local rank 0, pid ")
    (evidence,) = report(job)["culprit"]["evidence"]
    assert evidence.startswith("rank 1 had ended with 0 ")


def test_rank_0_that_fails_first_is_named_when_others_abort_50_ms_later(start: Start) -> None:
    """As when NCCL notices that a peer is gone; torchrun and DeepSpeed name another rank here."""
    job = start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open(f'writing{rank}', 'w') as file: file.write(str(os.getpid()))
        os.rename(f'writing{rank}', f'pid{rank}')
        while not all(os.path.exists(f'pid{one}') for one in range(3)): time.sleep(0.001)
        if rank == 0: sys.exit(9)
        while os.path.exists('/proc/' + open('pid0').read()): time.sleep(0.001)
        time.sleep(0.05)
        os.write(2, b'connection closed by peer\\n')
        os.abort()
        """,
        "--num_gpus=3",
    )
    assert job.wait() == 9
    assert re.search(r"dslaunch: rank 0 on localhost \(.*\) exited with code 9; it failed first", job.err)
    assert report(job)["culprit"]["rank"] == 0


def test_a_chain_of_failures_is_told_in_order(start: Start) -> None:
    """Each rank dies of the one before it, as fast as it can."""
    job = start(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with open(f'writing{rank}', 'w') as file: file.write(str(os.getpid()))
        os.rename(f'writing{rank}', f'pid{rank}')
        while not all(os.path.exists(f'pid{one}') for one in range(4)): time.sleep(0.001)
        if rank > 0:
            before = '/proc/' + open(f'pid{rank - 1}').read()
            while os.path.exists(before): pass
        os._exit(20 + rank)
        """,
        "--num_gpus=4",
    )
    assert job.wait() == 20
    assert "rank 0 on localhost" in job.err.partition("; it failed first")[0].splitlines()[-1]
    others = [one["rank"] for one in report(job)["others"]]
    assert others == sorted(others)


def test_a_rank_that_fails_is_named_with_its_place_on_the_mesh(start: Start) -> None:
    """Both that fail: the first, and the one that had failed before the job was stopped."""
    job = start(
        """
        if rank in (1, 3):
            open(f'ready{rank}', 'w').close()
            while not all(os.path.exists(f'ready{one}') for one in (1, 3)): time.sleep(0.001)
            sys.exit(40 + rank)
        wait()
        """,
        *("--num_gpus=4", "--mesh=pp=2,tp=2,order=tp-pp"),
    )
    assert job.wait() in (41, 43)
    found = report(job)
    places = {1: "stage 1 of 2, tp 0", 3: "stage 1 of 2, tp 1"}
    said = re.search(r"dslaunch: rank (\d) on localhost \((.+); local rank \d, pid \d+\) exited", job.err)
    assert said is not None
    assert said[2] == places[int(said[1])] == found["culprit"]["place"]
    for one in found["others"]:
        assert one["place"] == places[one["rank"]]
        assert f"also failed: rank {one['rank']} on localhost ({one['place']}; local rank" in job.err


IN_STAGES = """
import torch
import dslaunch
from dslaunch.runtime.compat.pipeline.module import PipelineModule

dslaunch.init_distributed()
layers = [torch.nn.Linear(4, 4) for _ in range(2)]
module = PipelineModule(layers, 2, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
dslaunch.initialize(model=module, config=config)
torch.distributed.barrier()
"""


def test_a_place_that_only_the_program_knows_is_told_by_the_runtime(start: Start) -> None:
    """No --mesh: the program itself has made the stages, of which the runtime has written."""
    job = start(
        """
        open(os.environ['DSLAUNCH_PLACE_FILE'], 'w').write(f'stage {rank} of 2')
        if rank == 1: raise ValueError('the reason')
        wait()
        """,
        "--num_gpus=2",
    )
    assert job.wait() == 1, job.err
    assert re.search(
        r"dslaunch: rank 1 on localhost \(stage 1 of 2; local rank 1, pid \d+\) exited with code 1; it "
        r"failed first\n",
        job.err,
    )
    assert report(job)["culprit"]["place"] == "stage 1 of 2"


@pytest.mark.exhaustive
def test_the_stage_of_a_rank_on_another_host_is_told(lab: Lab, folder: Path) -> None:
    """Two stages on two hosts, which the program alone knows."""
    (folder / "train.py").write_text(
        f"import os, signal\n{IN_STAGES}\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "while True: signal.pause()\n"
    )
    (folder / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    command = Command(lab.head, folder, "-H", "hosts", "--report=report.json", "train.py")
    assert command.wait(120.0) == 137, command.err
    assert re.search(
        r"dslaunch: rank 1 on node2 \(stage 1 of 2; local rank 0, pid \d+\) was killed by SIGKILL \(9\); it "
        r"failed first\n",
        command.err,
    )
    assert json.loads((folder / "report.json").read_text())["culprit"]["place"] == "stage 1 of 2"


def test_a_crash_is_named_with_its_signal_and_its_stack(start: Start) -> None:
    job = start(
        """
        import faulthandler
        faulthandler.enable()
        os.kill(os.getpid(), signal.SIGSEGV)
        """
    )
    assert job.wait() == 139
    assert "was killed by SIGSEGV (11); it failed first" in job.err
    assert "    Fatal Python error: Segmentation fault" in last_words(job)
    culprit = report(job)["culprit"]
    assert (culprit["kind"], culprit["signal_name"], culprit["code"]) == ("rank", "SIGSEGV (11)", 139)


def test_a_core_dump_is_told(start: Start) -> None:
    job = start(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
        os.kill(os.getpid(), signal.SIGQUIT)
        """
    )
    assert job.wait() == 131
    has_core = report(job)["culprit"]["core_dumped"]
    assert has_core == any(
        "evidence: core dumped (kernel.core_pattern is " in line for line in last_words(job)
    )
    for core in job.folder.glob("core*"):
        core.unlink()


def test_who_is_killed_by_somebody_is_not_said_to_lack_memory(start: Start) -> None:
    job = start("os.kill(os.getpid(), signal.SIGKILL)")
    assert job.wait() == 137
    culprit = report(job)["culprit"]
    assert not culprit["is_out_of_memory"]
    assert "SIGKILL" in culprit["evidence"][0]
    assert last_words(job) == [f"dslaunch: evidence: {culprit['evidence'][0]}"]


def test_stdout_is_shown_only_if_stderr_is_empty(start: Start) -> None:
    job = start("say('the reason'); sys.exit(5)")
    assert job.wait() == 5
    assert last_words(job) == ["dslaunch: last lines (stdout) of rank 0:", "    the reason"]


# Memory.

EAT = """
import os, sys, time
keep = []
if os.environ["RANK"] == "1":
    if "--child" in sys.argv:
        import subprocess
        done = subprocess.run([sys.executable, "-c", "x = [bytearray(1 << 20) for _ in range(4000)]"])
        sys.exit(f"my loader ended with {done.returncode}")
    while True:
        keep.append(b"x" * (1 << 20))
time.sleep(600)
"""
LIMIT = 192 << 20


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "eat.py").write_text(EAT)
    (folder / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    return folder


@pytest.fixture
def _little_memory(lab: Lab) -> None:
    """On node1; where this machine has no cgroups that could limit it, the test is skipped and says so."""
    try:
        lab.host("node1").limit_memory(LIMIT)
    except LabError as error:
        if os.environ.get("DSLAUNCH_LAB") == "required":
            raise
        pytest.skip(str(error))


@pytest.mark.usefixtures("_little_memory")
def test_a_worker_that_the_kernel_kills_for_memory_is_told_so(lab: Lab, folder: Path) -> None:
    command = Command(lab.head, folder, "-H", "hosts", "--report=report.json", "eat.py")
    assert command.wait() == 137, command.err
    assert "dslaunch: rank 1 on node1 (local rank 1, pid " in command.err
    assert "was killed by SIGKILL (9); it failed first" in command.err
    assert "dslaunch: evidence: the kernel killed it for memory (cgroup limit 192 MiB)\n" in command.err
    culprit = json.loads((folder / "report.json").read_text())["culprit"]
    assert culprit["is_out_of_memory"] is True
    assert lab.wait_until_clean(15.0) == []


@pytest.mark.usefixtures("_little_memory")
def test_a_worker_that_fails_because_its_child_was_killed_is_told_so(lab: Lab, folder: Path) -> None:
    command = Command(lab.head, folder, "-H", "hosts", "eat.py", "--child")
    assert command.wait() == 1, command.err
    evidence = "before it failed, the kernel killed a process here for memory (cgroup limit 192 MiB)"
    assert f"dslaunch: evidence: {evidence}\n" in command.err
    assert "    my loader ended with -9\n" in command.err


# Signals to the launcher.

SAVE = """
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]
def save(number, frame):
    time.sleep(float(sys.argv[-1]))
    pathlib.Path("saved-" + rank).write_text(signal.Signals(number).name)
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", os.getpid(), flush=True)
while True: signal.pause()
"""


def test_sigterm_to_the_launcher_lets_workers_on_all_hosts_save(lab: Lab, folder: Path) -> None:
    (folder / "save.py").write_text(SAVE)
    command = Command(lab.head, folder, "-H", "hosts", "--kill_grace=30", "save.py", "1")
    command.wait_for("ready", times=4)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 143
    assert [(folder / f"saved-{rank}").read_text() for rank in range(4)] == ["SIGTERM"] * 4
    assert lab.wait_until_clean(15.0) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(("grace_s", "num_saved"), [(30, 3), (1, 0)])
def test_when_a_rank_fails_the_others_may_save_for_as_long_as_the_grace(
    lab: Lab, folder: Path, grace_s: int, num_saved: int
) -> None:
    """Also for longer than the heartbeat, for the agents live on."""
    (folder / "save.py").write_text(SAVE)
    options = (f"--kill_grace={grace_s}", "--heartbeat=2")
    command = Command(lab.head, folder, "-H", "hosts", *options, "save.py", "5")
    command.wait_for("ready", times=4)
    lab.host("node2").run(["kill", "-9", command.lines("node2:3")[0].split()[-1]], check=True)
    assert command.wait() == 137
    assert len(list(folder.glob("saved-*"))) == num_saved
    assert "rank 3 on node2" in command.err
    assert "also failed" not in command.err
    assert lab.wait_until_clean(15.0) == []
