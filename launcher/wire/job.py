"""The job as a node gets it: the processes to start there, and how.

It travels as JSON objects: their keys are the fields below, no more and no fewer,
and each value has the type declared here.
"""

from __future__ import annotations

from .frames import fits_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NamedTuple, TypeVar

    Kind = TypeVar("Kind")
else:
    from .fast_tuple import Record as NamedTuple


# Nodes of a job without SSH prove to each other that they know it; no worker gets it.
TOKEN_VARIABLE = "DSLAUNCH_TOKEN"


class RankJob(NamedTuple):
    """One process to start."""

    rank: int
    env: list[list[str]]  # its own variables: name and value
    arguments: list[str]  # the words after the interpreter; the whole command where there is none


class NodeJob(NamedTuple):
    """The work of one host. Paths are those of the host, and may begin with `~/`."""

    cwd: str
    python: str | None  # None with --no_python; empty: the one that runs the agent
    keeps_python: bool  # also if --venv_script puts another one on PATH
    script: str | None  # a file that must be there
    module: str | None  # the name after -m
    num_head: int  # number of a rank's arguments up to and with the script, module or command
    adds_local_rank: bool  # after these comes --local_rank=N, which is not the user's
    preload: list[str] | None  # None: torch if the script imports it and sharing is safe
    has_timings: bool  # the workers tell of their first collective, and the host what it imports
    has_milestones: bool  # the workers tell of the phases of their start
    venv_script: str | None
    environment: list[list[str]]  # name, then the value: text and the names of variables to put in, by turns
    devices: list[str]  # one for each rank; empty for a command that may use all of them
    ranks: list[RankJob]
    master_port: int | None  # the port to choose, on node 0 only
    is_port_fixed: bool
    kill_grace_s: float
    heartbeat_s: float
    has_stacks: bool  # the workers can be asked for their Python stacks
    save_pid: int | None  # the launcher's process id
    stdin_rank: int | None
    prepare_timeout_s: float
    bind_cores: list[int] | None  # empty for all that the host allows
    is_elastic: bool  # its hosts may change while it runs
    notice_file: str | None  # the file that appears when the host is told to go
    notice_command: str | None  # a shell command whose exit code 0 says the same
    metrics_interval_s: float  # workers report their numbers at most once in it; 0: never
    folds_metrics: bool  # sends only the least, mean and greatest over all ranks here
    is_verbatim: bool  # output is passed on unchanged, without lines
    is_server: bool  # its command ends with the job and may be started again; it is no rank
    health: list[str] | None  # host, port and path at which the server is asked whether it is healthy
    holds_memory: bool  # the agent holds snapshots of its workers
    keeps_agent: bool  # another attempt of the job may follow, with the same agent


class WrongForm(ValueError):
    """The data is not the record that it should be; the message names the field."""


def as_json(value: Any) -> Any:
    """Return a record as an object, with those in its lists."""
    if isinstance(value, list):
        return [as_json(one) for one in value]
    fields = getattr(value, "_fields", None)
    return value if fields is None else {name: as_json(getattr(value, name)) for name in fields}


def read_record(kind: Callable[..., Kind], given: Any, what: str, **inner: Any) -> Kind:
    """Return the record that `as_json` made an object of.

    `inner`: its fields that are lists of records, each with the kind of these.

    Errors: WrongForm that names the field that is missing, unknown or of another type
    """
    fields: dict[str, str] = kind.__annotations__
    if not isinstance(given, dict):
        raise WrongForm(f"{what} is {given!r}; it must have {', '.join(fields)}")
    for name in {**fields, **given}:
        if name not in given:
            raise WrongForm(f"{what} has no {name}")
        if name not in fields:
            raise WrongForm(f"{what} has {name}, which is none of {', '.join(fields)}")
        if not fits_of("list[Any]" if name in inner else fields[name])(given[name]):
            raise WrongForm(f"{name} of {what} is {given[name]!r}; it must be {fields[name]}")
    for name, one in inner.items():
        items = enumerate(given[name])
        given = {**given, name: [read_record(one, item, f"{name}[{place}]") for place, item in items]}
    return kind(**given)


def read_job(given: Any) -> NodeJob:
    """Read a NodeJob. Errors: WrongForm"""
    return read_record(NodeJob, given, "the job", ranks=RankJob)
