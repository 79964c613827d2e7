"""Real jobs by Open MPI, MPICH and Slurm on several hosts."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
from pathlib import Path

import pytest

from tests.exhaustive import few
from tests.lab import Lab, procfs
from tests.launcher.backends.programs import left_over, need, start_slurm
from tests.launcher.command import Command

pytestmark = pytest.mark.slow

NAMES = "RANK LOCAL_RANK WORLD_SIZE LOCAL_SIZE LOCAL_WORLD_SIZE CROSS_RANK CROSS_SIZE MASTER_ADDR MASTER_PORT"
DUMP = f"""
import json, os, sys
facts = {{"host": os.uname().nodename, "argv": [os.fsencode(one).hex() for one in sys.argv[1:]],
         "probes": {{k.decode(): v.hex() for k, v in os.environb.items() if k.startswith(b"PROBE_")}},
         "ours": [name for name in os.environ if name.startswith("DSLAUNCH")],
         **{{name: os.environ.get(name) for name in "{NAMES}".split()}}}}
json.dump(facts, open("dump-" + os.environ["RANK"], "w"))
"""
# Rank 2 ends as it is told, once all four run; the others would run on.
FAIL = """
import os, pathlib, sys, time
rank, how = os.environ["RANK"], sys.argv[2]
pathlib.Path(f"up-{rank}").touch()
while not all(pathlib.Path(f"up-{one}").exists() for one in range(4)): time.sleep(0.01)
if rank == "2":
    sys.exit(int(how)) if how.isdigit() else os.kill(os.getpid(), getattr(__import__("signal"), how))
