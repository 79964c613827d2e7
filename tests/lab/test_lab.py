"""A lab from its beginning to its end, from Python and by hand: nothing of it stays behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LAB_NAME
from tests.lab import Host, Lab, LabError, cgroup
from tests.lab.__main__ import FAULTS, main
from tests.lab.lab import CHECKOUT
from tests.lab.observe import eventually, next_line, running

SELF = f"{LAB_NAME}-self"  # of labs that a test makes for itself, beside the usual one


def traces() -> list[str]:
    """Everything on this machine that bears the name of these tests' own labs, or runs in one of them."""
    found = [str(path) for path in Path("/run").glob(f"netns/*{SELF}*")]
    # Unlike glob() this bears that another lab goes meanwhile.
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        found += [f"{folder}/{name}" for name in names if name.startswith(f"dslaunch-{SELF}-")]
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
        return Lab.up(num_hosts, name=SELF, replace=True, **{"wait_s": 0, **options})

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
other = Lab.up(1, name="{SELF}-other")
sleeps = [host.popen(["sleep", "1000"]) for host in (lab.nodes[1], other.nodes[0])]
lab.nodes[1].freeze()
print(*(one.pid for one in sleeps), flush=True)
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
        pids = next_line(maker).split()
        with pytest.raises(LabError, match=f"held by process {maker.pid} "):
            own_lab(1)
        maker.kill()
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    with own_lab(1, wait_s=30) as made:  # another process that makes a lab may be at work on these
        assert eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
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
        made.head.run(["touch", "/tmp/mine"], check=True)
        made.restore()
        assert not made.head.run(["ls", "/tmp/mine"]).stdout
        assert made.head.run(["ls", tmp_path]).stdout == "seen\n"


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
@pytest.mark.parametrize(
    ("setting", "outcome"), [("required", "error"), pytest.param("", "skipped", marks=pytest.mark.exhaustive)]
)
def test_where_no_lab_can_be_made_tests_skip_or_fail_with_the_reason(
    lab: Lab, setting: str, outcome: str
) -> None:
    test = f"{Path(__file__).parent}/test_host.py::test_nothing_but_the_lab_can_be_reached"
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
    assert main(["up", "--name", SELF, "2"]) == 0
    told = capsys.readouterr().out
    assert "node2     10.77.0.3" in told
    assert f"hostfile  {Lab.attach(SELF).hostfile} " in told
    (first,) = re.findall(r" (exec head -- dslaunch -H hosts) (\S+check_collectives.py) ", told)
    argv = [sys.executable, "-m", "tests.lab", "--name", SELF, *first[0].split(), "--dry_run", first[1]]
    done = subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert "rank 3" in done.stdout
    assert by_hand("fault", "node1", "refuse-port", "22") == 0
    assert by_hand("fault", "node2", "unplug") == 0
    with running(Lab.attach(SELF).host("node1"), "sleep", "1000"):
        assert eventually(lambda: by_hand("ps") == 0 and "sleep 1000" in capsys.readouterr().out)
    assert by_hand("status") == 0
    told = capsys.readouterr().out
    assert [line.split()[2] for line in told.splitlines()[1:4]] == ["up", "up", "unplugged"]
    assert by_hand("up", "0") == 0
    assert main(["down", "--name", SELF]) == 0
    assert capsys.readouterr().out == "down: 3 hosts\nno lab was up\n"


@pytest.mark.slow
def test_exec_by_hand_ends_with_the_status_of_the_command(own_lab: Callable[..., Lab]) -> None:
    own_lab(1).detach()
    for command, status in (("dslaunch --version; exit 7", 7), ("kill -TERM $$", 143)):
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
    not_faults = {"condition", "end_slowness"}
    methods = {name for name, value in vars(Host).items() if callable(value) and not name.startswith("_")}
    assert {kind.replace("-", "_") for kind in FAULTS} == methods - not_faults
