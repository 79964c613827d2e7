"""Which mpirun is taken, and what its command line can and cannot say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.external import mpirun
from dslaunch.launcher.external.rank_start import RankStart

SAYS = {
    "openmpi": "mpirun (Open MPI) 5.0.3",
    "debian": "mpirun.openmpi (OpenRTE) 4.1.4",
    "prrte": "prterun (PRRTE) 3.0",
    "mpich": "HYDRA build details:\n    Version: 4.0.2",
    "impi": "Intel(R) MPI Library for Linux* OS, Version 2021.11",
    "other": "hello",
}
START = RankStart(program="mpirun", slots=(("w0", 2), ("w1", 3)), words=("start",), names=("A", "B"))


def install(folder: Path, **programs: str) -> None:
    for name, words in programs.items():
        path = folder / name.replace("_", ".")
        path.write_text(f"#!/bin/sh\necho '{words}'\n")
        path.chmod(0o755)


@pytest.mark.parametrize(
    ("launcher", "programs", "expected"),
    [
        ("openmpi", {"mpirun": "openmpi"}, "mpirun"),
        ("openmpi", {"mpirun": "prrte"}, "mpirun"),
        ("openmpi", {"mpirun": "mpich", "mpirun_openmpi": "debian"}, "mpirun.openmpi"),
        ("mpich", {"mpirun": "mpich"}, "mpirun"),
        ("mpich", {"mpirun": "openmpi", "mpirun_mpich": "mpich"}, "mpirun.mpich"),
        ("mpich", {"mpirun": "openmpi", "mpiexec_hydra": "mpich"}, "mpiexec.hydra"),
        ("impi", {"mpirun": "impi"}, "mpirun"),
        ("impi", {"mpirun": "openmpi", "mpiexec_hydra": "impi"}, "mpiexec.hydra"),
        ("mvapich", {"mpirun": "mpich", "mpiname": "MVAPICH2-GDR 2.3.7"}, "mpirun"),
    ],
)
def test_the_mpirun_of_the_right_mpi_is_taken(
    launcher: str, programs: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, **{name: SAYS.get(words, words) for name, words in programs.items()})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert mpirun.find_mpirun(launcher) == expected


@pytest.mark.parametrize(
    ("launcher", "programs", "message"),
    [
        ("openmpi", {},
         "the mpirun of Open MPI is not installed (no mpirun on PATH); apt-get install openmpi-bin"),
        ("mpich", {}, "the mpirun of MPICH is not installed (no mpirun on PATH); apt-get install mpich"),
        ("openmpi", {"mpirun": "mpich"},
         "is not installed (PATH/mpirun is MPICH's); apt-get install openmpi-bin"),
        ("mpich", {"mpirun": "debian"},
         "is not installed (PATH/mpirun is Open MPI's); apt-get install mpich"),
        ("mpich", {"mpirun": "impi"}, "(PATH/mpirun is Intel MPI's)"),
        ("mvapich", {"mpirun": "mpich"}, "(PATH/mpirun is MPICH's); install MVAPICH"),
        ("mpich", {"mpirun": "mpich", "mpiname": "MVAPICH2 2.3"}, "(PATH/mpirun is MVAPICH's)"),
        ("impi", {"mpirun": "other"}, "(PATH/mpirun is an unknown MPI's); install Intel MPI"),
    ],
)  # fmt: skip
def test_no_mpirun_or_another_mpi_s_is_said_with_what_to_do(
    launcher: str, programs: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, **{name: SAYS.get(words, words) for name, words in programs.items()})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError) as refused:
        mpirun.find_mpirun(launcher)
    assert message in str(refused.value).replace(str(tmp_path), "PATH")
    assert refused.value.exit_code == 3


@pytest.mark.parametrize(
    ("words", "is_root", "expected"),
    [
        ([], False, "--map-by seq --bind-to none"),
        ([], True, "--map-by seq --bind-to none --allow-run-as-root"),
        (["--allow-run-as-root"], True, "--map-by seq --bind-to none --allow-run-as-root"),
        (["--bind-to", "core"], False, "--map-by seq --bind-to core"),
        (["-bind-to=core"], False, "--map-by seq -bind-to=core"),
        (["--map-by", "ppr:2:node"], False, "--bind-to none --map-by ppr:2:node"),
        (["--mca", "btl_tcp_if_include", "eth1"], False,
         "--map-by seq --bind-to none --mca btl_tcp_if_include eth1"),
    ],
)  # fmt: skip
def test_launcher_args_win_over_our_own_words(words: list[str], is_root: bool, expected: str) -> None:
    argv, hostfile = mpirun.openmpi_command(replace(START, launcher_args=tuple(words)), is_root=is_root)
    assert " ".join(argv) == f"mpirun -n 5 --hostfile <hostfile> {expected} -x A -x B start"
    assert hostfile == "w0\nw0\nw1\nw1\nw1\n"


def test_open_mpi_is_told_the_name_of_this_machine_for_localhost() -> None:
    start = replace(START, slots=(("localhost", 2), ("w1", 1)))
    _, hostfile = mpirun.openmpi_command(start, is_root=False, this_machine="head")
    assert hostfile == "head\nhead\nw1\n"


def test_intel_mpi_refuses_hosts_with_unequal_slots() -> None:
    with pytest.raises(LaunchError, match=r"but w0 has 2 and w1 has 3; use --num_gpus=2"):
        mpirun.impi_command(START)


@pytest.mark.parametrize("command", [mpirun.mpich_command, mpirun.impi_command])
def test_hydra_takes_no_ipv6_address(command: object) -> None:
    assert callable(command)
    with pytest.raises(LaunchError, match=r"fd00::1: --launcher=(mpich|impi) takes no IPv6 address"):
        command(replace(START, slots=(("fd00::1", 2),)))