time.sleep(600)
"""
WAIT = """
import os, pathlib, time
assert os.environ["WANDB_API_KEY"] and os.environ["NCCL_SECRET"]
pathlib.Path("up-" + os.environ["RANK"]).touch()
while not pathlib.Path("go").exists(): time.sleep(0.01)
"""


class Back:
    """A launcher that is there, with the folder of a test that all hosts share."""

    def __init__(self, lab: Lab, launcher: str, folder: Path) -> None:
        self.lab = lab
        self.launcher = launcher
        self.folder = folder
        self.env = start_slurm(lab) if launcher == "slurm" else {}

    def start(self, *words: str, **env: str) -> Command:
        return Command(
            self.lab.head,
            self.folder,
            f"--launcher={self.launcher}",
            "-H",
            "hosts",
            *words,
            env={**self.env, **env},
        )

    def is_up(self) -> bool:
        return all((self.folder / f"up-{rank}").exists() for rank in range(4))

    def is_clean(self) -> bool:
        return not left_over(self.lab)


BACK_ENDS = ("openmpi", "mpich", "slurm")


@pytest.fixture(params=BACK_ENDS)
def back(request: pytest.FixtureRequest, lab: Lab) -> Back:
    need(request.param)
    folder = lab.shared / request.node.name.replace("/", "_").replace("[", "-").replace("]", "")[:80]
    folder.mkdir()
    for name, text in (("dump.py", DUMP), ("fail.py", FAIL), ("wait.py", WAIT)):
        (folder / name).write_text(text)
    (folder / "hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    return Back(lab, request.param, folder)


def dumps(back: Back, world_size: int) -> list[dict[str, object]]:
    return [json.loads((back.folder / f"dump-{rank}").read_text()) for rank in range(world_size)]


def test_two_hosts_with_two_ranks_each_get_everything_exact(back: Back) -> None:
    source = random.Random(20)
    everything = bytes(range(1, 256))
    samples = [everything, "$HOME `id` $(id) 'q' \"d\" \\ ~ * %n a,b \n\t ;|&<>(){} \u00e9".encode(), b""]
    samples += [bytes(source.choices(everything, k=source.randrange(1, 200))) for _ in range(20)]
    quoted = [shlex.quote(one.decode("latin-1")).encode("latin-1") or b"''" for one in samples]
    lines = [b"PROBE_%02d=" % number + value for number, value in enumerate(quoted)]
    (back.lab.head.home / ".deepspeed_env").write_bytes(b"\n".join([*lines, b"PROBE_EXPANDED=$HOME:/x", b""]))
    command = back.start("dump.py", *map(os.fsdecode, samples))
    assert command.wait() == 0, command.err + command.out
    found = dumps(back, 4)
    assert [one["host"] for one in found] == ["node1", "node1", "node2", "node2"]
    for rank, one in enumerate(found):
        local = str(rank % 2)
        assert [one[name] for name in NAMES.split()] == [
            *(str(rank), local, "4", "2", "2", str(rank // 2), "2", "node1", "29500")
        ]
        assert one["argv"] == [f"--local_rank={local}".encode().hex(), *(value.hex() for value in samples)]
        expected = {f"PROBE_{number:02d}": value.hex() for number, value in enumerate(samples)}
        assert one["probes"] == {**expected, "PROBE_EXPANDED": b"/root:/x".hex()}
        assert one["ours"] == ["DSLAUNCH_DROP_IN"]
    assert procfs.wait_until(back.is_clean, timeout_s=15), left_over(back.lab)


@pytest.mark.exhaustive
def test_chosen_slots_of_hosts_in_an_order_of_their_own(back: Back) -> None:
    """Unequal, and not in the order in which a program would sort them;
    this machine in between if it may be.
    """
    middle = "node4" if back.launcher == "slurm" else "head"
    (back.folder / "hosts").write_text(f"node2 slots=2\nnode3 slots=2\n{middle} slots=2\nnode1 slots=3\n")
    command = back.start("--exclude", "node2:0@node3", "--master_port=4000", "dump.py")
    assert command.wait() == 0, command.err + command.out
    found = dumps(back, 6)
    assert [one["host"] for one in found] == ["node2", middle, middle, "node1", "node1", "node1"]
    assert [one["LOCAL_RANK"] for one in found] == ["0", "1", "0", "0", "1", "2"]
    assert [one["CROSS_RANK"] for one in found] == ["0", "1", "1", "2", "2", "2"]
    assert {one["MASTER_PORT"] for one in found} == {"4000"}


@pytest.mark.parametrize(
    ("back", "how", "code"),
    few(
        [("slurm", "SIGKILL", 137), ("openmpi", "SIGKILL", 137), ("mpich", "3", 3)],
        lambda back, how, code: back == "slurm",
    ),
    indirect=["back"],
)
def test_the_first_failure_ends_all_and_its_code_is_the_job_s(back: Back, how: str, code: int) -> None:
    command = back.start("fail.py", how)
    assert command.wait(30) == code, command.err + command.out
    ended = {
        "openmpi": f"openmpi: mpirun.openmpi ended with exit code {code}",
        "mpich": f"mpich: mpirun.mpich ended with exit code {code}",
        "slurm": "slurm: rank 2 on node2 ",
    }
    assert ended[back.launcher] in command.err
    assert procfs.wait_until(back.is_clean, timeout_s=15), left_over(back.lab)


@pytest.mark.parametrize(
    ("back", "signals", "code"),
    few(
        [
            ("openmpi", [signal.SIGTERM] * 2, 143),
            ("openmpi", [signal.SIGINT], 130),
            ("mpich", [signal.SIGTERM], 143),
            ("slurm", [signal.SIGTERM] * 2, 143),
        ],
        lambda back, signals, code: back == "openmpi" and len(signals) == 2,
    ),
    indirect=["back"],
)
def test_signals_are_passed_on_and_nothing_is_left(
    back: Back, signals: list[signal.Signals], code: int
) -> None:
    (back.folder / "fail.py").write_text(FAIL.replace('== "2"', '== "-"'))
    command = back.start("fail.py", "0")
    assert procfs.wait_until(back.is_up, timeout_s=30), command.err
    for number, signum in enumerate(signals):
        if number:
            assert procfs.wait_until(lambda: ": stopping " in command.err, timeout_s=10), command.err
        command.process.send_signal(signum)
    assert command.wait(30) == code, command.err + command.out
    assert procfs.wait_until(back.is_clean, timeout_s=30), left_over(back.lab)


@pytest.mark.parametrize("back", few(BACK_ENDS, lambda back: back == "mpich"), indirect=True)
def test_when_the_launcher_is_killed_nothing_is_left(back: Back) -> None:
    (back.folder / "fail.py").write_text(FAIL.replace('== "2"', '== "-"'))
    command = back.start("fail.py", "0")
    assert procfs.wait_until(back.is_up, timeout_s=30), command.err
    command.process.kill()
    assert command.wait() == -signal.SIGKILL
    assert procfs.wait_until(back.is_clean, timeout_s=30), left_over(back.lab)


@pytest.mark.parametrize("back", few(BACK_ENDS, lambda back: back == "openmpi"), indirect=True)
def test_a_secret_is_never_seen_in_ps_of_any_host(back: Back) -> None:
    canary = "canary-7f3a9c"
    (back.lab.head.home / ".deepspeed_env").write_text(f"WANDB_API_KEY={canary}\n")
    command = back.start("--no_local_rank", "wait.py", NCCL_SECRET=canary)
    seen: list[str] = []
    starters: set[str] = set()

    def look() -> bool:
        for host in back.lab.hosts:
            commands = host.commands()
            seen.extend(one for one in commands if canary in one)
            starters.update(one for one in commands if "exec(" in one and "python -m dslaunch" not in one)
        return back.is_up() or command.process.poll() is not None

    assert procfs.wait_until(look, timeout_s=30), command.err
    look()
    (back.folder / "go").touch()
    assert command.wait() == 0, command.err
    assert starters, "the bootstrap should be visible, else this test looks in the wrong place"
    assert seen == []
    assert not [one for one in starters if "wait.py" in one or str(back.folder) in one]
