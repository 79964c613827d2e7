"""What is planned from the options, the hostfile and this machine: devices above all."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.errors import EXIT_HOST, LaunchError
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.inputs.selection import Selected
from dslaunch.launcher.job import plan_text
from dslaunch.launcher.job.plan import NodePlan, Plan
from dslaunch.launcher.job.restart import Attempt
from dslaunch.launcher.options import Options
from dslaunch.launcher.options.mesh import MeshOptions
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.run import host_pool, make_plan
from dslaunch.launcher.wire.frames import Hello

Planned = Callable[..., "tuple[Plan, str]"]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Planned:
    """The plan of a job and what the launcher says meanwhile, on a machine with 4 GPUs
    unless said otherwise.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(host_pool, "DEFAULT_HOSTFILE", tmp_path / "nowhere")

    def plan(*, visible: str | None = None, num_devices: int = 4, **options: Any) -> tuple[Plan, str]:
        monkeypatch.setattr(host_pool, "count_accelerators", lambda: num_devices)
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        said = io.BytesIO()
        console = Console(log_level="info", err=said)
        given = Options(program="train.py", **options)
        made = make_plan.make_plan(given, make_plan.choose_attempt(given, console))
        console.drain(10.0)
        return made, said.getvalue().decode()

    return plan


UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
MIG = "MIG-GPU-8932f937-d72c/1/0"


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        (None, "0 1 2 3"),
        ("", "0 1 2 3"),  # as DeepSpeed: an empty value is none
        ("2", "2"),
        ("3,1", "3 1"),
        (" 3 , 01 ", "3 1"),
        (UUID, UUID),
        (f"{UUID},0", f"{UUID} 0"),
        (f"{MIG},MIG-41b8", f"{MIG} MIG-41b8"),
    ],
)
def test_a_local_job_uses_the_visible_devices_in_their_order(
    planned: Planned, visible: str | None, devices: str
) -> None:
    plan, said = planned(visible=visible)
    (node,) = plan.nodes
    assert node.devices == tuple(devices.split())
    assert [one.local_rank for one in node.ranks] == list(range(len(node.devices)))
    assert said == ""


@pytest.mark.parametrize("visible", ["-1", "NoDevFiles", " "])
def test_a_local_job_without_a_visible_device_is_refused(planned: Planned, visible: str) -> None:
    with pytest.raises(LaunchError) as caught:
        planned(visible=visible)
    assert str(caught.value) == (
        f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU; unset it, or name the GPUs to use"
    )


@pytest.mark.parametrize("visible", ["0,0", "all", "0;1", "1,01"])
def test_visible_devices_that_cannot_be_read_are_refused(planned: Planned, visible: str) -> None:
    with pytest.raises(LaunchError, match=rf"^CUDA_VISIBLE_DEVICES='{visible}': "):
        planned(visible=visible)


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ({"num_gpus": 2}, "0 1"),
        ({"include": "localhost:3"}, "3"),
        ({"exclude": "localhost:0,3"}, "1 2"),
        ({"include": "localhost"}, "0 1 2 3"),
    ],
)
def test_options_go_before_the_visible_devices_and_a_warning_says_so(
    planned: Planned, options: dict[str, Any], devices: str
) -> None:
    plan, said = planned(visible="2", **options)
    assert plan.nodes[0].devices == tuple(devices.split())
    assert said == (
        "dslaunch: warning: CUDA_VISIBLE_DEVICES=2 is not used: --include, --exclude or --num_gpus decide\n"
    )


def test_without_gpus_the_visible_devices_do_not_matter(planned: Planned) -> None:
    plan, said = planned(visible="3,1", num_devices=0, num_gpus=2)
    assert (plan.nodes[0].devices, said) == (("0", "1"), "")


@pytest.mark.parametrize("options", [{}, {"num_nodes": 1}, {"include": "w1:1@w0"}])
def test_with_a_hostfile_the_visible_devices_are_not_used_and_one_warning_says_why(
    planned: Planned, options: dict[str, Any]
) -> None:
    Path("hosts").write_text("w0 slots=2\nw1 slots=2\n")
    plan, said = planned(visible="1,0", hostfile="hosts", **options)
    assert plan.nodes[0].devices == ("0", "1")
    assert said == (
        "dslaunch: warning: CUDA_VISIBLE_DEVICES=1,0 is not used: it speaks of this machine, and the "
        "hostfile hosts says which devices each host has; choose with --include or devices= in the hostfile\n"
    )


