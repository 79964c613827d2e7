"""From facts to a summary: the whole text is compared with golden files, single rules are rows of tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.fleet.check_facts import ClusterFacts, HostFacts
from dslaunch.launcher.fleet.check_summary import CheckSummary, as_dict, as_text, summary_of

GOLDEN = Path(__file__).parents[1] / "golden"
GIB = 1 << 30
MISSING = "No such file or directory"


def answers(**changed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Those of a good host, with some of them changed."""
    good: dict[str, dict[str, Any]] = {
        "system": {
            "hostname": "",
            "boot_id": "",
            "kernel": "6.1.0-18",
            "machine": "x86_64",
            "num_cpus": 64,
            "numactl": "/usr/bin/numactl",
            "memlock": -1,
            "nofile": 65536,
            "memory_bytes": 503 * GIB,
            "memory_free_bytes": 480 * GIB,
        },
        "shm": {"problem": "", "size_bytes": 252 * GIB, "free_bytes": 252 * GIB},
        "tmp": {"problem": "", "size_bytes": 900 * GIB, "free_bytes": 700 * GIB},
        "cwd": {"problem": "", "size_bytes": 900 * GIB, "free_bytes": 700 * GIB},
        "python": {"version": "3.11.7", "problem": ""},
        "torch": {"version": "2.6.0", "platform": "CUDA 12.4", "nccl": "2.21.5", "problem": ""},
        "gpu": {"driver": "550.54.15", "names": ["NVIDIA H100"] * 8, "num": 8},
        "link": {"fastest_mbit": 200_000, "names": ["mlx5_0:1 200 Gbit/s"], "faults": []},
    }
    return {question: {**facts, **changed.get(question, {})} for question, facts in good.items()}


def host(place: int, **changed: Any) -> HostFacts:
    name = f"node{place + 1}"
    facts = changed.pop("answers", answers())
    if "system" in facts:
        facts["system"] = {**facts["system"], "hostname": facts["system"]["hostname"] or name}
    given: dict[str, Any] = {
        "name": name,
        "node_rank": place,
        "num_slots": 8,
        "devices": tuple("01234567"),
        "python": "/opt/py/bin/python",
        "cwd": "/home/ada/job",
        "answers": facts,
        "clock_offset_s": 0.0002,
        "clock_error_s": 0.0003,
        "reach": None if place == 0 else ("",),
        **changed,
    }
    return HostFacts(**given)


def cluster(*hosts: HostFacts, **changed: Any) -> ClusterFacts:
    given: dict[str, Any] = {
        "hosts": hosts,
        "port": 29500,
        "is_port_fixed": False,
        "candidates": ("10.0.0.1",) if len(hosts) > 1 else (),
        "listening_problem": "",
        "timeout_s": 60.0,
        "took_s": 1.25,
        **changed,
    }
    return ClusterFacts(**given)


def texts(summary: CheckSummary, *, are_problems: bool) -> list[tuple[str, ...]]:
    return [(*one.hosts, one.text) for one in summary.findings if one.is_problem is are_problems]


def lost(place: int, why: str) -> HostFacts:
    return host(place, problem=why, answers={}, clock_offset_s=None, clock_error_s=0.0, reach=None)


