"""Hosts that batch systems and MPI name: the variables and files of each."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.host_sources import (
    SOURCES,
    find_source,
    read_source,
    source_of_file,
    task_of,
)
from dslaunch.launcher.inputs.hostfile import Host


def found(environ: dict[str, str], *, of_step: bool = False, may_look: bool = True) -> str:
    """The hosts as `name slots`, `auto` for slots that are not known."""
    source = find_source(environ, of_step=of_step)
    assert source is not None
    hosts = read_source(source, environ, may_look=may_look)
    return ", ".join(f"{host.name} {'auto' if host.slots is None else host.slots}" for host in hosts)


def slurm(nodes: str, **more: str) -> dict[str, str]:
    return {"SLURM_JOB_NODELIST": nodes} | {f"SLURM_{name}": value for name, value in more.items()}


@pytest.mark.parametrize(
    ("environ", "hosts"),
    [
        (slurm("n[1-3],x", TASKS_PER_NODE="2(x2),4,1"), "n1 2, n2 2, n3 4, x 1"),
        (slurm("n[01-02,7]-ib[1-2]", TASKS_PER_NODE="2(x6)"),
         "n01-ib1 2, n01-ib2 2, n02-ib1 2, n02-ib2 2, n7-ib1 2, n7-ib2 2"),
        (slurm("n[1-2]", TASKS_PER_NODE="1(x2)"), "n1 auto, n2 auto"),
        (slurm("n[1-2]"), "n1 auto, n2 auto"),
        (slurm("n[1-2]", TASKS_PER_NODE="16(x2)", GPUS_PER_NODE="8"), "n1 8, n2 8"),
        (slurm("n[1-2]", TASKS_PER_NODE="1(x2)", GPUS_PER_NODE="a100:4,v100:2"), "n1 6, n2 6"),
        (slurm("n[1-2]", TASKS_PER_NODE="1(x2)", GPUS_ON_NODE="4"), "n1 4, n2 4"),
        (slurm("n[1-2]", GPUS_ON_NODE="1", JOB_GPUS="3"), "n1 1, n2 1"),
        (slurm("n[1-2]", JOB_GPUS="0,1,5"), "n1 3, n2 3"),
        (slurm("n[1-2]", GPUS_ON_NODE="4", GPUS="8", JOB_NUM_NODES="2"), "n1 4, n2 4"),
        # srun sets the tasks for the hosts of its step, which are fewer than those of the allocation.
        (slurm("n[1-3]", TASKS_PER_NODE="1", STEP_NODELIST="n1"), "n1 auto, n2 auto, n3 auto"),
        ({"LSB_MCPU_HOSTS": "h1 4 h2 2 h1 1"}, "h1 5, h2 2"),
    ],
)  # fmt: skip
def test_variables_name_hosts_and_slots(environ: dict[str, str], hosts: str) -> None:
    assert found(environ) == hosts


@pytest.mark.parametrize(
    ("variable", "text", "hosts"),
    [
        ("PBS_NODEFILE", "n2\nn1\nn2\n", "n2 2, n1 1"),
        ("PBS_NODEFILE", "n2\nn1\n", "n2 auto, n1 auto"),
        ("LSB_DJOB_HOSTFILE", "h1\nh1\nh2\nh2", "h1 2, h2 2"),
        ("PE_HOSTFILE", "c1 4 all.q@c1 UNDEFINED\nc2 2 all.q@c2 0,1\nc1 1 b.q@c1 UNDEFINED\n", "c1 5, c2 2"),
        ("OMPI_MCA_orte_default_hostfile", "j-worker-0.j.ns.svc slots=8\nj-worker-1.j.ns.svc slots=8\n",
         "j-worker-0.j.ns.svc 8, j-worker-1.j.ns.svc 8"),
        ("OMPI_MCA_orte_default_hostfile", "# us\na slots = 2 max-slots=4 # x\nb cpu=3\nc count=1\nd slots=0",
         "a 2, b 3, c 1"),
        ("PRTE_MCA_prte_default_hostfile", "a\nb\n", "a auto, b auto"),
        ("HYDRA_HOST_FILE", "a:8\nb:4 ifname=eth1\n10.0.0.1:1\n[fd00::7]:2\nfd00::8\n",
         "a 8, b 4, 10.0.0.1 1, fd00::7 2, fd00::8 1"),
        ("I_MPI_HYDRA_HOST_FILE", "a:1\nb:1\n", "a 1, b 1"),
    ],
)  # fmt: skip
def test_files_name_hosts_and_slots(variable: str, text: str, hosts: str, tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text(text)
    environ = {variable: str(tmp_path / "nodes")}
    assert found(environ) == hosts
    assert source_of_file(str(tmp_path / "nodes"), environ) == find_source(environ, of_step=False)


def test_where_no_host_can_be_looked_at_a_host_that_was_only_named_has_one_slot() -> None:
    assert found(slurm("n[1-2]", TASKS_PER_NODE="1(x2)"), may_look=False) == "n1 1, n2 1"


def test_a_program_that_is_started_on_each_host_of_a_step_has_the_hosts_of_the_step() -> None:
    environ = slurm("n[1-4]", STEP_NODELIST="n[2-3]", TASKS_PER_NODE="1(x2)", GPUS_ON_NODE="4")
    assert found(environ, of_step=True, may_look=False) == "n2 4, n3 4"
    assert found(environ) == "n1 4, n2 4, n3 4, n4 4"


def test_users_are_kept_and_what_has_no_effect_is_said(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("ada@a:1\nb slots=1 username=eve max_slots=2\n")
    environ = {"HYDRA_HOST_FILE": str(tmp_path / "nodes")}
    (source,) = (one for one in SOURCES if one.variable in environ)
    said: list[str] = []
    hosts = read_source(source, environ, may_look=True, warn=said.append)
    assert hosts == (Host(name="a", slots=1, user="ada"), Host(name="b", slots=1, user="eve"))
    assert said == [f"HYDRA_HOST_FILE={tmp_path}/nodes, line 2: 'max_slots=2' has no effect"]


def test_the_first_source_of_the_table_is_taken_and_none_is_no_source() -> None:
    environ = {"LSB_MCPU_HOSTS": "h 1", "PE_HOSTFILE": "f"} | slurm("n1")
    assert found(environ) == "n1 auto"
    assert find_source({"OMPI_MCA_orte_default_hostfile": "none"}, of_step=False) is None
    assert find_source({"PATH": "/bin"}, of_step=True) is None


@pytest.mark.parametrize("variable", [one.variable for one in SOURCES])
def test_an_empty_variable_is_refused_by_name(variable: str) -> None:
    with pytest.raises(
        LaunchError, match=rf"^{variable}=' ': it is empty, and .* names hosts there; unset it"
    ):
        find_source({variable: " "}, of_step=True)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (slurm("n[1-2"), "SLURM_JOB_NODELIST: 'n[1-2': a bracket has no partner"),
        (slurm("n[1-2]]"), "a bracket has no partner"),
        (slurm("n[5-1]"), "the range 5-1 runs backwards"),
        (slurm("n[0-1000000]"), "1000001 hosts are more than the 10000"),
        (slurm("a[1-6000],b[1-6000]"), "more hosts than the 10000 that a job may have"),
        (slurm("n[1-2],n2"), "host 'n2' is named twice"),
        (slurm("n1,,n2"), "a host's name is made of letters"),
        (slurm("n1,n\udcff"), "a host's name is made of letters"),
        (slurm("-oX"), "a host's name is made of letters"),
        (slurm("n[1-2]", JOB_NUM_NODES="3"), "SLURM_JOB_NUM_NODES: '3': SLURM_JOB_NODELIST has 2 hosts"),
        (slurm("n[1-2]", TASKS_PER_NODE="1(x3)"), "SLURM_TASKS_PER_NODE: '1(x3)': tasks of 3 hosts"),
        (slurm("n[1-2]", TASKS_PER_NODE="1(x999999999)"), "tasks of 999999999 hosts"),
        (slurm("n[1-2]", TASKS_PER_NODE="2(x2"), "SLURM_TASKS_PER_NODE: '2(x2': allowed are numbers"),
        (slurm("n[1-2]", TASKS_PER_NODE="9999(x2)"), "9999 slots are more than the 4096"),
        (slurm("n[1-2]", TASKS_PER_NODE="0(x2)"), "every host has 0 slots"),
        (slurm("n[1-2]", GPUS_PER_NODE="a100"), "SLURM_GPUS_PER_NODE: 'a100': allowed are numbers of GPUs"),
        (slurm("n[1-2]", GPUS_ON_NODE="4", GPUS="6"), "SLURM_GPUS_ON_NODE: '4': 4 GPUs on this host, but"),
        (slurm("n[1-2]", TASKS_PER_NODE="2,1", GPUS_ON_NODE="2", GPUS_PER_TASK="1"), "but not every one"),
        (slurm("n1", HET_SIZE="2"), "SLURM_HET_SIZE: '2': a job of several components"),
        ({"LSB_MCPU_HOSTS": "h1 4 h2"}, "LSB_MCPU_HOSTS: 'h1 4 h2': allowed are hosts"),
        ({"LSB_MCPU_HOSTS": "h1 four"}, "allowed are hosts"),
        ({"PBS_NODEFILE": "/nowhere/x"}, "PBS_NODEFILE=/nowhere/x: this file, in which the hosts are named"),
        ({"PBS_NODEFILE": "/"}, "PBS_NODEFILE=/: this file, in which the hosts are named, cannot be read"),
        ({"PBS_NODEFILE": "/dev/null"}, "PBS_NODEFILE='/dev/null': no host is named there"),
    ],
)  # fmt: skip
def test_variables_that_cannot_be_right_are_refused_by_name(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        found(environ)
    assert message in str(caught.value)
    assert str(caught.value).endswith(
        "; unset it, or name the hosts with --hostfile (--launcher=local: this machine only)"
    )


@pytest.mark.parametrize(
    ("variable", "data", "message"),
    [
        ("PBS_NODEFILE", b"n1\n\xff\n", "not UTF-8 text (byte 3)"),
        ("PBS_NODEFILE", b"n1\nn2[0]\n", "line 2: 'n2[0]': 'n2[0]' is not the name of a host"),
        ("PBS_NODEFILE", b"n1\0\n", "a host's name is made of letters"),
        ("PE_HOSTFILE", b"c1\n", "line 1: 'c1': write a host, then its number of slots and its queue"),
        ("HYDRA_HOST_FILE", b"a:8\nb:eight\n", "line 2: 'b:eight': allowed is a host, with its number"),
        ("HYDRA_HOST_FILE", b"a:8 slots=8\n", "allowed is a host, with its number of slots"),
        ("HYDRA_HOST_FILE", b"b user=-oX\n", "a user is made of letters"),
        ("OMPI_MCA_orte_default_hostfile", b"+n0 slots=2\n", "a host's name is made of letters"),
    ],
)
def test_files_that_cannot_be_read_are_refused_with_the_line(
    variable: str, data: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "nodes").write_bytes(data)
    with pytest.raises(LaunchError) as caught:
        found({variable: str(tmp_path / "nodes")})
    assert str(caught.value).startswith(f"{variable}={tmp_path}/nodes")
    assert message.replace("a user is", "user is") in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2"}, "4 processes that srun started"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, "2 processes that mpirun started"),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, "2 processes that mpiexec started"),
        # A batch script is task 0 of however many it asks for, and runs once.
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, ""),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ""),
    ],
)  # fmt: skip
def test_a_process_that_was_started_with_others_is_known(environ: dict[str, str], told: str) -> None:
    assert (told in task_of(environ)) if told else not task_of(environ)


@settings(max_examples=100)
@given(
    st.sampled_from([one.variable for one in SOURCES if not one.is_file]),
    st.text("n1[]-,:( x)0@", max_size=20),
)
def test_any_text_is_read_or_refused(variable: str, text: str) -> None:
    environ = {variable: text, "SLURM_TASKS_PER_NODE": text}
    with suppress(LaunchError):
        found(environ, of_step=True)
