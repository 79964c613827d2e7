"""Jobs on several real hosts through SSH: who runs where, with what, and how a login is refused."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.exhaustive import few
from tests.lab import Lab
from tests.launcher.command import Command

pytestmark = pytest.mark.slow

SHOW = """
import json, os, sys
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE"]
names += ["MASTER_ADDR", "MASTER_PORT"]
print(json.dumps({"host": os.uname().nodename, "argv": sys.argv[1:],
                  "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
                  **{name: os.environ.get(name) for name in names}}))
"""
DUMP = """
import os, sys
data = b"\\0".join(os.fsencode(a) for a in sys.argv[1:]) + b"\\1" + b"\\0".join(
    os.environb[k] for k in sorted(os.environb) if k.startswith(b"PROBE_"))
open("dump-" + os.environ["RANK"], "wb").write(data)
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "show.py").write_text(SHOW)
    (folder / "dump.py").write_text(DUMP)
    return folder


def shown(command: Command) -> list[dict[str, str]]:
    """What the ranks of a show.py job printed, in rank order."""
    assert command.wait() == 0, command.err
    found = [json.loads(line.partition(" | ")[2]) for line in command.out.splitlines()]
    return sorted(found, key=lambda one: int(one["RANK"]))


def test_every_slot_of_every_host_gets_a_rank_in_hostfile_order(lab: Lab, folder: Path) -> None:
    command = Command(lab.head, folder, "-H", "hosts", "show.py", "--lr", "1e-3")
    ranks = shown(command)
    assert [(one["host"], one["RANK"], one["LOCAL_RANK"]) for one in ranks] == [
        (f"node{1 + rank // 2}", str(rank), str(rank % 2)) for rank in range(8)
    ]
    assert {one["WORLD_SIZE"] for one in ranks} == {"8"}
    assert {one["LOCAL_SIZE"] for one in ranks} == {one["LOCAL_WORLD_SIZE"] for one in ranks} == {"2"}
    assert [one["CROSS_RANK"] for one in ranks] == [str(rank // 2) for rank in range(8)]
    assert {one["CROSS_SIZE"] for one in ranks} == {"4"}
    assert {one["MASTER_ADDR"] for one in ranks} == {lab.host("node1").address}
    assert {one["MASTER_PORT"] for one in ranks} == {"29500"}
    assert [one["argv"] for one in ranks] == [
        [f"--local_rank={rank % 2}", "--lr", "1e-3"] for rank in range(8)
    ]
    assert {one["cuda"] for one in ranks} == {None}, "no GPUs here, so no CUDA_VISIBLE_DEVICES"
    assert "node1, node2, node3, node4: no GPU here: 2 CPU workers" in command.err
    for node in lab.nodes:
        assert {line.partition(":")[0] for line in command.out.splitlines()} >= {node.name}


@pytest.mark.parametrize(
    ("words", "expected"),
    few(
        [
            (["-e", "node2:0@node3"], {"node1": 2, "node2": 1, "node4": 2}),
            (["--num_nodes=2", "--num_accelerators=1"], {"node1": 1, "node2": 1}),
        ],
        lambda words, expected: words[0] == "-e",  # the others: tests of inputs/selection.py
    ),
)
def test_hosts_and_slots_can_be_chosen(
    lab: Lab, folder: Path, words: list[str], expected: dict[str, int]
) -> None:
    ranks = shown(Command(lab.head, folder, "-H", "hosts", *words, "show.py"))
    hosts = [one["host"] for one in ranks]
    assert {host: hosts.count(host) for host in hosts} == expected


def test_one_remote_host_runs_there_and_not_here(lab: Lab, folder: Path) -> None:
    ranks = shown(Command(lab.head, folder, "-H", "hosts", "-i", "node3:1", "show.py"))
    assert [one["host"] for one in ranks] == ["node3"]


def test_this_machine_in_the_hostfile_needs_no_ssh(lab: Lab, folder: Path) -> None:
    lab.head.sshd_kill()
    (folder / "hosts").write_text("head slots=1\nnode1 slots=1\n")
    ranks = shown(Command(lab.head, folder, "-H", "hosts", "show.py"))
    assert [one["host"] for one in ranks] == ["head", "node1"]
    assert {one["MASTER_ADDR"] for one in ranks} == {lab.head.address}


def test_force_multi_reaches_this_machine_by_ssh_too(lab: Lab, folder: Path) -> None:
    (folder / "hosts").write_text("head slots=1\n")
    lab.head.sshd_kill()
    command = Command(lab.head, folder, "-H", "hosts", "--force_multi", "show.py")
    assert command.wait() == 3
    assert "refused the connection" in command.err


@pytest.mark.usefixtures("way")
def test_ssh_config_is_honoured_through_a_jump_host(lab: Lab, folder: Path) -> None:
    jump, target = lab.host("node1"), lab.host("node2")
    (lab.head.home / ".ssh" / "config").write_text(
        f"Host inner\n  HostName {target.address}\n  User root\n  Port 22\n  ProxyJump {jump.name}\n"
        "  IdentityFile ~/.ssh/id_ed25519\n"
        f"Host piped\n  HostName {target.address}\n  ProxyCommand ssh -W %h:%p {jump.name}\n"
    )
    for name in ("inner", "piped"):
        (folder / "hosts").write_text(f"{name} slots=1\n")
        command = Command(lab.head, folder, "-H", "hosts", "--report", "report.json", "show.py")
        assert [one["host"] for one in shown(command)] == ["node2"]
        assert command.out.startswith(f"{name}:0 | "), "the output carries the hostfile's name"


def test_a_busy_default_port_is_moved_and_an_explicit_one_refused(lab: Lab, folder: Path) -> None:
    node = lab.host("node1")
    listen = (
        "import socket, time; s = socket.create_server(('', 29500)); print('up', flush=True); time.sleep(600)"
    )
    blocker = node.popen(["python3", "-c", listen], stdout=subprocess.PIPE)
    assert blocker.stdout is not None
    assert blocker.stdout.readline() == b"up\n"
    command = Command(lab.head, folder, "-H", "hosts", "--num_nodes=2", "show.py")
    ports = {one["MASTER_PORT"] for one in shown(command)}
    assert len(ports) == 1
    assert ports != {"29500"}
    assert f"node1: port 29500 is in use here, so MASTER_PORT={ports.pop()}" in command.err
    command = Command(lab.head, folder, "-H", "hosts", "--master_port=29500", "show.py")
    assert command.wait() == 2
    assert command.err.startswith("dslaunch: node1: --master_port=29500 is in use here")
    assert command.out == ""
    blocker.kill()
    blocker.communicate()


def test_random_bytes_in_arguments_and_env_file_arrive_equal_on_every_host(lab: Lab, folder: Path) -> None:
    """Every byte but NUL, in awkward company: quotes, newlines, dollars, broken UTF-8."""
    source = random.Random(20)
    everything = bytes(range(1, 256))
    samples = [everything, "$HOME `id` $(id) 'q' \"d\" \\ ~ * %u \n\t ;|&<>(){} é".encode(), b""]
    samples += [bytes(source.choices(everything, k=source.randrange(1, 200))) for _ in range(40)]
    lines = [b"PROBE_%02d=" % number + _shell_quoted(value) for number, value in enumerate(samples)]
    (lab.head.home / ".deepspeed_env").write_bytes(b"\n".join(lines) + b"\n")
    arguments = [one for one in samples if one]
    command = Command(
        lab.head, folder, "-H", "hosts", "--no_local_rank", "dump.py", *map(os.fsdecode, arguments), ""
    )
    assert command.wait() == 0, command.err
    for rank in range(8):
        found = (folder / f"dump-{rank}").read_bytes()
        expected = b"\0".join([*arguments, b""]) + b"\1" + b"\0".join(samples)
        assert found == expected, rank


def _shell_quoted(value: bytes) -> bytes:
    return shlex.quote(value.decode("latin-1")).encode("latin-1") or b"''"


def test_env_file_of_home_then_cwd_and_variables_of_the_node(lab: Lab, folder: Path) -> None:
    (lab.head.home / ".deepspeed_env").write_text("PROBE_A=home\nPROBE_B=home\n")
    (folder / ".deepspeed_env").write_text(
        "PROBE_B=cwd\nexport PROBE_C=\"$PROBE_B at $ONLY_ON_NODE:/x\"\nPROBE_D='$ONLY_ON_NODE'\n"
    )
    for node in lab.nodes:
        with (node.home / ".ssh" / "environment").open("w") as file:
            file.write(f"ONLY_ON_NODE=of-{node.name}\n")
        with (node.home / ".bashrc").open("w") as file:
            file.write(f"export ONLY_ON_NODE=of-{node.name}; echo welcome to {node.name}\n")
    command = Command(lab.head, folder, "-H", "hosts", "--num_gpus=1", "dump.py")
    assert command.wait() == 0, command.err
    for rank, node in enumerate(lab.nodes):
        values = (folder / f"dump-{rank}").read_bytes().partition(b"\1")[2].split(b"\0")
        assert values == [b"home", b"cwd", f"cwd at of-{node.name}:/x".encode(), b"$ONLY_ON_NODE"]


@pytest.mark.usefixtures("way")
def test_a_secret_is_never_seen_in_ps_of_any_host(lab: Lab, folder: Path) -> None:
    canary = "canary-7f3a9c"
    (lab.head.home / ".deepspeed_env").write_text(f"WANDB_API_KEY={canary}\n")
    (folder / "wait.py").write_text(
        "import os, pathlib, time\nassert os.environ['WANDB_API_KEY'] and os.environ['NCCL_SECRET']\n"
        "print('up', flush=True)\nwhile not pathlib.Path('go').exists(): time.sleep(0.01)\n"
    )
    (folder / "venv.sh").write_text("true\n")
    command = Command(
        lab.head, folder, "-H", "hosts", "--venv_script", str(folder / "venv.sh"), "wait.py",
        env={"NCCL_SECRET": canary},
    )  # fmt: skip
    seen: list[str] = []
    num_looks = 0
    while command.out.count("up") < 8 and command.process.poll() is None:
        num_looks += 1
        seen += [line for host in (lab.head, *lab.nodes) for line in host.commands() if canary in line]
    seen += [line for host in (lab.head, *lab.nodes) for line in host.commands() if canary in line]
    remote = [line for line in lab.host("node1").commands() if "exec(eval(" in line]
    assert remote, "the bootstrap should be visible, else this test looks in the wrong place"
    assert not [line for line in remote if "wait.py" in line or str(folder) in line]
    (folder / "go").touch()
    assert command.wait() == 0, command.err
    assert seen == []
    assert num_looks > 5


def test_a_venv_script_is_sourced_on_every_host_first(lab: Lab, folder: Path) -> None:
    (folder / "venv.sh").write_text('echo noise; export PROBE_V="from $(hostname)"\n')
    command = Command(lab.head, folder, "-H", "hosts", "--num_gpus=1", "--venv_script", "venv.sh", "dump.py")
    assert command.wait() == 0, command.err
    assert [(folder / f"dump-{rank}").read_bytes().partition(b"\1")[2] for rank in range(4)] == [
        f"from node{1 + rank}".encode() for rank in range(4)
    ]


def test_dry_run_prints_the_plan_and_touches_no_host(lab: Lab, folder: Path) -> None:
    for node in lab.nodes:
        node.link_down()
    command = Command(lab.head, folder, "-H", "hosts", "--dry_run", "-e", "node2:0", "show.py", "a b")
    assert command.wait() == 0
    assert "7 ranks on 4 hosts" in command.out
    assert "host node2 (node 1, by ssh), devices 1\n  rank 2, local rank 0: " in command.out
    assert "show.py --local_rank=0 'a b'" in command.out


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "shell",
    few(
        ["bash", "dash", "zsh", "tcsh", "fish", "ksh"],
        lambda shell: shell in ("tcsh", "fish"),  # the others have sh's grammar, as bash has
    ),
)
def test_the_agent_starts_through_any_login_shell(lab: Lab, folder: Path, shell: str) -> None:
    """The hosts see the machine's /etc/passwd; this one gets its own, in which root has another shell."""
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed here")
    node = lab.host("node2")
    script = f"sed '1s,[^:]*$,{path},' /etc/passwd >/root/passwd && mount --bind /root/passwd /etc/passwd"
    node.run(["sh", "-ec", script], check=True)
    try:
        ranks = shown(Command(lab.head, folder, "-H", "hosts", "-i", "node2", "show.py", "a b"))
    finally:
        node.run(["umount", "/etc/passwd"], check=True)
    assert [one["argv"] for one in ranks] == [["--local_rank=0", "a b"], ["--local_rank=1", "a b"]]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "script", ["echo 'Welcome'; echo /opt/cuda", "printf '\\0dslaunch'; yes | head -5000", "stty -a"]
)
def test_what_login_scripts_print_is_not_taken_for_anything(lab: Lab, folder: Path, script: str) -> None:
    for node in lab.nodes[:2]:
        (node.home / ".bashrc").write_text(script + "\n")
    ranks = shown(Command(lab.head, folder, "-H", "hosts", "--num_nodes=2", "show.py"))
    assert {one["MASTER_ADDR"] for one in ranks} == {lab.host("node1").address}
