"""The jobs that measure hosts: what they take from the options of the job that they come before."""

from __future__ import annotations

import io
from typing import Any

import pytest

from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.inputs.selection import select
from dslaunch.launcher.options import Options
from dslaunch.launcher.options.hosts import SshOptions
from dslaunch.launcher.options.logs import LogOptions
from dslaunch.launcher.options.mesh import MeshOptions
from dslaunch.launcher.options.process import ProcessOptions
from dslaunch.launcher.options.restart import RestartOptions
from dslaunch.launcher.options.start import StartOptions
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.run import measure

HOSTS = select((Host(name="a", slots=2), Host(name="b", slots=2)))


class _Asked(Exception):
    pass


def options(**more: Any) -> Options:
    """Return options with a way to the hosts."""
    return Options(ssh=SshOptions(user="someone"), venv_script="/opt/setup.sh", **more)


def test_a_job_that_measures_goes_the_way_of_the_job_and_has_no_more_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def asked(given: Options, attempt: object) -> None:
        raise _Asked(given)

    monkeypatch.setattr(measure, "make_plan", asked)
    job = options(
        program="train.sh",
        arguments=("--lr", "1"),
        no_python=True,
        logs=LogOptions(log_dir="logs"),
        mesh=MeshOptions(sizes=(("tp", 4),)),
        process=ProcessOptions(saves_pid=True, stdin_rank=0),
        restart=RestartOptions(max_restarts=3),
        start=StartOptions(preload=("torch",), window=5, shows_timings=True),
    )
    with pytest.raises(_Asked) as found:
        measure.measure_network(job, HOSTS, Console(log_level="info", err=io.BytesIO()))
    assert found.value.args[0] == options(
        program=measure.NETWORK_PROGRAM,
        arguments=(f"{measure.STEP_TIMEOUT_S:g}",),
        is_module=True,
        no_local_rank=True,
        process=ProcessOptions(gives_stdin=False),
        start=StartOptions(preload=(), window=5),
    )
