"""`--no_ssh` on this machine: several commands that are nodes of one job, over 127.0.0.1."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from dslaunch.launcher.job.verdict import RankFailure, Verdict
from dslaunch.launcher.rendezvous.messages import (
    PROTOCOL,
    Go,
    Join,
    Joined,
    News,
    NewsDecoder,
    Proof,
    Welcome,
    encode_news,
)
from dslaunch.launcher.rendezvous.node_part import token_in, whole_verdict

pytestmark = pytest.mark.slow

TIMEOUT_S = 40.0
FORGOTTEN = ("CUDA_", "DS_ENV", "OMP", "PYTHON", "NCCL", "DSLAUNCH", "SLURM_", "JOB_COMPLETION", "COV_CORE")
HOSTS = "alpha slots=2\nbeta slots=1\n"
WORK = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
names = "RANK LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT CROSS_RANK NCCL_DEBUG FROM_FILE DSLAUNCH_TOKEN"
print("up", *(os.environ.get(name, "-") for name in names.split()), *sys.argv[1:], flush=True)
if f"--fail={rank}" in sys.argv:
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    words = [one[8:] for one in sys.argv if one.startswith("--words=")]
    time.sleep(0.5 if words else 0)  # as a rank takes, to notice that it lost another one
    print("about to fail", *words, file=sys.stderr, flush=True)
    sys.exit(3)
time.sleep(600 if "--wait" in sys.argv else 0)
"""


def poll(is_so: Callable[[], object], what: str, timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        time.sleep(0.01)


class Node:
    """One command of a job; its output goes to files."""

    def __init__(self, folder: Path, *words: str, env: dict[str, str] | None = None) -> None:
        base = {name: value for name, value in os.environ.items() if not name.startswith(FORGOTTEN)}
        self._out = folder / f"out-{id(self)}"
        self._err = folder / f"err-{id(self)}"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "dslaunch", "--no_ssh", *words],
                cwd=folder,
                env={**base, "HOME": str(folder), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"did not end within {timeout_s} s\n{self.out}\n{self.err}") from None


