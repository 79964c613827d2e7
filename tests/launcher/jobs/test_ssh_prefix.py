"""Jobs on several real hosts whose workers run in containers there: namespaces that `unshare` makes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.exhaustive import few
from tests.lab import Lab
from tests.launcher.boxes import UNSHARE
from tests.launcher.command import AT_ONCE_S, Command, poll

pytestmark = pytest.mark.slow

# Without the variables of the login, as container tools start a program.
INSIDE = (
    f"--exec_prefix=env -i PATH=/usr/bin:/bin:/usr/sbin:/sbin {UNSHARE} "
    'sh -c \'hostname "in-{host}"; exec "$@"\' sh'
)
SHOW = """
import json, os, sys
print(json.dumps([os.uname().nodename, int(os.environ["RANK"]), os.environ["MASTER_ADDR"], sys.argv[2:]]))
"""
WAIT = """
import os, signal
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork(): os._exit(0)
    print("up", flush=True)
while True: signal.pause()
"""


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "show.py").write_text(SHOW)
    (folder / "wait.py").write_text(WAIT)
    return folder


def shown(command: Command) -> list[list[object]]:
    """What the ranks of a show.py job printed, in rank order."""
    assert command.wait() == 0, command.err
    found = [json.loads(line.partition(" | ")[2]) for line in command.out.splitlines()]
    return sorted(found, key=lambda one: int(one[1]))


@pytest.mark.usefixtures("way")
def test_ranks_of_all_hosts_run_inside_and_reach_rank_0(lab: Lab, folder: Path) -> None:
    lines = [f"{node.name} slots=2" for node in lab.nodes[:3]]
    (folder / "hosts").write_text("\n".join([*lines[:2], f"{lines[2]} exec_prefix=''"]) + "\n")
    ranks = shown(Command(lab.head, folder, "-H", "hosts", INSIDE, "show.py", "a b"))
    address = lab.host("node1").address
    names = ["in-node1"] * 2 + ["in-node2"] * 2 + ["node3"] * 2
    assert ranks == [[name, rank, address, ["a b"]] for rank, name in enumerate(names)]


@pytest.mark.parametrize(
    "shell",
    few(["bash", "dash", "tcsh", "fish"], lambda shell: shell == "tcsh"),
)
def test_the_words_of_a_prefix_pass_any_login_shell(lab: Lab, folder: Path, shell: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed here")
    node = lab.host("node2")
    script = f"sed '1s,[^:]*$,{path},' /etc/passwd >/root/passwd && mount --bind /root/passwd /etc/passwd"
    node.run(["sh", "-ec", script], check=True)
    prefix = f"env 'PROBE=it'\"'\"'s $HOME \"x\" * ~ # {{host}}' {UNSHARE}"
    (folder / "show.py").write_text("import os; print([os.environ['PROBE']])")
    try:
        command = Command(
            lab.head, folder, "-H", "hosts", "-i", "node2", f"--exec_prefix={prefix}", "show.py"
        )
        assert command.wait() == 0, command.err
    finally:
        node.run(["umount", "/etc/passwd"], check=True)
    assert command.lines("node2:0") == [repr(['it\'s $HOME "x" * ~ # node2'])]


def test_hosts_behind_a_gateway_have_their_prefix_and_it_has_its_own(lab: Lab, folder: Path) -> None:
    words = ("-H", "hosts", "--tree_above=2", "--tree_radix=2", "--timings", INSIDE, "show.py")
    command = Command(lab.head, folder, *words)
    ranks = shown(command)
    assert [one[0] for one in ranks] == [f"in-{node.name}" for node in lab.nodes for _ in range(2)]
    assert "hosts reached through" in command.err
    assert " 0 hosts reached through" not in command.err


def test_a_prefix_that_leads_nowhere_on_one_host_starts_nothing_on_the_others(lab: Lab, folder: Path) -> None:
    prefix = "sh -c 'echo refused >&2; exit 125'"
    text = (folder / "hosts").read_text()
    (folder / "hosts").write_text(text.replace("node2 slots=2", f'node2 slots=2 exec_prefix="{prefix}"'))
    command = Command(lab.head, folder, "-H", "hosts", "wait.py")
    assert command.wait(AT_ONCE_S) == 3
    assert "node2: " in command.err
    said = "ended with status 125 before an agent ran behind it, and its last words are 'refused'"
    assert said in command.err
    assert "up" not in command.out
    assert not lab.wait_until_clean()


@pytest.mark.parametrize(
    "words", ["--tree_above=1", pytest.param("--launcher=openssh", marks=pytest.mark.exhaustive)]
)
def test_a_login_script_that_ends_the_login_is_not_taken_for_the_prefix(
    lab: Lab, folder: Path, words: str
) -> None:
    """Of a gateway, too."""
    (lab.host("node1").home / ".bashrc").write_text("exit 3\n")
    command = Command(lab.head, folder, words, "-H", "hosts", "--exec_prefix=env", "show.py")
    assert command.wait(AT_ONCE_S) == 3
    *before, last = [line for line in command.err.splitlines() if "connected, " not in line]
    assert last.startswith(
        "dslaunch: node1: no agent started there: the login ended with status 3 and said nothing; a command "
    )
    gateways = [line for line in before if "cannot be a gateway" in line]
    assert len(gateways) <= ("--tree_above=1" in words)  # none if the job was over before that was known
    for line in gateways:
        assert line.startswith(
            "dslaunch: node1: cannot be a gateway (the login ended with status 3 and said "
        )


@pytest.mark.parametrize("how", few(["SIGKILL", "network"], lambda how: how == "SIGKILL"))
def test_nothing_is_left_inside_when_the_launcher_is_gone(lab: Lab, folder: Path, how: str) -> None:
    (folder / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    words = (
        "-H",
        "hosts",
        INSIDE,
        "--kill_grace=0.5",
        "--heartbeat=2",
    )
    command = Command(lab.head, folder, *words, "wait.py")
    command.wait_for("up", times=4)
    if how == "network":
        lab.host("node2").link_down()
        assert command.wait(AT_ONCE_S) == 3
    else:
        command.process.kill()
        command.wait(AT_ONCE_S)
    try:
        poll(lambda: not lab.wait_until_clean(1), f"the end of {lab.processes()}", command, AT_ONCE_S)
    finally:
        lab.host("node2").link_up()
