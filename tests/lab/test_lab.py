"""What the hosts of the lab are like, what can go wrong with them, and that nothing of them stays behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LAB_NAME
from tests.lab import Host, Lab, LabError, cgroup
from tests.lab.__main__ import FAULTS, main
from tests.lab.lab import CHECKOUT

SELF = f"{LAB_NAME}-self"  # of labs that a test makes for itself, beside the usual one
SOON_S = 10.0  # for things that take milliseconds on an idle machine
QUIET_S = 0.3  # how long "nothing comes" is watched; a reset or a line in this network takes less than 1 ms
BANNER = 'exec 3<>"/dev/tcp/$0/22" && read -r -t 0.3 -u 3 line && echo "$line"'
SERVER = """\
import socket
listener = socket.create_server(("", 5000)); print("listening", flush=True)
connection = listener.accept()[0]
while data := connection.recv(100): print(data.decode(), flush=True)
"""
CLIENT = """\
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000)); print("connected", flush=True)
try: end = connection.recv(100)
except ConnectionResetError: end = b""
print("closed", flush=True)
"""


@contextlib.contextmanager
def running(host: Host, *argv: str, **kwargs: Any) -> Iterator[subprocess.Popen[str]]:
    """A command on a host with pipes; killed and waited for at the end."""
    with host.popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **kwargs) as process:
        try:
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def connected(client: Host, server: Host) -> Iterator[subprocess.Popen[str]]:
    """A process on `client` with a connection to one on `server`; it prints `closed` once it hears of an end."""
    with running(server, sys.executable, "-c", SERVER) as listener:
        assert next_line(listener) == "listening"
        with running(client, sys.executable, "-c", CLIENT, server.address) as process:
            assert next_line(process) == "connected"
            yield process


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert is_readable(process, SOON_S), "no line came"
    return process.stdout.readline().rstrip("\n")


def is_readable(process: subprocess.Popen[str], timeout_s: float) -> bool:
    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], timeout_s)[0])


def eventually(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SOON_S
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def ssh(host: Host, target: str, command: str) -> subprocess.CompletedProcess[str]:
    return host.run(["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5", target, command])


def banner(host: Host, target: str) -> str:
    """What sshd of `target` says first; '' if nothing comes."""
    return host.run(["bash", "-c", BANNER, target]).stdout


# ---- a host ----------------------------------------------------------------------------------------------


def test_hosts_reach_each_other_by_name_and_by_address(lab: Lab) -> None:
    assert [host.name for host in lab.hosts] == ["head", "node1", "node2", "node3", "node4"]
    for target in lab.nodes:
        assert banner(lab.head, target.name).startswith("SSH-2.0-")
        assert banner(lab.nodes[0], target.address).startswith("SSH-2.0-")


def test_a_host_has_a_hostname_and_folders_of_its_own(lab: Lab) -> None:
    node1, node2 = lab.nodes[:2]
    for folder in ("/root", "/tmp", "/var/tmp", "/run", "/dev/shm", "/var/log"):
        node1.run(["touch", f"{folder}/mine"], check=True)
        assert node1.run(["ls", f"{folder}/mine"]).returncode == 0
        assert node2.run(["ls", f"{folder}/mine"]).returncode != 0
        assert not Path(folder, "mine").exists()
    assert (node1.home / "mine").exists()
    assert node1.run(["hostname"]).stdout == "node1\n"
    assert node1.run(["cat", "/etc/hosts"]).stdout.splitlines()[-1] == f"{lab.nodes[-1].address} node4"


def test_a_host_sees_its_own_processes_only(lab: Lab) -> None:
    with running(lab.head, "sleep", "1234"):
        listed = lab.nodes[0].run(["ps", "-e", "-o", "args="]).stdout
    assert "sleep 1234" not in listed
    assert "tests/lab/init.sh node1" in listed


def test_nothing_but_the_lab_can_be_reached(lab: Lab) -> None:
    assert (
        lab.head.run(["ip", "route"]).stdout
        == "10.77.0.0/16 dev eth0 proto kernel scope link src 10.77.0.1 \n"
    )


def test_a_command_has_the_environment_of_a_login(lab: Lab) -> None:
    assert sorted(lab.head.run(["env"], env={"COLOUR": "blue"}).stdout.splitlines()) == [
        "COLOUR=blue",
        "HOME=/root",
        "LANG=C.UTF-8",
        "LOGNAME=root",
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "PWD=/root",
        "SHELL=/bin/bash",
        "USER=root",
    ]
    assert lab.head.run(["pwd"]).stdout == "/root\n"
    assert lab.head.run(["pwd"], cwd="/usr").stdout == "/usr\n"


@pytest.mark.slow
def test_ssh_opens_every_node_from_the_head_and_from_other_nodes(lab: Lab) -> None:
    for host, target in ((lab.head, "node1"), (lab.head, lab.nodes[3].address), (lab.nodes[1], "node3")):
        done = ssh(host, target, "hostname; exit 7")
        assert (done.returncode, done.stderr) == (7, "")
        assert done.stdout.strip() in (target, "node4")


def test_checkout_and_python_are_visible_at_their_own_paths_and_read_only(lab: Lab) -> None:
    code = "import sys, pytest, tests.lab; print(sys.prefix, sys.base_prefix, tests.lab.__file__)"
    done = lab.nodes[0].run([sys.executable, "-c", code], cwd=CHECKOUT, check=True)
    assert done.stdout.split() == [sys.prefix, sys.base_prefix, f"{CHECKOUT}/tests/lab/__init__.py"]
    for folder in (CHECKOUT, sys.prefix, sys.base_prefix, "/usr", "/etc"):
        assert "Read-only file system" in lab.nodes[0].run(["touch", f"{folder}/written"]).stderr


def test_the_shared_folder_is_the_same_on_all_hosts(lab: Lab) -> None:
    lab.nodes[0].run(["sh", "-c", f"echo from node1 > {lab.shared}/note"], check=True)
    assert lab.nodes[1].run(["cat", lab.shared / "note"]).stdout == "from node1\n"
    (lab.shared / "note").unlink()
    assert lab.hostfile == lab.shared / "hostfile"
    assert lab.hostfile.read_text() == "node1 slots=2\nnode2 slots=2\nnode3 slots=2\nnode4 slots=2\n"


@pytest.mark.slow
def test_the_interface_counts_bytes(lab: Lab) -> None:
    node1, node2 = lab.nodes[:2]
    sent, received = node1.tx_bytes(), node2.rx_bytes()
    node1.run(["sh", "-c", "head -c 100000 /dev/zero | ssh node2 'cat >/dev/null'"], check=True)
    assert node1.tx_bytes() - sent > 100_000
    assert eventually(lambda: node2.rx_bytes() - received > 100_000)


# ---- commands on a host ----------------------------------------------------------------------------------


def test_a_signal_reaches_the_command_and_its_death_is_seen(lab: Lab) -> None:
    with running(lab.head, "sleep", "1000") as process:
        process.terminate()
        assert process.wait(SOON_S) == -signal.SIGTERM
    script = "trap 'echo caught; exit 3' INT; echo ready; while :; do read -r -t 0.01 || :; done"
    with running(lab.head, "bash", "-c", script) as process:
        assert next_line(process) == "ready"
        process.send_signal(signal.SIGINT)
        assert next_line(process) == "caught"
        assert process.wait(SOON_S) == 3


def test_a_command_ignores_no_signal_even_if_the_test_run_does(lab: Lab) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as under nohup or in the background of a script
    try:
        status = lab.head.run(["cat", "/proc/self/status"]).stdout
    finally:
        signal.signal(signal.SIGINT, before)
    assert "SigIgn:\t0000000000000000\n" in status


def test_a_value_of_the_environment_never_shows_in_a_command_line(lab: Lab) -> None:
    shown: list[str] = []
    for _ in range(10):
        with running(lab.head, "sleep", "1000", env={"TOKEN": "canary"}) as process:
            while "sleep 1000" not in shown[-1:]:
                shown += sorted(lab.head.commands(), key=lambda argv: argv == "sleep 1000")
            process.kill()
        shown.append("next round")
    assert not [argv for argv in shown if "canary" in argv]


def test_run_kills_the_command_at_its_time_limit(lab: Lab) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        lab.head.run(["sleep", "1000"], timeout=0.05)
    assert lab.wait_until_clean() == []


def test_run_keeps_bytes_that_are_not_text(lab: Lab) -> None:
    done = lab.head.run(["printf", r"\377 ok"])
    assert os.fsencode(done.stdout) == b"\xff ok"
    assert lab.head.run(["no-such-program"]).returncode == 127
    with pytest.raises(subprocess.CalledProcessError):
        lab.head.run(["false"], check=True)


def test_a_daemonised_grandchild_is_listed_until_it_is_gone(lab: Lab) -> None:
    lab.nodes[2].run(["sh", "-c", "(setsid sleep 1000 </dev/null >/dev/null 2>&1 &)"], check=True)
    assert eventually(lambda: [process.argv for process in lab.nodes[2].processes()] == ["sleep 1000"])
    ((host, process),) = lab.wait_until_clean(timeout_s=0)
    assert (host, process.argv) == ("node3", "sleep 1000")
    os.kill(process.pid, signal.SIGKILL)
    assert lab.wait_until_clean() == []


@pytest.mark.slow
def test_an_ssh_session_is_seen_by_its_command_and_by_ps(lab: Lab) -> None:
    with running(lab.head, "ssh", "node1", "echo started; exec sleep 1000") as process:
        assert next_line(process) == "started"
        assert eventually(lambda: [each.argv for each in lab.nodes[0].processes()] == ["sleep 1000"])
        assert [argv.split()[:2] for argv in lab.nodes[0].commands()[1:]] == [
            ["sshd:", "/usr/sbin/sshd"],
            ["sshd:", "root@notty"],
            ["sleep", "1000"],
        ]


# ---- what can go wrong -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_link_down_loses_carrier_and_link_up_brings_it_back(lab: Lab) -> None:
    node = lab.nodes[0]
    node.link_down()
    assert node.run(["cat", "/sys/class/net/eth0/carrier"]).stdout == "0\n"
    assert node.condition() == "link down"
    with pytest.raises(subprocess.TimeoutExpired):
        lab.head.run(["bash", "-c", BANNER, "node1"], timeout=QUIET_S)
    node.link_up()
    assert eventually(lambda: banner(lab.head, "node1") != "")
    assert node.condition() == "up"


@pytest.mark.slow
def test_a_silent_cut_is_silent(lab: Lab) -> None:
    node = lab.nodes[0]
    with connected(lab.head, node) as client:
        node.unplug()
        node.kill_processes()  # the kernel of node1 tells the other side, but nobody hears it
        assert not is_readable(client, QUIET_S)
        assert node.run(["cat", "/sys/class/net/eth0/carrier"]).stdout == "1\n"
        assert node.condition() == "unplugged"
        node.plug()
        assert next_line(client) == "closed"


@pytest.mark.slow
def test_die_is_heard_and_poweroff_is_not(lab: Lab) -> None:
    node = lab.nodes[0]
    with connected(lab.head, node) as client:
        node.die()
        assert next_line(client) == "closed"
    assert node.condition() == "down"
    assert "Connection refused" in ssh(lab.head, "node1", "true").stderr
    assert node.processes() == []
    with pytest.raises(LabError, match="node1: is down"):
        node.run(["true"])

    node.boot()
    assert ssh(lab.head, "node1", "hostname").stdout == "node1\n"
    with connected(lab.head, node) as client:
        node.poweroff()
        assert not is_readable(client, QUIET_S)
    node.boot()
    assert eventually(lambda: ssh(lab.head, "node1", "hostname").stdout == "node1\n")


@pytest.mark.slow
def test_a_frozen_host_stands_still_until_it_is_thawed(lab: Lab) -> None:
    node = lab.nodes[0]
    with running(node, "sh", "-c", "while echo tick; do sleep 0.01; done") as process:
        assert next_line(process) == "tick"
        node.freeze()
        assert process.stdout is not None
        while is_readable(process, 0):
            os.read(process.stdout.fileno(), 1 << 16)  # what it wrote before
        assert not is_readable(process, QUIET_S)
        assert (node.condition(), banner(lab.head, "node1")) == ("frozen", "")
        node.thaw()
        assert is_readable(process, SOON_S)


def test_a_frozen_host_can_die(lab: Lab) -> None:
    with running(lab.nodes[0], "sleep", "1000") as process:
        lab.nodes[0].freeze()
        lab.nodes[0].die()  # would hang if a frozen process could not be killed
        assert process.returncode == -signal.SIGKILL
    assert lab.nodes[0].condition() == "down"


@pytest.mark.slow
def test_sshd_stops_continues_dies_and_starts(lab: Lab) -> None:
    node = lab.nodes[0]
    node.sshd_stop()
    silent = lab.head.run(["bash", "-c", BANNER, "node1"])
    assert (silent.returncode > 128, silent.stdout, silent.stderr) == (True, "", "")  # read's time was up
    node.sshd_continue()
    assert eventually(lambda: banner(lab.head, "node1").startswith("SSH-2.0-"))
    node.sshd_kill()
    assert "Connection refused" in lab.head.run(["bash", "-c", BANNER, "node1"]).stderr
    node.sshd_start()
    assert banner(lab.head, "node1").startswith("SSH-2.0-")


@pytest.mark.slow
def test_a_new_host_key_is_refused_until_the_first_one_is_back(lab: Lab) -> None:
    node = lab.nodes[0]
    node.new_host_key()
    node.new_host_key()
    assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in ssh(lab.head, "node1", "true").stderr
    lab.restore()
    assert ssh(lab.head, "node1", "true").returncode == 0


@pytest.mark.slow
def test_a_port_is_refused_or_dropped_until_rules_are_cleared(lab: Lab) -> None:
    node = lab.nodes[0]
    node.refuse_port(22)
    assert "Connection refused" in ssh(lab.head, "node1", "true").stderr
    node.clear()
    node.drop_port(22)
    with pytest.raises(subprocess.TimeoutExpired):
        lab.head.run(["bash", "-c", BANNER, "node1"], timeout=QUIET_S)
    node.clear()
    assert banner(lab.head, "node1").startswith("SSH-2.0-")


@pytest.mark.slow
def test_limits_of_cpu_and_memory_hold(lab: Lab) -> None:
    node = lab.nodes[0]
    node.limit_memory(50_000_000)
    assert node.run([sys.executable, "-c", "b'x' * 100_000_000"]).returncode == -signal.SIGKILL
    node.limit_cpu(0.1)
    spin = "import time; end = time.monotonic() + 0.5\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    assert float(node.run([sys.executable, "-c", spin]).stdout) < 0.25


@pytest.mark.slow
def test_restore_takes_back_every_fault_and_every_addition(lab: Lab) -> None:
    first, second, third, fourth = lab.nodes
    (first.home / ".ssh" / "config").write_text("Host *\n  Port 1\n")
    (first.home / ".ssh" / "known_hosts").write_text("")
    (first.home / ".bashrc").write_text("echo noise\n")
    (first.home / ".deepspeed_env").mkdir()
    first.run(["touch", "/tmp/mine", "/dev/shm/mine"], check=True)
    first.unplug()
    second.freeze()
    third.drop_port(22)
    third.sshd_stop()
    third.link_down()
    fourth.poweroff()
    lab.head.sshd_kill()
    abandoned = lab.head.popen(["sleep", "1000"])
    lab.restore()
    assert abandoned.returncode == -signal.SIGKILL
    assert [host.condition() for host in lab.hosts] == ["up"] * 5
    assert sorted(path.name for path in (first.home / ".ssh").iterdir()) == [
        "authorized_keys",
        "id_ed25519",
        "id_ed25519.pub",
        "known_hosts",
    ]
    assert first.run(["ls", "-A", "/tmp", "/dev/shm"]).stdout == "/dev/shm:\n\n/tmp:\n"
    assert not (first.home / ".bashrc").exists()
    assert eventually(lambda: ssh(first, "node4", "hostname").stdout == "node4\n")
    for host in lab.hosts:
        assert eventually(lambda name=host.name: banner(first, name) != "")  # type: ignore[misc]


# ---- a lab from its beginning to its end -----------------------------------------------------------------


def traces() -> list[str]:
    """Everything on this machine that bears the name of these tests' own labs, or runs in one of them."""
    found = [str(path) for path in Path("/run").glob(f"netns/*{SELF}*")]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/**/dslaunch-{SELF}-*")]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if SELF in line]
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += [argv for argv in [file.read_bytes().decode(errors="replace")] if f"/{SELF}/" in argv]
    found += [line for line in links().splitlines() if "node1" in line]
    return found