def test_devices_of_the_hostfile_are_those_of_the_plan(planned: Planned) -> None:
    Path("hosts").write_text(f"w0 devices=2,{UUID},0\nw1 slots=2\n")
    plan, said = planned(hostfile="hosts")
    assert [node.devices for node in plan.nodes] == [("2", UUID, "0"), ("0", "1")]
    assert plan.world_size == 5
    assert said == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_nodes": 2},
            "--num_nodes=2 needs a hostfile, and none was given (nor is there {0}/nowhere); give --hostfile",
        ),
        (
            {"include": "127.0.0.1:0"},
            "--include '127.0.0.1:0': no host is named '127.0.0.1'; the hosts are localhost;",
        ),
        ({"include": "localhost:4"}, "--include 'localhost:4': host 'localhost' has slots=4, so 4 is beyond"),
        ({"num_gpus": 5}, "--num_gpus 5: the smallest host, 'localhost', has slots=4; give at most 4"),
        (
            {"num_gpus": 1, "include": "localhost"},
            "--num_gpus 1 and --include 'localhost': a number cannot be",
        ),
        (
            {"num_nodes": 1, "exclude": "localhost"},
            "--num_nodes 1 and --exclude 'localhost': a number cannot be",
        ),
        ({"hostfile": "missing"}, "missing: this hostfile cannot be read (No such file or directory);"),
    ],
)
def test_what_cannot_be_planned_on_this_machine(
    planned: Planned, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(LaunchError) as caught:
        planned(**options)
    assert str(caught.value).startswith(message.format(tmp_path))


@pytest.mark.parametrize("names", [{"include": "localhost"}, {"exclude": "localhost"}])
@pytest.mark.parametrize(
    "numbers", [{"num_nodes": 1}, {"num_gpus": 1}, {"num_nodes": 1, "num_gpus": 1}, {"num_gpus": 0}]
)
@pytest.mark.parametrize("hostfile", [None, "hosts"])
def test_numbers_and_names_exclude_each_other_with_a_hostfile_and_without(
    planned: Planned, names: dict[str, Any], numbers: dict[str, Any], hostfile: str | None
) -> None:
    Path("hosts").write_text("localhost slots=4\n")
    with pytest.raises(LaunchError, match="a number cannot be combined with names; give one of the two"):
        planned(hostfile=hostfile, **names, **numbers)


def test_the_word_none_is_no_hostfile(planned: Planned) -> None:
    plan, _ = planned(hostfile="None")
    assert [node.host.name for node in plan.nodes] == ["localhost"]


# slots=auto. The look itself is in test_probe.py, and on real hosts in test_ssh_job.py.


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Hosts w0, w1 ... with as many GPUs as their number; w9 is down.

    The names of those that were looked at.
    """
    names: list[str] = []

    def look(nodes: tuple[NodePlan, ...], connect: object, *, timeout_s: float) -> dict[int, Hello | str]:
        names.extend(node.host.name for node in nodes)
        return {
            node.node_rank: "it is down"
            if node.host.name == "w9"
            else Hello(
                hostname=node.host.name,
                python="3.11.2",
                reached_at="",
                num_devices=int(node.host.name[1:]),
                pid=1,
            )
            for node in nodes
        }

    monkeypatch.setattr("dslaunch.launcher.fleet.probe.probe", look)
    return names


@pytest.mark.parametrize(
    ("options", "devices", "names"),
    [
        ({}, {"w0": 1, "w2": 2, "k": 2, "w3": 3}, "w0 w2 w3"),
        ({"num_nodes": 2}, {"w0": 1, "w2": 2}, "w0 w2"),
        ({"num_nodes": 1, "num_gpus": 4}, {"w0": 4}, "w0"),  # a host without GPUs takes as many CPU workers
        ({"include": "w3@k:1"}, {"k": 1, "w3": 3}, "w3"),
        ({"include": "k"}, {"k": 2}, ""),
        ({"exclude": "w0@w3:0"}, {"w2": 2, "k": 2, "w3": 2}, "w2 w3"),
    ],
)
def test_auto_is_what_a_look_at_the_hosts_finds(
    planned: Planned, looked_at: list[str], options: dict[str, Any], devices: dict[str, int], names: str
) -> None:
    Path("hosts").write_text("w0 slots=auto\nw2 slots=auto\nk slots=2\nw3 slots=auto\n")
    plan, said = planned(hostfile="hosts", **options)
    assert {node.host.name: len(node.devices) for node in plan.nodes} == devices
    assert looked_at == names.split()
    count = len(looked_at)
    hosts = "1 host" if count == 1 else f"{count} hosts"
    assert said == (f"dslaunch: slots=auto: looking at {hosts}\n" if count else "")


def test_a_host_that_cannot_be_looked_at_ends_the_job_before_it_begins(
    planned: Planned, looked_at: list[str]
) -> None:
    Path("hosts").write_text("w1 slots=auto\nw9 slots=auto\n")
    with pytest.raises(LaunchError) as caught:
        planned(hostfile="hosts")
    assert str(caught.value) == (
        "slots=auto needs a look at each host: w9: it is down; repair that, or write slots=N in the hostfile"
    )
    assert caught.value.exit_code == EXIT_HOST


def test_a_slot_beyond_what_was_found_is_refused(planned: Planned, looked_at: list[str]) -> None:
    Path("hosts").write_text("w2 slots=auto\n")
    with pytest.raises(LaunchError, match=r"^--include 'w2:2': host 'w2' has slots=2, so 2 is beyond"):
        planned(hostfile="hosts", include="w2:2")


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        ({}, {"w": None, "k": 2, "v": None}),
        ({"include": "w:3"}, {"w": None}),
        ({"include": "v:0,7@k:1"}, {"k": 1, "v": None}),
        ({"exclude": "w:3@k:1"}, {"w": None, "k": 1, "v": None}),
        ({"exclude": "w@k"}, {"v": None}),
        ({"num_nodes": 1}, {"w": None}),
    ],
)
def test_a_command_that_looks_at_no_host_takes_any_slot_of_a_host_with_auto(
    options: dict[str, Any], chosen: dict[str, int | None], tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("w slots=auto\nk slots=2\nv slots=auto\n")
    given = Options(program="", hostfile=str(tmp_path / "hosts"), **options)
    found = host_pool.choose_hosts(given, Console(log_level="info"))
    assert {one.host.name: num_slots for one, num_slots in found} == chosen
    assert {one.host.name: one.host.slots for one, _ in found} == {
        name: {"w": None, "k": 2, "v": None}[name] for name in chosen
    }


# What a person sees.


def test_the_plan_shows_what_a_host_has_of_its_own(planned: Planned) -> None:
    Path("hosts").write_text(
        "w0 slots=1\n"
        "w1 devices=3 python=/opt/py cwd='/my job' env.NOTE='a b' env.MY_TOKEN=secret env.P=$HOME/x\n"
    )
    plan, _ = planned(hostfile="hosts")
    shown = plan_text.describe(plan).splitlines()
    start = shown.index("host w1 (node 1, by ssh), devices 3, in /my job")
    assert shown[start:] == [
        "host w1 (node 1, by ssh), devices 3, in /my job",
        "  environment: NOTE='a b' (from hosts:2)",
        "  environment: MY_TOKEN='***' (from hosts:2)",
        "  environment: P='${HOME}/x' (from hosts:2)",
        "  rank 1, local rank 0: /opt/py -u train.py --local_rank=0",
    ]
    assert "host w0 (node 0, by ssh), devices 0" in shown


@pytest.mark.parametrize(
    ("given", "ports"),
    [
        (None, [(29500, False), (29501, False), (29502, False)]),
        (4000, [(4000, True), (4001, False), (4002, False)]),
        (65534, [(65534, True), (65535, False), (65532, False)]),
    ],
)
def test_each_attempt_has_a_port_of_its_own(given: int | None, ports: list[tuple[int, bool]]) -> None:
    """A port that was given must be free; the next ones are where to begin to look."""
    options = Options(program="train.py", master_port=given)
    hosts = (Selected(host=Host(name="localhost", slots=1), devices=("0",)),)
    plans = [make_plan.make_plan(options, Attempt(hosts=hosts, run_id="r", number=one)) for one in range(3)]
    assert [(plan.master.port, plan.master.is_port_fixed) for plan in plans] == ports


def test_each_rank_is_told_the_mesh_and_a_dry_run_shows_it(planned: Planned) -> None:
    plan, _ = planned(num_gpus=4, mesh=MeshOptions(sizes=(("tp", 2), ("dp", 2))))
    ranks = [rank for node in plan.nodes for rank in node.ranks]
    assert [dict(rank.env)["DSLAUNCH_MESH"] for rank in ranks] == ["dp=2,tp=2"] * 4
    assert "\n  tp    2     1       yes\n  dp    2     2       yes\n" in plan_text.describe(plan)
    plan, _ = planned(num_gpus=4)
    assert "DSLAUNCH_MESH" not in dict(plan.nodes[0].ranks[0].env)


def test_a_job_that_starts_again_on_fewer_hosts_has_a_smaller_dp(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    del planned
    options = Options(program="train.py", mesh=MeshOptions(sizes=(("tp", 2), ("dp", 4))))
    host = Selected(host=Host(name="node1", slots=4), devices=("0", "1", "2", "3"))
    plan = make_plan.make_plan(options, Attempt(run_id="r", hosts=(host,), number=1))
    assert dict(plan.nodes[0].ranks[0].env)["DSLAUNCH_MESH"] == "dp=2,tp=2"
    with pytest.raises(LaunchError, match="leave dp out, which is then 2"):
        make_plan.make_plan(options, Attempt(run_id="r", hosts=(host,)))