CLUSTERS = {
    "check-good": cluster(*(host(place) for place in range(4))),
    "check-one-host": cluster(host(0)),
    "check-many-faults": cluster(
        host(0),
        lost(1, "node2 port 22 refused the connection; is sshd running there, on this port?"),
        host(2,
             answers=answers(python={"version": "", "problem": MISSING},
                 torch={"version": "", "platform": "", "nccl": "", "problem": MISSING}), reach=("", "")),
        host(3, answers=answers(cwd={"problem": MISSING, "free_bytes": 0, "size_bytes": 0}),
             reach=("did not answer within 5 s", "")),
        host(4,
             answers=answers(gpu={"driver": "535.1", "names": ["NVIDIA H100"] * 7, "num": 7},
                 torch={"version": "2.4.0"}), reach=("", "")),
        host(5, answers=answers(
            shm={"size_bytes": 64 << 20, "free_bytes": 64 << 20}, tmp={"free_bytes": 5 << 20},
            system={"memlock": 8 << 20, "memory_free_bytes": 12 * GIB, "nofile": 256, "numactl": ""}),
             reach=("", "")),
        host(6, clock_offset_s=-12.04, reach=("", "")),
        host(7, unanswered=("cwd", "torch"),
             answers={key: facts for key, facts in answers().items() if key not in ("cwd", "torch")},
             wrong=(("gpu", "num is 'eight'"),), reach=("", "")),
        candidates=("192.168.0.1", "10.0.0.1"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_report_as_people_see_it(name: str) -> None:
    text = as_text(CLUSTERS[name], summary_of(CLUSTERS[name]))
    assert text == (GOLDEN / f"{name}.txt").read_text(), f"\n{text}"


def test_the_report_as_machines_see_it() -> None:
    facts = CLUSTERS["check-many-faults"]
    text = json.dumps(as_dict(facts, summary_of(facts)), indent=1) + "\n"
    assert text == (GOLDEN / "check-many-faults.json").read_text(), f"\n{text}"


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"problem": "connected, then nothing was heard for 10 s"},
         "connected, then nothing was heard for 10 s"),
        ({"answers": answers(python={"problem": MISSING})},
         "no Python at /opt/py/bin/python; every host needs"),
        ({"answers": answers(python={"problem": "Exec format error"})},
         "/opt/py/bin/python does not run: Exec"),
        ({"answers": answers(cwd={"problem": MISSING})}, "cannot use the folder /home/ada/job: No such file"),
        ({"answers": answers(torch={"problem": "ImportError: libcudart"})},
         "PyTorch cannot be imported by /opt"),
        ({"answers": answers(gpu={"num": 7})}, "slots=8, but there are 7 GPUs; correct slots="),
        ({"answers": answers(gpu={"num": 1})}, "slots=8, but there is 1 GPU; correct slots="),
        ({"answers": answers(gpu={"num": 0})}, "slots=8, but there are 0 GPUs; correct slots="),
        ({"unanswered": ("cwd",)}, "no answer within 60 s about cwd; look at the host, or give it more time"),
        ({"wrong": (("gpu", "num is 'x'"),)}, "its answer about gpu cannot be used: num is 'x'"),
        ({"reach": ("refused the connection",)},
         "cannot reach node1, where rank 0 will listen on port 29500: 10.0.0.1"),
    ],
)  # fmt: skip
def test_what_keeps_a_host_from_being_used(changed: dict[str, Any], problem: str) -> None:
    facts = cluster(host(0), host(1, **changed), host(2))
    summary = summary_of(facts)
    ((name, text),) = texts(summary, are_problems=True)
    assert name == "node2"
    assert text.startswith(problem)
    assert summary.exit_code == 3
    assert summary.num_usable == 2


@pytest.mark.parametrize("option", ["--timeout", "--prepare_timeout"])
def test_a_host_that_did_not_answer_is_told_with_the_option_that_gives_it_more_time(option: str) -> None:
    ((_, text),) = texts(
        summary_of(cluster(host(0), host(1, unanswered=("cwd",)), timeout_option=option)), are_problems=True
    )
    assert text.endswith(f"give it more time with {option}")


@pytest.mark.parametrize(
    ("changed", "warning"),
    [
        ({"answers": answers(shm={"size_bytes": 64 << 20})},
         "/dev/shm holds 64 MiB; data loaders and NCCL need"),
        ({"answers": answers(shm={"problem": MISSING})}, "/dev/shm cannot be used: No such file"),
        ({"answers": answers(tmp={"free_bytes": 9})}, "9 bytes free in /tmp; make room"),
        ({"answers": answers(tmp={"problem": MISSING})}, "/tmp cannot be used: No such file"),
        ({"answers": answers(cwd={"free_bytes": 5 << 20})}, "5.0 MiB free in the job's folder; make room"),
        ({"answers": answers(system={"nofile": 256})}, "ulimit -n is 256; large jobs need"),
        ({"answers": answers(link={"fastest_mbit": 1000})},
         "its fastest link has 1 Gbit/s, where most hosts have 200; look"),
        ({"answers": answers(link={"faults": ["mlx5_1 port 1 is DOWN"]})},
         "mlx5_1 port 1 is DOWN; look at its cable"),
        ({"answers": answers(system={"memory_free_bytes": 100 * GIB})},
         "100 GiB of its 503 GiB of memory are free, where most hosts have 480 GiB; end what"),
        ({"clock_offset_s": 3.0}, "its clock is 3.0 s ahead of this machine's (+- 0.3 ms); logs"),
        ({"clock_offset_s": -3.0}, "its clock is 3.0 s behind this machine's"),
        ({"answers": answers(python={"version": "3.10.2"})},
         "Python is not the same everywhere: 3.11.7 on node[1,3]"),
        ({"answers": answers(torch={"version": "2.5.0"})},
         "PyTorch is not the same everywhere: 2.6.0, CUDA 12.4 on"),
        ({"answers": answers(torch={"platform": ""})},
         "PyTorch is not the same everywhere: 2.6.0, CUDA 12.4 on"),
        ({"answers": answers(torch={"nccl": "2.20.5"})},
         "NCCL is not the same everywhere: 2.21.5 on node[1,3]"),
        ({"answers": answers(gpu={"driver": "1.2"})},
         "NVIDIA driver is not the same everywhere: 550.54.15 on"),
    ],
)  # fmt: skip
def test_what_is_only_warned_about(changed: dict[str, Any], warning: str) -> None:
    summary = summary_of(cluster(host(0), host(1, **changed), host(2)))
    ((name, text),) = texts(summary, are_problems=False)
    assert name == "node2"
    assert text.startswith(warning)
    assert summary.exit_code == 0
    assert summary.num_usable == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"clock_offset_s": 5.0, "clock_error_s": 4.5},  # the round trip was too long to tell
        {"num_slots": None, "devices": ()},
        {"num_slots": 4, "devices": ("4", "5", "6", "7")},
        {"devices": ("GPU-1234",)},
        {"answers": answers(system={"nofile": -1})},
    ],
)
def test_what_is_no_fault(changed: dict[str, Any]) -> None:
    assert summary_of(cluster(host(0), host(1, **changed), host(2))).findings == ()