def links() -> str:
    return subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def own_lab(lab: Lab) -> Iterator[Callable[..., Lab]]:
    """`Lab.up` for labs of a test's own, beside the usual one; what is up at the end is taken down."""

    def up(num_hosts: int = 1, **options: Any) -> Lab:
        return Lab.up(num_hosts, name=SELF, wait_s=0, replace=True, **options)

    yield up
    with contextlib.suppress(LabError):
        Lab.attach(SELF).down()
    assert traces() == []


@pytest.mark.slow
def test_nothing_is_left_after_down(own_lab: Callable[..., Lab]) -> None:
    links_before = links()
    with own_lab(2) as made:
        command = made.head.popen(["sleep", "1000"])
        daemon = ["sh", "-c", "(setsid sleep 1000 </dev/null >/dev/null 2>&1 &)"]
        made.nodes[1].run(daemon, check=True)
        ((_, orphan),) = [each for each in made.processes() if each[0] == "node2"]
        made.nodes[1].freeze()
        made.nodes[0].limit_memory(1 << 30)
        assert len(traces()) > 5
    assert command.returncode == -signal.SIGKILL
    assert not Path(f"/proc/{orphan.pid}").exists()
    assert traces() == []
    assert links() == links_before
    assert not made.shared.exists()


CRASHING = f"""\
import sys
from tests.lab import Lab
lab = Lab.up(2, name={SELF!r}, wait_s=0, replace=True)
sleep = lab.nodes[1].popen(["sleep", "1000"])
lab.nodes[1].freeze()
print(sleep.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_up_cleans_what_a_killed_process_left(own_lab: Callable[..., Lab]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CRASHING],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
    ) as maker:
        pid = int(next_line(maker))
        with pytest.raises(LabError, match=f"held by process {maker.pid} "):
            own_lab(1)
        maker.kill()
    assert Path(f"/proc/{pid}").exists()
    with own_lab(1) as made:
        assert eventually(lambda: not Path(f"/proc/{pid}").exists())
        assert made.nodes[0].run(["hostname"]).stdout == "node1\n"
        assert not any("node2" in trace for trace in traces())


@pytest.mark.slow
def test_a_detached_lab_stays_up_and_can_be_attached(own_lab: Callable[..., Lab]) -> None:
    with own_lab(2) as made:
        made.detach()
    with pytest.raises(LabError, match="left up here by hand"):
        Lab.up(1, name=SELF, wait_s=0)
    with Lab.attach(SELF) as found:
        assert [host.name for host in found.hosts] == ["head", "node1", "node2"]
        assert found.host("node2").run(["hostname"]).stdout == "node2\n"
    Lab.attach(SELF).down()
    with pytest.raises(LabError, match="no lab is up"):
        Lab.attach(SELF)


@pytest.mark.slow
def test_a_folder_below_tmp_can_be_shared(own_lab: Callable[..., Lab], tmp_path: Path) -> None:
    with own_lab(1, shared=[tmp_path]) as made:
        made.nodes[0].run(["touch", tmp_path / "seen"], check=True)
        made.restore()
        assert made.head.run(["ls", tmp_path]).stdout == "seen\n"
        assert made.head.run(["ls", "/tmp"]).stdout == f"{tmp_path.relative_to('/tmp').parts[0]}\n"


@pytest.mark.slow
def test_without_cgroups_the_lab_comes_up_and_refuses_freeze_by_name(
    own_lab: Callable[..., Lab], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "own_folder", lambda controller: None)
    with own_lab(1) as made:
        with pytest.raises(LabError, match="node1: no cgroup controller 'freezer'"):
            made.nodes[0].freeze()
        with pytest.raises(LabError, match="node1: no cgroup controller 'cpu'"):
            made.nodes[0].limit_cpu(0.5)
        with running(made.nodes[0], "sleep", "1000"):
            assert eventually(lambda: [each.argv for each in made.nodes[0].processes()] == ["sleep 1000"])
        made.nodes[0].die()
        made.restore()


@pytest.mark.parametrize(
    ("num_hosts", "shared", "message"),
    [
        (0, [], "0 hosts; allowed are 1 to 399; ask for fewer"),
        (400, [], "400 hosts; allowed are 1 to 399"),
        (1, [Path("relative")], "relative: must be the absolute path of a folder"),
        (1, [Path("/no/such/folder")], "/no/such/folder: must be the absolute path of a folder"),
    ],
)
def test_what_cannot_be_made_is_refused(lab: Lab, num_hosts: int, shared: list[Path], message: str) -> None:
    with pytest.raises(LabError, match=message):
        Lab.up(num_hosts, shared=shared, name=SELF, wait_s=0)


def test_a_host_that_is_not_there_is_answered_with_those_that_are(lab: Lab) -> None:
    with pytest.raises(LabError, match="'node5': hosts are head, node1, node2, node3, node4"):
        lab.host("node5")


@pytest.mark.slow
@pytest.mark.parametrize(("setting", "outcome"), [("", "skipped"), ("required", "error")])
def test_where_no_lab_can_be_made_tests_skip_or_fail_with_the_reason(
    lab: Lab, setting: str, outcome: str
) -> None:
    test = f"{Path(__file__).relative_to(CHECKOUT)}::test_nothing_but_the_lab_can_be_reached"
    done = subprocess.run(
        [
            "setpriv",
            "--bounding-set=-sys_admin",
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            test,
        ],
        env={**os.environ, "DSLAUNCH_LAB": setting},
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"1 {outcome}" in done.stdout
    assert "this kernel or container refuses what a host is made of: unshare: unshare failed" in done.stdout


# ---- by hand ---------------------------------------------------------------------------------------------


def by_hand(*argv: str) -> int:
    return main(["--name", SELF, *argv])


@pytest.mark.slow
def test_the_lab_by_hand(own_lab: Callable[..., Lab], capsys: pytest.CaptureFixture[str]) -> None:
    assert by_hand("up", "2") == 0
    told = capsys.readouterr().out
    assert "node2     10.77.0.3" in told
    assert f"hostfile  {Lab.attach(SELF).hostfile} " in told
    assert by_hand("fault", "node1", "refuse-port", "22") == 0
    assert by_hand("fault", "node2", "unplug") == 0
    with running(Lab.attach(SELF).host("node1"), "sleep", "1000"):
        assert eventually(lambda: by_hand("ps") == 0 and "sleep 1000" in capsys.readouterr().out)
    assert by_hand("status") == 0
    told = capsys.readouterr().out
    assert [line.split()[2] for line in told.splitlines()[1:4]] == ["up", "up", "unplugged"]
    assert by_hand("up", "0") == 0
    assert by_hand("down") == 0
    assert capsys.readouterr().out == "down: 3 hosts\nno lab was up\n"


@pytest.mark.slow
def test_exec_by_hand_ends_with_the_status_of_the_command(own_lab: Callable[..., Lab]) -> None:
    own_lab(1).detach()
    for command, status in (("hostname; exit 7", 7), ("kill -TERM $$", 143)):
        argv = [sys.executable, "-m", "tests.lab", "--name", SELF, "exec", "node1", "--", "sh", "-c", command]
        done = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fault", "node1", "unplugg"], "'unplugg': no such fault; nearest: unplug, plug"),
        (["fault", "node1", "drop-port"], "drop-port: takes one argument, given None"),
        (["fault", "node1", "unplug", "22"], "unplug: takes no argument, given '22'"),
        (["fault", "node9", "unplug"], "'node9': hosts are head, node1, node2, node3, node4"),
        (["fault", "node1", "drop-port", "ssh"], "drop-port ssh: must be a number"),
        (["exec", "node1"], "no command given"),
        (["--name", "none", "ps"], "/var/lib/dslaunch-lab/none: no lab is up"),
    ],
)
def test_a_slip_by_hand_is_answered_in_one_line(
    lab: Lab, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--name", LAB_NAME, *argv]) == 1
    told = capsys.readouterr().err
    assert told.startswith(f"lab: {message}")
    assert told.count("\n") == 1


def test_every_fault_can_be_made_by_hand() -> None:
    not_faults = {"condition"}
    methods = {name for name, value in vars(Host).items() if callable(value) and not name.startswith("_")}
    assert {kind.replace("-", "_") for kind in FAULTS} == methods - not_faults
