"""`--no_ssh` on several hosts, where there is no ssh to be found: one command per host, one end for all."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.exhaustive import few
from tests.lab import Host, Lab
from tests.launcher.command import BUSY_S, Command, poll

pytestmark = pytest.mark.slow

PORT = 29500
CLEAN_WITHIN_S = 15.0
WORK = """
import os, pathlib, socket, sys, time
rank, host = os.environ["RANK"], os.uname().nodename
print("up", rank, host, os.environ["FROM_FILE"], flush=True)
if "--meet" in sys.argv:  # as training does: all connect to rank 0
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    world_size = int(os.environ["WORLD_SIZE"])
    if rank == "0":
        with socket.create_server(("", where[1])) as server:
            ranks = {server.accept()[0].makefile("rb").readline().strip() for _ in range(world_size - 1)}
        print("met", len(ranks), flush=True)
    else:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                socket.create_connection(where, timeout=5).sendall(rank.encode() + b"\\n")
                break
            except OSError:
                time.sleep(0.05)
    sys.exit()
if "--daemon" in sys.argv and os.fork() == 0:
    os.setsid()
    time.sleep(600)
while not pathlib.Path("go").exists():
    time.sleep(0.01)
if f"--exit={rank}" in sys.argv:
    print("about to fail", file=sys.stderr, flush=True)
    sys.exit(3)
time.sleep(600)
"""


class Job:
    """The same command on the nodes of the lab; node 0 is node1."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.commands: list[Command] = []

    def start(self, place: int, *words: str, env: dict[str, str] | None = None) -> Command:
        host: Host = self.lab.nodes[place]
        folder = self.folder / f"{host.name}-{len(self.commands)}"
        folder.mkdir()
        command = Command(
            host,
            folder,
            *("--no_ssh", "-H", "hosts", f"--master_addr={self.lab.nodes[0].address}", "--kill_grace=2"),
            *words,
            env={"PATH": str(self.folder / "empty"), **(env or {})},
            cwd=str(self.folder),
        )
        self.commands.append(command)
        return command

    def start_all(self, *words: str) -> list[Command]:
        return [self.start(place, *words) for place in range(3)]

    def start_and_wait(self, *words: str) -> list[Command]:
        """All six ranks are up, and wait for the file `go`."""
        commands = self.start_all("--log_level=debug", *words)
        for command in commands:
            command.wait_for("up ", times=2)
        return commands

    def assert_clean(self) -> None:
        assert self.lab.wait_until_clean(CLEAN_WITHIN_S) == []


@pytest.fixture
def job(lab: Lab, request: pytest.FixtureRequest) -> Job:
    folder = lab.shared / request.node.name.replace("[", "-").replace("]", "")[:60]
    (folder / "empty").mkdir(parents=True)
    (folder / "work.py").write_text(WORK)
    (folder / "hosts").write_text("".join(f"{node.name} slots=2\n" for node in lab.nodes[:3]))
    (folder / ".deepspeed_env").write_text("FROM_FILE=value\n")
    return Job(lab, folder)


def codes(commands: list[Command]) -> list[int]:
    return [command.wait() for command in commands]


def test_three_nodes_train_together_and_know_themselves_by_their_names(job: Job) -> None:
    commands = job.start_all("work.py", "--meet")
    assert codes(commands) == [0, 0, 0], [one.err for one in commands]
    assert "node1:0 | met 5\n" in commands[0].out
    assert sorted(commands[2].out.splitlines()) == [
        "node3:4 | up 4 node3 value",
        "node3:5 | up 5 node3 value",
    ]
    job.assert_clean()


def test_a_rank_that_exits_with_3_ends_all_nodes_within_5_s(job: Job) -> None:
    commands = job.start_and_wait("work.py", "--exit=5", "--daemon")
    (job.folder / "go").touch()
    began = time.monotonic()
    assert codes(commands) == [3, 3, 3]
    assert time.monotonic() - began < 5 + BUSY_S
    for command in commands:
        assert "dslaunch: rank 5 on node3 (local rank 1, pid " in command.err
        assert "exited with code 3; it failed first" in command.err
    assert "what rank 5 wrote is in the output of node 2 (node3)" in commands[0].err
    assert "    about to fail\n" in commands[2].err
    job.assert_clean()


def test_a_launcher_killed_by_9_ends_all_others_with_3(job: Job) -> None:
    commands = job.start_and_wait("work.py", "--daemon")
    commands[1].process.kill()
    began = time.monotonic()
    assert codes([commands[0], commands[2]]) == [3, 3]
    assert time.monotonic() - began < 5 + BUSY_S
    for command in (commands[0], commands[2]):
        assert "dslaunch: node 1 (node2): the connection ended" in command.err
    job.assert_clean()


@pytest.mark.parametrize(
    ("place", "named"), few([(2, "node 2 (node3)"), (0, "node 0 (node1)")], lambda place, named: place == 0)
)
def test_a_cut_link_ends_all_within_the_heartbeat(job: Job, place: int, named: str) -> None:
    commands = job.start_and_wait("--heartbeat=2", "work.py", "--daemon")
    job.lab.nodes[place].unplug()
    began = time.monotonic()
    assert codes(commands) == [3, 3, 3]
    assert time.monotonic() - began < 2 + 2 + BUSY_S  # heartbeat, grace of workers that ignore nothing
    for other in {0, 1, 2} - {place}:
        assert f"dslaunch: {named}: nothing heard for 2 s" in commands[other].err
    job.assert_clean()