def test_a_cluster_without_gpus_or_pytorch_is_usable() -> None:
    bare = answers(
        gpu={"driver": "", "names": [], "num": 0},
        torch={
            "version": "",
            "platform": "",
            "nccl": "",
            "problem": "ModuleNotFoundError: No module named 'torch'",
        },
    )
    summary = summary_of(cluster(host(0, answers=bare), host(1, answers=bare)))
    assert summary.exit_code == 0
    ((*names, text),) = texts(summary, are_problems=False)
    assert names == ["node1", "node2"], "one sentence for both"
    assert text.startswith("PyTorch cannot be imported by /opt/py/bin/python: ModuleNotFoundError")


def test_a_busy_port_is_a_problem_only_if_it_was_asked_for() -> None:
    hosts = (
        host(0, answers={**answers(), "port_owner": {"owner": "python3 (process 7)"}}),
        host(1, reach=None),
    )
    changed: dict[str, Any] = {"listening_problem": "port 29500 is in use", "candidates": ()}
    summary = summary_of(cluster(*hosts, **changed))
    assert texts(summary, are_problems=False) == [
        ("node1",
         ("port 29500 is in use by python3 (process 7); a job takes another, unless --master_port asks "
          "for this one")),
    ]  # fmt: skip
    summary = summary_of(cluster(*hosts, **changed, is_port_fixed=True))
    assert texts(summary, are_problems=True) == [
        ("node1", "port 29500 is in use by python3 (process 7); choose another --master_port")
    ]


def test_node_0_that_is_lost_says_why_nobody_tried_to_reach_it() -> None:
    summary = summary_of(cluster(lost(0, "gone"), host(1, reach=None), host(2, reach=None), candidates=()))
    assert texts(summary, are_problems=False) == [
        ("node2", "node3", "whether they reach node 0 was not tried, because node1 cannot be used")
    ]


def test_two_names_of_one_machine_are_found() -> None:
    same = answers(system={"boot_id": "a-b", "hostname": "box"})
    other = answers(system={"boot_id": "a-b", "hostname": "other"})
    summary = summary_of(cluster(host(0, answers=same), host(1, answers=same), host(2, answers=other)))
    ((*names, text),) = texts(summary, are_problems=False)
    assert names == ["node1", "node2"]
    assert text.startswith("are one machine, box: ")


def test_the_address_that_all_reach_is_named_with_those_that_some_do_not() -> None:
    facts = cluster(host(0), host(1, reach=("refused", "")), host(2, reach=("", "")), candidates=("a", "b"))
    summary = summary_of(facts)
    assert summary.master_addr == "b"
    assert summary.master == "b, port 29500: reached by all that were asked; a is not reached by node2"


def test_many_values_are_not_listed_without_end() -> None:
    hosts = [
        host(place, answers=answers(system={"hostname": f"ip-10-0-0-{place * place}"})) for place in range(20)
    ]
    (row,) = [one for one in summary_of(cluster(*hosts)).rows if one.label == "host name"]
    assert len(row.values) == 9
    assert row.values[-1][0] == "12 more values"
    assert sum(len(names) for _, names, _ in row.values) == 20


def test_without_a_majority_nobody_is_odd() -> None:
    hosts = [host(place, answers=answers(system={"kernel": f"6.{place % 2}"})) for place in range(4)]
    (row,) = [one for one in summary_of(cluster(*hosts)).rows if one.label == "kernel"]
    assert [is_odd for _, _, is_odd in row.values] == [False, False]
