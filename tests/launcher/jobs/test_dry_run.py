"""The whole command line for each back end, for one and the same job."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.external import mpirun
from dslaunch.launcher.inputs import env_file
from dslaunch.launcher.options import Options
from dslaunch.launcher.options.backend import OPENSSH, PDSH, BackendOptions
from dslaunch.launcher.run import host_pool, make_plan, pdsh

GOLDEN = Path(__file__).parents[1] / "golden"
JOB = ["-H", "hosts", "--include", "node2:1@node1", "train.py", "--name", "it's $HOME"]
DRY_RUNS = {
    "openmpi": ["--launcher=openmpi", "--launcher_args=--mca btl_tcp_if_include 'eth1, eth2'"],
    "mpich": ["--launcher=mpich", "--launcher_args=-iface eth1"],
    "impi": ["--launcher=impi", "--num_gpus=2", "--launcher_args=-print-rank-map"],
    "mvapich": ["--launcher=mvapich", "--launcher_args=-v"],
    "slurm": ["--launcher=slurm", "--launcher_args=--gpus-per-node=4 --comment='two words'"],
}


@pytest.fixture(autouse=True)
def _same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts").write_text("node1 slots=2\nnode2 slots=4\n")
    for variable in [*os.environ]:
        if variable.startswith((*env_file.EXPORTED_PREFIXES, "DS_ENV_FILE", "PDSH_")):
            monkeypatch.delenv(variable)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NCCL_SECRET", "canary")
    monkeypatch.setattr(host_pool.socket, "gethostname", lambda: "head.example.com")
    monkeypatch.setattr(make_plan.sys, "executable", "/opt/py/bin/python")
    monkeypatch.setattr(mpirun.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(mpirun.shutil, "which", lambda name: None)
    monkeypatch.setattr(mpirun, "count_accelerators", lambda: 0)
    monkeypatch.chdir(tmp_path)


def dry_run(*words: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--dry_run", *words])
    assert ended.value.code == 0


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run_prints_the_exact_command_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = [*JOB[:2], *JOB[4:]] if name == "impi" else JOB
    dry_run(*DRY_RUNS[name], *job)
    printed = capsys.readouterr()
    assert printed.err == ""
    text = printed.out.replace(str(tmp_path), "/home/ada/job")
    assert "canary" not in text
    assert text == (GOLDEN / f"dry-run-{name}.txt").read_text(), f"\n{text}"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--launcher=openmpi --kill_grace=5", "what you gave of --kill_grace has no effect"),
        ("--launcher=mpich --force_multi", "what you gave of --force_multi has no effect"),
        ("--launcher=slurm --ssh_port=22", "what you gave of --ssh_port has no effect"),
        ("--launcher=impi --timings --preload=none", "what you gave of --preload and --timings has no"),
        ("--launcher=mvapich --max_restarts=1", "what you gave of --max_restarts has"),
        ("--launcher=openmpi --spares=1",
         "leave it out, and let the batch system start the job again, or a loop in its"),
        ("--launcher=slurm --elastic_training",
         "and let Slurm start the job again: `scontrol requeue $SLURM_JOB_ID` in"),
        ("--launcher=openmpi -H ports",
         "node1: port=2222 in the hostfile, but mpirun reaches the hosts by itself"),
        ("--launcher=slurm -H users",
         "node1: user ada in the hostfile, but srun reaches the hosts by itself"),
        ("--launcher=slurm -H None",
         "--launcher=slurm needs a hostfile with the names of Slurm's nodes; write"),
        ("--launcher=impi", "--launcher=impi needs the same number of slots on every host"),
    ],
)  # fmt: skip
def test_what_a_back_end_cannot_do_is_refused_by_name(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ports").write_text("node1 slots=1 port=2222\n")
    (tmp_path / "users").write_text("ada@node1 slots=1\n")
    with pytest.raises(SystemExit) as ended:
        cli.main(["--dry_run", "-H", "hosts", *words.split(), "train.py"])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_pdsh_is_another_name_for_the_system_s_ssh_and_a_line_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--exec_prefix=podman exec box", "--tree_above=1", *JOB)
    dry_run("--launcher=openssh", *words)
    expected = capsys.readouterr().out
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-4 -o Compression=yes")
    monkeypatch.setenv("PDSH_MODULE_DIR", "/opt/pdsh")
    monkeypatch.setenv("PDSH_RCMD_TYPE", "ssh")
    dry_run("--launcher=pdsh", *words)
    printed = capsys.readouterr()
    assert printed.out == expected
    assert printed.err == (
        "dslaunch: --launcher=pdsh: hosts are reached by the system's ssh, and pdsh is not run; "
        "ssh gets -4 -o Compression=yes (PDSH_SSH_ARGS_APPEND); no effect: PDSH_MODULE_DIR\n"
    )


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"PDSH_SSH_ARGS_APPEND": " -4  -i key "}, ("-4", "-i", "key")),
        ({"PDSH_SSH_ARGS": "-2 -a -x -p 12350 -l%u %h"}, ("-2", "-a", "-x", "-p", "12350")),
        ({"PDSH_SSH_ARGS": "-l %u -6 %h", "PDSH_SSH_ARGS_APPEND": "-v"}, ("-6", "-v")),
        ({"PDSH_SSH_ARGS": "%h", "PDSH_RCMD_TYPE": "exec"}, ()),
    ],
)
def test_ssh_gets_the_words_that_pdsh_would_give_it(environ: dict[str, str], words: tuple[str, ...]) -> None:
    options = Options(program="t.py", backend=BackendOptions(launcher=PDSH))
    found = pdsh.as_openssh(options, environ, say=print).backend
    assert found == BackendOptions(launcher=OPENSSH, launcher_args=words)


def test_a_word_that_ssh_would_take_for_its_host_is_refused() -> None:
    options = Options(program="t.py", backend=BackendOptions(launcher=PDSH))
    with pytest.raises(LaunchError, match="PDSH_SSH_ARGS: 'node2' is no option of ssh"):
        pdsh.as_openssh(options, {"PDSH_SSH_ARGS": "-vp 22 node2"}, say=print)