def test_a_hostfile_that_differs_ends_all_with_2(job: Job) -> None:
    (job.folder / "other").write_text("node1 slots=2\nnode2 slots=2\nnode3 slots=1\n")
    env = {"DSLAUNCH_TOKEN": "s3cret"}
    commands = [job.start(place, "work.py", env=env) for place in (0, 1)]
    commands.append(job.start(2, "-H", "other", "work.py", env=env))
    assert codes(commands) == [2, 2, 2]
    message = (
        "hostfile mismatch: node 2 has 3 hosts, 5 ranks: node1:0,1 node2:0,1 node3:0; "
        "node 0 has 3 hosts, 6 ranks: node1:0,1 node2:0,1 node3:0,1"
    )
    for command in commands:
        assert message in command.err
        assert command.out == ""
    job.assert_clean()


@pytest.mark.exhaustive
def test_a_node_that_does_not_come_is_named_by_all_others(job: Job) -> None:
    commands = [job.start(place, "--rendezvous_timeout=5", "work.py") for place in (0, 2)]
    assert codes(commands) == [3, 3]
    for command in commands:
        assert "dslaunch: node 1 (node2): it did not come within 5 s" in command.err
        assert command.out == ""
    job.assert_clean()


def test_node_0_that_does_not_come_is_named_too(job: Job) -> None:
    command = job.start(1, "--rendezvous_timeout=2", "work.py")
    assert command.wait() == 3
    address = job.lab.nodes[0].address
    assert f"dslaunch: node 0 (node1): it was not found at {address} within 2 s (port 29501: " in command.err
    job.assert_clean()


@pytest.mark.exhaustive
def test_a_second_node_0_is_told_where_the_first_is(job: Job) -> None:
    first = 1
    commands = {}
    for place in (first, 1 - first):
        commands[place] = job.start(place, "--node_rank=0", "work.py", "--meet")
        if place == first:
            poll(lambda: "waiting for" in commands[first].err, "a wait for the others", commands[first])
    assert commands[1].wait() == 2
    where = f"at {job.lab.nodes[0].address} port {PORT + 1}, where --master_addr leads"
    assert f"node 0 is here already, {where}; every node needs its own --node_rank" in commands[1].err
    others = [job.start(place, "work.py", "--meet") for place in (1, 2)]
    assert codes([commands[0], *others]) == [0, 0, 0], commands[0].err
    assert f"a node at {job.lab.nodes[1].address} that called itself node 0 was refused" in commands[0].err
    job.assert_clean()


@pytest.mark.exhaustive
def test_a_blocked_coordinator_port_is_said_and_the_job_trains(job: Job) -> None:
    job.lab.nodes[0].drop_port(PORT + 1)
    began = time.monotonic()
    commands = job.start_all("work.py", "--meet")
    assert codes(commands) == [0, 0, 0], [one.err for one in commands]
    assert time.monotonic() - began < 30
    assert "node1:0 | met 5\n" in commands[0].out
    assert "node 1 (node2) cannot reach the coordinator" in commands[0].err
    assert "node 2 (node3) cannot reach the coordinator" in commands[0].err
    for command in commands[1:]:
        assert "no coordinator: node 0 answers, but its coordinator's port does not" in command.err
    job.assert_clean()


@pytest.mark.exhaustive
def test_one_node_behind_a_firewall_does_not_take_the_failures_of_the_others_away(job: Job) -> None:
    """Rules are the host's own, for what comes in: so node 2 is told a port that is blocked,
    and node 1 is not.
    """
    node = job.lab.nodes[0]
    node.drop_port(4444)
    words = ("--log_level=debug", "work.py", "--exit=2")
    late = job.start(2, "--coordinator_port=4444", *words)
    commands = [job.start(0, *words), job.start(1, *words)]
    for command in (*commands, late):
        command.wait_for("up ", times=2)
    (job.folder / "go").touch()
    assert codes(commands) == [3, 3]
    assert "no coordinator" in late.err
    late.process.terminate()
    assert late.wait() == 143
    job.assert_clean()


@pytest.mark.parametrize(
    "variable",
    few(["SLURM_NODEID", "JOB_COMPLETION_INDEX"], lambda variable: variable == "JOB_COMPLETION_INDEX"),
)
def test_a_scheduler_says_who_is_who(job: Job, variable: str) -> None:
    (job.folder / "hosts").write_text("a slots=1\nb slots=1\nc slots=1\n")
    commands = [job.start(place, "work.py", "--meet", env={variable: str(place)}) for place in range(3)]
    assert codes(commands) == [0, 0, 0], [one.err for one in commands]
    assert commands[1].out == "b:1 | up 1 node2 value\n"
    job.assert_clean()


@pytest.mark.exhaustive
def test_nodes_are_started_in_any_order(job: Job) -> None:
    late = [job.start(2, "work.py", "--meet"), job.start(1, "work.py", "--meet")]
    poll(lambda: "waiting for node 0 at" in late[0].err, "node 0 being missed", late[0])
    first = job.start(0, "work.py", "--meet")
    assert codes([first, *late]) == [0, 0, 0], [one.err for one in (first, *late)]
    job.assert_clean()


@pytest.mark.exhaustive
def test_real_gloo_ranks_train_over_no_ssh(job: Job) -> None:
    """The master port that the coordinator answered on before the start is free for torch's store."""
    job.lab.nodes[0].refuse_port(PORT + 1)
    (job.folder / "gloo.py").write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "one = torch.ones(1); dist.all_reduce(one); print('sum', int(one), flush=True)\n"
        "dist.destroy_process_group()\n"
    )
    env = {"GLOO_SOCKET_IFNAME": "eth0"}
    words = ("--preload=torch", "gloo.py")  # imported once for both ranks of a node
    commands = [job.start(place, *words, env=env) for place in range(3)]
    assert codes(commands) == [0, 0, 0], [one.err for one in commands]
    assert sorted(commands[2].out.splitlines()) == ["node3:4 | sum 6", "node3:5 | sum 6"]
    job.assert_clean()
