"""The environment of the ranks of a job on this machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from pathlib import Path

import pytest

from tests.launcher.local_job import Start

pytestmark = pytest.mark.slow

SHOW = """
names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'LOCAL_SIZE', 'LOCAL_WORLD_SIZE', 'CROSS_RANK', 'CROSS_SIZE')
names += ('MASTER_ADDR', 'OMP_NUM_THREADS', 'CUDA_VISIBLE_DEVICES')
say(*(os.environ.get(name, '-') for name in names), *sys.argv[1:])
"""


@pytest.mark.skipif(os.path.exists("/dev/nvidia0"), reason="the machine has a GPU")
def test_each_rank_gets_its_place(start: Start) -> None:
    job = start(SHOW, "--num_gpus=3", "--", "-x", env={"OMP_NUM_THREADS": "5"})
    assert job.wait() == 0
    assert [job.lines(rank) for rank in range(3)] == [
        [f"{rank} {rank} 3 3 3 0 1 127.0.0.1 5 - --local_rank={rank} -x"] for rank in range(3)
    ]


def test_a_file_that_sets_what_every_rank_gets_from_us_is_told_so(start: Start, tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("MY_OWN=default\n")
    file = tmp_path / "variables"
    file.write_text("MY_OWN=1\nRANK=7\nMASTER_ADDR=node9\n")
    job = start(
        "say(os.environ['MY_OWN'], os.environ['RANK'], os.environ['MASTER_ADDR'])",
        env={"DS_ENV_FILE": str(file)},
    )
    assert job.wait() == 0
    assert job.lines(0) == ["1 0 127.0.0.1"]
    warned = [line for line in job.err.splitlines() if "warning" in line]
    assert warned == [
        f"dslaunch: warning: {file}:{line}: {name} is not used: every rank gets its own from "
        "dslaunch; leave it out"
        for line, name in ((2, "RANK"), (3, "MASTER_ADDR"))
    ]


def test_options_for_ssh_are_told_to_have_no_effect_on_this_machine(start: Start) -> None:
    job = start("say('up')", "--ssh_port=23", "--ssh_user=ada")
    assert job.wait() == 0
    assert (
        "dslaunch: warning: no effect, for all ranks run on this machine: --ssh_user, --ssh_port\n" in job.err
    )


def test_the_master_may_be_given(start: Start) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    job = start(
        "say(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])",
        "--master_addr=node7",
        f"--master_port={port}",
    )
    assert job.wait() == 0
    assert job.lines(0) == [f"node7 {port}"]


def test_a_busy_default_port_moves_and_says_so(start: Start) -> None:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # then another process keeps it busy
            stack.enter_context(socket.create_server(("", 29500)))
        job = start("say(os.environ['MASTER_PORT'])", "--num_gpus=2")
        assert job.wait() == 0
    (port,) = {*job.lines(0), *job.lines(1)}
    assert port != "29500"
    assert f"port 29500 is in use here, so MASTER_PORT={port}" in job.err


def test_a_busy_port_that_was_asked_for_is_refused(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = start("say('started')", f"--master_port={port}")
        assert job.wait() == 2
    assert job.err == (
        f"dslaunch: localhost: --master_port={port} is in use here; choose another, or leave the option out "
        "if you gave it\n"
    )
    assert job.out == ""


def test_environment_files_of_the_home_and_the_folder(start: Start, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".deepspeed_env").write_text("A=home\nB=home\nMY_PATH=/home:$HIS_PATH\n")
    (tmp_path / ".deepspeed_env").write_text(
        '# mine\n\nexport B=here\nC="two words"\nMY_PATH=/here:${MY_PATH}\nD=$(id)\n'
    )
    job = start(
        "say(*(repr(os.environ[name]) for name in ('A', 'B', 'C', 'D', 'MY_PATH')))", env={"HIS_PATH": "/his"}
    )
    assert job.wait() == 0
    assert job.lines(0) == ["'home' 'here' 'two words' '$(id)' '/here:/home:/his'"]


def test_a_mistake_in_an_environment_file_is_one_line(start: Start, tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("A=1\nno equals sign\n")
    job = start("say('started')")
    assert job.wait() == 2
    assert job.err.startswith(f"dslaunch: {tmp_path}/.deepspeed_env:2: ")
    assert job.err.count("\n") == 1


def test_a_venv_script_changes_what_the_workers_find(start: Start, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(
        f'#!/bin/sh\nexport OTHER=python\nexec {shlex.quote(sys.executable)} "$@"\n'
    )
    (tmp_path / "bin" / "python").chmod(0o755)
    (tmp_path / "venv.sh").write_text(
        "echo noise; echo more noise >&2; export ADDED=yes; PATH=$PWD/bin:$PATH\n"
    )
    job = start("say(os.environ['ADDED'], os.environ['OTHER'])", "--venv_script=venv.sh", "--num_gpus=2")
    assert job.wait() == 0
    assert (job.lines(0), job.lines(1)) == (["yes python"],) * 2
    assert "noise" not in job.out + job.err


def test_a_venv_script_that_fails_is_quoted(start: Start, tmp_path: Path) -> None:
    (tmp_path / "venv.sh").write_text("echo no module loaded >&2; exit 4\n")
    job = start("say('started')", "--venv_script=venv.sh")
    assert job.wait() == 3
    assert job.err == "dslaunch: localhost: --venv_script=venv.sh ended with 4: no module loaded\n"
    assert job.out == ""
