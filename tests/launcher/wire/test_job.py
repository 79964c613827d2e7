"""The job on the wire: what comes out is what went in, and what is not of its form is refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.node.workers.worker_shim import ExternalJob, HostJob
from dslaunch.launcher.wire.frames import Decoder, Prepare, encode, fits_of, text_of
from dslaunch.launcher.wire.job import NodeJob, RankJob, WrongForm, as_json, read_job, read_record

any_text = st.binary(max_size=20).map(text_of)
any_texts = st.lists(any_text, max_size=3)
any_count = st.integers(0, 2**40)
any_value = {
    "str": any_text,
    "bool": st.booleans(),
    "int": any_count,
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "list[str]": any_texts,
    "list[list[str]]": st.lists(any_texts, max_size=3),
    "list[int]": st.lists(any_count, max_size=3),
}
any_value |= {f"{declared} | None": st.none() | values for declared, values in any_value.items()}


def any_record(kind: Any) -> st.SearchStrategy[Any]:
    return st.builds(kind, *(any_value[declared] for declared in kind.__annotations__.values()))


any_value["list[RankJob]"] = st.lists(any_record(RankJob), max_size=3)

# Of each type: what JSON may give instead.
OTHERS: dict[str, tuple[object, ...]] = {
    "str": (None, 7, ["a"]),
    "bool": (None, 0, "true"),
    "int": (None, True, 1.5, "7"),
    "float": (None, True, "soon", 10**400, []),
    "list[str]": (None, "abc", {}, [7], ["a", None]),
    "list[list[str]]": (None, {"A": "b"}, ["A=b"], [["A", 1]]),
    "list[RankJob]": (None, {}, "abc"),
}
OTHERS |= {
    "str | None": (7, ["a"], False),
    "int | None": (True, 1.5, "7"),
    "list[int] | None": ("0-3", [True], [0.5], 4),
    "list[str] | None": ("torch", [7], 4),
}


def a_job() -> dict[str, Any]:
    """As it travels."""
    rank = RankJob(rank=3, env=[["RANK", "3"]], arguments=["-u", "train.py", "two words"])
    job = NodeJob(
        cwd="/home/ada",
        python="~/py/bin/python",
        keeps_python=True,
        script="train.py",
        module=None,
        num_head=2,
        preload=["torch"],
        has_timings=False,
        has_milestones=False,
        venv_script=None,
        environment=[["PATH", "/bin:", "PATH", ""]],
        devices=["0"],
        ranks=[rank],
        master_port=29500,
        is_port_fixed=False,
        kill_grace_s=30.0,
        heartbeat_s=20,
        has_stacks=False,
        save_pid=None,
        stdin_rank=0,
        prepare_timeout_s=600.0,
        bind_cores=[0, 1],
        is_elastic=True,
        notice_file=None,
        notice_command="test -e /run/going",
        metrics_interval_s=1.0,
        folds_metrics=False,
        is_verbatim=False,
        is_server=True,
        health=["", "8000", "/health"],
        holds_memory=True,
        keeps_agent=True,
        adds_local_rank=True,
    )
    given: dict[str, Any] = json.loads(json.dumps(as_json(job)))
    assert read_job(given) == job
    return given


@given(job=any_record(NodeJob))
def test_what_a_node_gets_is_what_was_sent(job: NodeJob) -> None:
    (frame,) = Decoder().feed(encode(Prepare(as_json(job))))
    assert isinstance(frame, Prepare)
    read = read_job(frame.job)
    assert read == job
    assert type(read) is NodeJob
    assert {type(one) for one in read.ranks} <= {RankJob}


@pytest.mark.parametrize("name", NodeJob._fields)
def test_a_key_that_is_missing_is_named(name: str) -> None:
    job = a_job()
    del job[name]
    with pytest.raises(WrongForm, match=rf"^the job has no {name}$"):
        read_job(job)


@pytest.mark.parametrize("name", NodeJob._fields)
def test_a_key_that_is_misspelt_is_named(name: str) -> None:
    with pytest.raises(WrongForm, match=rf"^the job has {name}_, which is none of cwd, .*keeps_agent$"):
        read_job(a_job() | {f"{name}_": 1})


@pytest.mark.parametrize(
    ("name", "declared", "value"),
    [(name, kind, value) for name, kind in NodeJob.__annotations__.items() for value in OTHERS[kind]],
)
def test_a_value_of_another_type_is_named_with_the_type_that_it_must_have(
    name: str, declared: str, value: object
) -> None:
    said = f"{name} of the job is {value!r}; it must be {declared}"
    with pytest.raises(WrongForm, match=f"^{re.escape(said)}$"):
        read_job(a_job() | {name: value})


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        ({"rank": 4, "env": []}, "ranks[1] has no arguments"),
        ({"rank": 4, "env": [], "arguments": [], "argv": []},
         "ranks[1] has argv, which is none of rank, env, arguments"),
        ({"rank": "4", "env": [], "arguments": []}, "rank of ranks[1] is '4'; it must be int"),
        ({"rank": 4, "env": {"A": "b"}, "arguments": []},
         "env of ranks[1] is {'A': 'b'}; it must be list[list[str]]"),
        ({"rank": 4, "env": [], "arguments": [7]}, "arguments of ranks[1] is [7]; it must be list[str]"),
        ([4, [], []], "ranks[1] is [4, [], []]; it must have rank, env, arguments"),
    ],
)  # fmt: skip
def test_a_rank_of_another_form_is_told_by_its_place(rank: object, message: str) -> None:
    job = a_job()
    job["ranks"].append(rank)
    with pytest.raises(WrongForm, match=f"^{re.escape(message)}$"):
        read_job(job)


@pytest.mark.parametrize("value", [None, [], "cwd", 7])
def test_what_is_no_job_at_all_is_refused(value: object) -> None:
    with pytest.raises(WrongForm, match=re.escape(f"the job is {value!r}; it must have cwd, python, ")):
        read_job(value)


@pytest.mark.parametrize("kind", [NodeJob, RankJob, ExternalJob, HostJob])
def test_each_type_that_a_record_declares_is_one_that_can_be_checked(kind: Any) -> None:
    for declared in kind.__annotations__.values():
        assert declared in ("list[RankJob]", "list[HostJob]") or fits_of(declared)


def test_a_host_of_an_external_job_is_told_by_its_place() -> None:
    host = {"name": "w0", "first_rank": 0, "commands": [0], "own": {}}
    job: dict[str, Any] = {
        "launcher": "slurm",
        "says_who": [["SLURM_PROCID"], [], [], []],
        "must_be_told": False,
        "gives_devices": True,
        "master": [],
        "commands": [["-u"]],
        "common": {},
        "hosts": [host, dict(host)],
    }
    assert read_record(ExternalJob, job, "the job", hosts=HostJob).hosts[1].name == "w0"
    del job["hosts"][1]["own"]
    with pytest.raises(WrongForm, match=r"^hosts\[1\] has no own$"):
        read_record(ExternalJob, job, "the job", hosts=HostJob)