class Nodes:
    """Starts nodes that use ports of their own; nothing of them is left at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_ports()
        self._nodes: list[Node] = []
        (folder / "hosts").write_text(HOSTS)
        (folder / "work.py").write_text(WORK)

    def start(self, rank: int, *words: str, env: dict[str, str] | None = None) -> Node:
        common = ("-H", "hosts", "--master_addr=127.0.0.1", f"--master_port={self.port}", "--kill_grace=2")
        node = Node(self.folder, *common, f"--node_rank={rank}", *words, env=env)
        self._nodes.append(node)
        return node

    def both(self, *words: str) -> tuple[Node, Node]:
        return self.start(0, *words), self.start(1, *words)

    def end(self) -> None:
        for node in self._nodes:
            node.process.kill()
            node.process.wait()
        poll(lambda: not left_in(self.folder), "no process left", 15)


def left_in(folder: Path) -> list[int]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(folder):
                found.append(process.pid)
    return found


def free_ports() -> int:
    """A port that no process uses, and the one after it too."""
    while True:
        with socket.create_server(("", 0)) as first:
            port: int = first.getsockname()[1]
            with contextlib.suppress(OSError), socket.create_server(("", port + 1)):
                return port


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    made = Nodes(tmp_path)
    yield made
    made.end()


def test_each_node_runs_its_ranks_of_the_whole_job(nodes: Nodes) -> None:
    (nodes.folder / ".deepspeed_env").write_text("FROM_FILE=two words\n")
    env = {"NCCL_DEBUG": "INFO", "DSLAUNCH_TOKEN": "s3cret"}
    first = nodes.start(0, "work.py", "x y", env=env)
    second = nodes.start(1, "work.py", "x y", env=env)
    assert (first.wait(), second.wait()) == (0, 0), first.err + second.err
    assert sorted(first.out.splitlines()) == [
        f"alpha:0 | up 0 0 3 127.0.0.1 {nodes.port} 0 INFO two words - --local_rank=0 x y",
        f"alpha:1 | up 1 1 3 127.0.0.1 {nodes.port} 0 INFO two words - --local_rank=1 x y",
    ]
    assert second.out == (f"beta:2 | up 2 0 3 127.0.0.1 {nodes.port} 1 INFO two words - --local_rank=0 x y\n")


def test_the_first_failure_ends_all_and_its_words_stay_where_they_are(nodes: Nodes) -> None:
    first, second = nodes.both("work.py", "--fail=2", "--wait")
    poll(lambda: first.out.count("up") + second.out.count("up") == 3, "all up")
    (nodes.folder / "go").touch()
    assert (first.wait(), second.wait()) == (3, 3)
    for node in (first, second):
        assert "dslaunch: rank 2 on beta (local rank 0, pid " in node.err
        assert "exited with code 3; it failed first" in node.err
    assert "what rank 2 wrote is in the output of node 1 (beta)" in first.err
    assert "about to fail" not in first.err
    assert "    about to fail\n" in second.err


def test_a_node_that_ended_well_fails_with_a_later_failure_elsewhere(nodes: Nodes) -> None:
    first, second = nodes.both("work.py", "--fail=2")
    poll(lambda: first.out.count("up") + second.out.count("up") == 3, "all up")
    (nodes.folder / "go").touch()
    assert (first.wait(), second.wait()) == (3, 3)


def command_lines_below(node: Node) -> Iterator[list[str]]:
    """Of all processes that it started; those that have ended have none."""
    for one in psutil.Process(node.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie is one, too
            yield one.cmdline()


def test_node_0_names_ranks_elsewhere_that_ended_before_the_one_that_lost_them(nodes: Nodes) -> None:
    first, second = nodes.both("work.py", "--fail=0", "--words=Connection closed by peer")
    poll(lambda: "up 2" in second.out, "rank 2")
    poll(lambda: not any("work.py" in words for words in command_lines_below(second)), "the end of rank 2")
    (nodes.folder / "go").touch()
    assert first.wait() == second.wait() == 3
    assert (
        "ended with code 0 before the job was done, and rank 0 then failed with 'Connection closed by peer'"
        in first.err
    )
    assert "dslaunch: evidence: rank 2 had ended with 0 before" in first.err


def test_an_interrupt_of_one_node_ends_all(nodes: Nodes) -> None:
    first, second = nodes.both("work.py", "--wait")
    poll(lambda: first.out.count("up") + second.out.count("up") == 3, "all up")
    second.process.send_signal(signal.SIGTERM)
    assert (first.wait(), second.wait()) == (143, 143)
    assert "node 1 (beta): dslaunch was told to stop there, by SIGTERM (15)" in first.err


def test_a_node_that_is_killed_is_a_lost_host(nodes: Nodes) -> None:
    first, second = nodes.both("work.py", "--wait")
    poll(lambda: first.out.count("up") + second.out.count("up") == 3, "all up")
    second.process.kill()
    assert first.wait() == 3
    assert "dslaunch: node 1 (beta): " in first.err


def test_node_0_that_is_killed_ends_the_others(nodes: Nodes) -> None:
    first, second = nodes.both("work.py", "--wait")
    poll(lambda: first.out.count("up") + second.out.count("up") == 3, "all up")
    first.process.kill()
    assert second.wait() == 3
    assert "dslaunch: node 0 (alpha): the connection to it ended" in second.err


@pytest.mark.exhaustive
@pytest.mark.parametrize("sleeper", [0, 1])
def test_a_node_that_stood_still_says_so_and_blames_no_other(nodes: Nodes, sleeper: int) -> None:
    both = nodes.both("--heartbeat=2", "work.py", "--wait")
    for node in both:
        poll(lambda node=node: "up" in node.out, "the start")
    still, other = both[sleeper], both[1 - sleeper]
    still.process.send_signal(signal.SIGSTOP)
    assert other.wait() == 3
    still.process.send_signal(signal.SIGCONT)
    assert still.wait() == 3
    name, others_name = ("node 0 (alpha)", "node 1 (beta)")[:: -1 if sleeper else 1]
    assert f"dslaunch: {name}: nothing heard for " in other.err
    last = still.err.splitlines()[-1]
    assert "this machine stood still for " in last
    assert "keep this machine awake" in last
    assert others_name not in still.err


def test_a_problem_before_the_start_is_told_to_all(nodes: Nodes) -> None:
    first = nodes.start(0, "work.py")
    second = nodes.start(1, "--venv_script=missing", "work.py")
    assert (first.wait(), second.wait()) == (3, 3)
    assert "node 1 (beta): --venv_script=missing ended with 1: no such file" in first.err
    assert first.out == second.out == ""


def rank_failure(rank: int, host: str, *last_lines: str) -> RankFailure:
    return RankFailure(
        rank=rank, local_rank=0, host=host, pid=1, code=rank, signal=0, at_s=0.0, last_lines=last_lines
    )


def verdict_of(*failures: RankFailure, interrupted_by: int | None = None) -> Verdict:
    return Verdict(
        culprit=failures[0], others=failures[1:], interrupted_by=interrupted_by, phases_s=(), ran_s=1.0
    )


def test_the_last_word_of_node_0_counts_more_than_what_was_told_first() -> None:
    """A rank that fell with the culprit was the first that was heard of."""
    ours, theirs = rank_failure(1, "alpha", "our words"), rank_failure(2, "beta")
    assert whole_verdict(verdict_of(ours), told=theirs).culprit == theirs
    assert whole_verdict(verdict_of(theirs, ours), told=rank_failure(1, "alpha")).culprit == ours
    assert whole_verdict(verdict_of(ours), told=theirs, all_failures=(theirs, ours)).others == (ours,)
    assert whole_verdict(verdict_of(ours), told=None) == verdict_of(ours)
    interrupted = verdict_of(ours, interrupted_by=2)
    assert whole_verdict(interrupted, told=theirs) == interrupted


def test_without_a_coordinator_each_node_is_on_its_own(nodes: Nodes) -> None:
    (nodes.folder / "go").touch()
    first, second = nodes.both("--coordinator_port=0", "work.py", "--fail=0")
    assert (first.wait(), second.wait()) == (3, 0)
    assert "coordinator" not in first.err + second.err


@pytest.mark.exhaustive
def test_a_busy_coordinator_port_is_said_by_all_and_the_job_runs(nodes: Nodes) -> None:
    with socket.create_server(("", nodes.port + 1)):
        first, second = nodes.both("work.py")
        assert (first.wait(), second.wait()) == (0, 0), first.err + second.err
    assert f"no coordinator: port {nodes.port + 1} cannot be used here (Address already in use)" in first.err
    assert "node 1 (beta) cannot reach the coordinator" in first.err
    assert "no coordinator: node 0 answers, but its coordinator's port does not" in second.err
    assert "A failure on another node will not stop this one" in second.err


def test_a_busy_master_port_is_an_error_on_all(nodes: Nodes) -> None:
    with socket.create_server(("", nodes.port)):
        first, second = nodes.both("work.py")
        assert (first.wait(), second.wait()) == (2, 2)
    for node in (first, second):
        assert f"--master_port={nodes.port} is in use here" in node.err
    assert first.out == second.out == ""


def test_a_wrong_token_keeps_a_node_out_and_the_job_goes_on(nodes: Nodes) -> None:
    first = nodes.start(0, "work.py", env={"DSLAUNCH_TOKEN": "right"})
    wrong = nodes.start(1, "work.py", env={"DSLAUNCH_TOKEN": "wrong"})
    assert wrong.wait() == 2
    assert (
        "its DSLAUNCH_TOKEN, or the scheduler's number of its job where that is not set, is not" in wrong.err
    )
    second = nodes.start(1, "work.py", env={"DSLAUNCH_TOKEN": "right"})
    assert (first.wait(), second.wait()) == (0, 0), first.err + second.err
    assert "a node at 127.0.0.1 that called itself node 1 was refused" in first.err
    assert "right" not in first.err.replace("right one", "")


def test_a_second_node_with_the_same_rank_is_told_at_once_and_the_job_goes_on(nodes: Nodes) -> None:
    first = nodes.start(0, "work.py", "--wait")
    poll(lambda: "waiting for beta" in first.err, "node 0")
    second = nodes.start(0, "work.py", "--wait")
    assert second.wait() == 2
    assert second.err == (
        f"dslaunch: node 0 is here already, at 127.0.0.1 port {nodes.port + 1}, where --master_addr leads; "
        "every node needs its own --node_rank\n"
    )
    both_ones = [nodes.start(1, "work.py", "--wait") for _ in range(2)]
    poll(lambda: any(one.process.poll() is not None for one in both_ones), "the end of one of them")
    (told,) = [one for one in both_ones if one.process.poll() is not None]
    assert told.wait() == 2
    assert (
        "node 1 is here already; every node needs its own --node_rank; the output of node 0 says from"
        in told.err
    )
    poll(lambda: "that called itself node 1 was refused" in first.err, "the warning of node 0")
    assert "that called itself node 0 was refused: node 0 is here already, from here" in first.err
    assert "node 1 is here already, from 127.0.0.1" in first.err


def test_other_arguments_are_a_mismatch_and_not_shown(nodes: Nodes) -> None:
    env = {"SLURM_JOB_ID": "77"}
    first = nodes.start(0, "work.py", "--password=a", env=env)
    second = nodes.start(1, "work.py", "--password=b", env=env)
    assert (first.wait(), second.wait()) == (2, 2)
    for node in (first, second):
        assert (
            "program mismatch: node 1 was started with another script or other arguments than node 0"
            in node.err
        )
        assert "password" not in node.err


def test_without_a_token_a_node_with_another_hostfile_is_sent_away_and_the_others_wait(nodes: Nodes) -> None:
    (nodes.folder / "other").write_text("alpha slots=2\nbeta slots=7\n")
    first = nodes.start(0, "work.py")
    wrong = nodes.start(1, "-H", "other", "work.py")
    assert wrong.wait() == 2
    assert "hostfile mismatch: node 1 has another one than node 0; give all nodes the same" in wrong.err
    assert "(this node has 2 hosts, 9 ranks: alpha:0,1 beta:0,1,2,3,4,5,6)" in wrong.err
    second = nodes.start(1, "work.py")
    assert (first.wait(), second.wait()) == (0, 0), first.err + second.err
    assert "hostfile mismatch: node 1 has another one; node 0 has 2 hosts, 3 ranks" in first.err


class Impostor:
    """Answers as a coordinator that does not know the token, and keeps what it was told."""

    def __init__(self, port: int) -> None:
        self.heard: list[News] = []
        self._server = socket.create_server(("", port))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self._server.accept()[0] as sock:
                    self._answer(sock)

    def _answer(self, sock: socket.socket) -> None:
        sock.settimeout(10)
        sock.sendall(encode_news(Welcome(PROTOCOL, "n")) + encode_news(Proof("00")))
        decoder = NewsDecoder()
        while data := sock.recv(1 << 16):
            news = decoder.feed(data)
            self.heard += news
            if any(isinstance(one, Join) for one in news):
                sock.sendall(encode_news(Joined(30.0)) + encode_news(Go()))

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self._thread.join(10)


def test_a_coordinator_that_does_not_know_the_token_starts_nothing_and_hears_no_names(nodes: Nodes) -> None:
    impostor = Impostor(nodes.port + 1)
    try:
        node = nodes.start(1, "--rendezvous_timeout=2", "work.py", env={"DSLAUNCH_TOKEN": "right"})
        assert node.wait() == 3
    finally:
        impostor.close()
    assert node.out == ""
    assert "it does not know this job's token, so it is not node 0" in node.err
    assert "alpha" not in repr(impostor.heard)


@pytest.mark.parametrize(
    ("environ", "token"),
    [
        ({}, ""),
        ({"SLURM_JOB_ID": "7", "PMIX_NAMESPACE": "step"}, "SLURM_JOB_ID=7"),
        ({"SLURM_JOB_ID": "7", "SLURM_HET_JOB_ID": "6"}, "SLURM_HET_JOB_ID=6"),
        ({"SLURM_JOB_ID": "7", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "n"}, "PMIX_NAMESPACE=n"),
        ({"SLURM_JOB_ID": "7", "OMPI_COMM_WORLD_SIZE": "2"}, ""),
        ({"PBS_JOBID": "7.head"}, "PBS_JOBID=7.head"),
        ({"SLURM_JOB_ID": "7", "DSLAUNCH_TOKEN": "mine"}, "mine"),
    ],
)
def test_the_token_is_what_all_nodes_of_the_job_share(environ: dict[str, str], token: str) -> None:
    assert token_in(environ) == token


def test_one_node_needs_no_coordinator_and_no_address(nodes: Nodes) -> None:
    node = Node(
        nodes.folder,
        *("-H", "hosts", "-i", "beta", "--node_rank=0", f"--master_port={nodes.port}", "work.py"),
    )
    assert node.wait() == 0, node.err
    assert node.out.startswith(f"beta:0 | up 0 0 1 127.0.0.1 {nodes.port}")


def test_options_about_connections_are_named_as_without_effect(nodes: Nodes) -> None:
    node = nodes.start(1, "--dry_run", "--ssh_port=22", "--connect_window=3", "work.py")
    assert node.wait() == 0
    assert node.err.splitlines() == [
        "dslaunch: warning: no effect with --no_ssh, which connects to no host: --ssh_port, "
        "--connect_window; leave that out"
    ]


def test_a_dry_run_says_which_node_this_is(nodes: Nodes) -> None:
    node = nodes.start(1, "--dry_run", "work.py")
    assert node.wait() == 0, node.err
    assert "host beta (node 1, by its own dslaunch), devices 0" in node.out
    assert node.out.endswith(f"\nthis is node 1 (beta); coordinator on node 0, port {nodes.port + 1}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-H", "hosts", "--node_rank=0"],
         "--no_ssh needs --master_addr: the address by which all nodes reach node 0 (alpha"),
        (["--node_rank=0"], "--no_ssh needs a hostfile"),
        (["-H", "hosts", "--master_addr=x", "--node_rank=2"],
         "--node_rank=2 is not one of the 2 hosts, 0 to 1"),
        (["-H", "hosts", "--master_addr=x"],
         "which node is this? Tried --node_rank (not given), SLURM_NODEID (not set)"),
        (["-H", "hosts", "--master_addr=x", "--node_rank=0", "--master_port=5", "--coordinator_port=5"],
         "--coordinator_port=5 is the master port too"),
        (["-H", "hosts", "--master_addr=x", "--node_rank=0", "--max_restarts=1"],
         "--no_ssh starts nothing again and takes no spares (--max_restarts, --spares, --min_nodes, "
         "--max_nodes, --elastic_training, --notice_file, --notice_command); leave them out, and let the "
         "program that starts the nodes do "
         "that: backoffLimit of a Kubernetes Job"),
        (["--launcher=local"], "--no_ssh and --launcher=local exclude each other"),
        (["-H", "auto", "--node_rank=0", "--master_addr=x"],
         "auto: slots=auto (gamma) cannot be used with --no_ssh"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(nodes: Nodes, words: list[str], message: str) -> None:
    (nodes.folder / "auto").write_text("gamma slots=auto\n")
    node = Node(nodes.folder, *words, "work.py")
    assert node.wait() == 2
    (line,) = node.err.splitlines()
    assert message in line
