"""Hosts that batch systems and MPI name in variables, or in files whose paths are in variables.

SOURCES is the table, in the order in which it is read. A host that is named several times has the sum of its
slots. Where hosts are only named, once each, their slots are unknown: as many as there are GPUs (slots=auto),
or one where no host can be looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import LaunchError
from .host import MAX_SLOTS, Host, hosts_named, is_ipv6, spelled
from .host_range import MAX_HOSTS
from .hostfile_list import split_slots
from .named_file import read_named
from .scheduler_entry import WAY_OUT, SchedulerEntry, SchedulerPlace, refusal
from .slurm_hosts import NODES, STEP_NODES, allocation_entries, step_entries

Warn = Callable[[str], object]

_COUNT = re.compile("[0-9]{1,9}")
_SLOT_KEYS = ("slots", "cpu", "count")  # Open MPI's
_USER_KEYS = ("username", "user_name", "user")  # words of Open MPI and MPICH


class HostSource(NamedTuple):
    """`variable` names the hosts, or a file that does. `of_step`: the source counts only if this program is
    started once on each of its hosts.
    """

    system: str
    variable: str
    is_file: bool
    of_step: bool = False


class Task(NamedTuple):
    """The place of this process among several that were started at once. `index` counts from 0."""

    program: str
    size_variable: str
    index_variable: str


SOURCES = (
    HostSource("Slurm", STEP_NODES, is_file=False, of_step=True),
    HostSource("Slurm", NODES, is_file=False),
    HostSource("PBS", "PBS_NODEFILE", is_file=True),
    HostSource("LSF", "LSB_MCPU_HOSTS", is_file=False),
    HostSource("LSF", "LSB_DJOB_HOSTFILE", is_file=True),
    HostSource("Grid Engine", "PE_HOSTFILE", is_file=True),
    HostSource("Open MPI", "PRTE_MCA_prte_default_hostfile", is_file=True),
    # Open MPI 4, and Kubeflow's MPI operator
    HostSource("Open MPI", "OMPI_MCA_orte_default_hostfile", is_file=True),
    HostSource("MPICH", "HYDRA_HOST_FILE", is_file=True),
    HostSource("Intel MPI", "I_MPI_HYDRA_HOST_FILE", is_file=True),
)
TASKS = (
    Task("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    Task("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    Task("mpiexec", "PMI_SIZE", "PMI_RANK"),
)


def find_source(environ: Mapping[str, str], *, of_step: bool) -> HostSource | None:
    """Return the first source of the table whose variable is set. `of_step`: this program is started on each
    host.

    Errors: LaunchError for a variable without a value
    """
    for source in SOURCES:
        value = environ.get(source.variable)
        if value is None or (source.of_step and not of_step):
            continue
        if source.system == "Open MPI" and value == "none":  # Open MPI's word for no file
            continue
        if not value.strip():
            raise LaunchError(
                f"{source.variable}={value!r}: it is empty, and {source.system} names hosts there; {WAY_OUT}"
            )
        return source
    return None


def source_of_file(path: str, environ: Mapping[str, str]) -> HostSource | None:
    """Return the source whose file this is, as in `--hostfile $PBS_NODEFILE`."""
    return next((one for one in SOURCES if one.is_file and environ.get(one.variable) == path), None)


def task_of(environ: Mapping[str, str]) -> str:
    """Name the program that started this process together with others, and this process's place among them;
    empty if none did.
    """
    for task in TASKS:
        size, index = environ.get(task.size_variable, ""), environ.get(task.index_variable, "")
        if _COUNT.fullmatch(size) and int(size) > 1 and _COUNT.fullmatch(index):
            return (
                f"this is one of {size} processes that {task.program} started "
                f"({task.size_variable}={size}, {task.index_variable}={index})"
            )
    return ""


def torchrun_hosts(environ: Mapping[str, str]) -> str:
    """Return a warning if torchrun's variables ask for several hosts: they do not name the hosts."""
    number = environ.get("PET_NNODES", "")
    most = number.rpartition(":")[2]
    if not _COUNT.fullmatch(most) or int(most) < 2:
        return ""
    return (
        f"PET_NNODES={number}: torchrun's variables name no hosts, so this job runs on this machine alone; "
        "name the hosts with --hostfile, or start dslaunch on each of them with --no_ssh and --hostfile"
    )


def read_source(
    source: HostSource, environ: Mapping[str, str], *, may_look: bool, warn: Warn = lambda text: None
) -> tuple[Host, ...]:
    """Return the hosts that the source names, in its order; slots=auto occurs only with `may_look`.

    `warn` gets parts without effect.
    Errors: LaunchError with the variable, its value and what to do
    """
    entries = _entries(source, environ, warn)
    if not entries:
        value = environ[source.variable]
        raise LaunchError(f"{source.variable}={value!r}: no host is named there; {WAY_OUT}")
    merged: dict[str, SchedulerEntry] = {}
    for entry in entries:
        key = spelled(entry.name)
        before = merged.get(key)
        slots = entry.slots if before is None else _num_slots(before) + _num_slots(entry)
        merged[key] = (before or entry)._replace(slots=slots)
        if len(merged) > MAX_HOSTS:
            raise entry.place.refusal(f"more hosts than the {MAX_HOSTS} that a job may have")
    is_said = any(entry.slots is not None for entry in merged.values())
    hosts = tuple(_host(one, is_said=is_said, may_look=may_look) for one in merged.values())
    left = tuple(host for host in hosts if host is not None)
    if not left:
        raise entries[0].place.refusal("every host has 0 slots, so none can take part")
    return left


def _num_slots(entry: SchedulerEntry) -> int:
    return 1 if entry.slots is None else entry.slots


def _host(entry: SchedulerEntry, *, is_said: bool, may_look: bool) -> Host | None:
    """Return the host of an entry; None without slots, as with slots=0 in a hostfile."""
    if entry.slots == 0:
        return None
    if entry.slots is not None and entry.slots > MAX_SLOTS:
        raise entry.place.refusal(f"{entry.slots} slots are more than the {MAX_SLOTS} that a host may have")
    # A batch system writes one name for each host, so a bracket cannot be a range
    if re.search(r"[\[\]]", entry.name):
        raise entry.place.refusal(f"{entry.name[:80]!r} is not the name of a host")
    slots = "auto" if not is_said and may_look else str(_num_slots(entry))
    user = {} if entry.user is None else {"user": entry.user}
    (host,) = hosts_named(entry.name, {"slots": slots, **user}, (), place=entry.place)
    return host


def _entries(source: HostSource, environ: Mapping[str, str], warn: Warn) -> list[SchedulerEntry]:
    value = environ[source.variable]
    if source.variable == STEP_NODES:
        return step_entries(value, environ)
    if source.variable == NODES:
        return allocation_entries(value, environ)
    if not source.is_file:
        return _lsf_pairs(source.variable, value)
    where = f"{source.variable}={value}"
    read = _grid_engine_line if source.system == "Grid Engine" else _machine_line
    entries: list[SchedulerEntry] = []
    for number, raw in enumerate(_text(where, value).split("\n"), start=1):
        line = raw.partition("#")[0].strip()
        if line:
            entries.append(read(line, SchedulerPlace(f"{where}, line {number}", line), warn))
    return entries


def _text(where: str, path: str) -> str:
    try:
        return read_named(Path(path)).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        why = f"not UTF-8 text (byte {error.start})" if isinstance(error, UnicodeDecodeError) else str(error)
        why = (error.strerror or why) if isinstance(error, OSError) else why
        raise LaunchError(
            f"{where}: this file, in which the hosts are named, cannot be read ({why}); {WAY_OUT}"
        ) from error


def _lsf_pairs(variable: str, value: str) -> list[SchedulerEntry]:
    """Read `hostA 4 hostB 2`.

    Source: IBM Spectrum LSF, "Environment variable reference", LSB_MCPU_HOSTS
    """
    words = value.split()
    counts = words[1::2]
    if len(words) % 2 or not all(_COUNT.fullmatch(one) for one in counts):
        raise refusal(variable, value, "allowed are hosts, each with its number of slots behind it")
    place = SchedulerPlace(variable, value)
    return [
        SchedulerEntry(name=name, slots=int(one), place=place)
        for name, one in zip(words[::2], counts, strict=True)
    ]


def _grid_engine_line(line: str, place: SchedulerPlace, warn: Warn) -> SchedulerEntry:
    """Read `host slots queue processors`; only the first two are for us.

    Source: Grid Engine, sge_pe(5), $pe_hostfile
    """
    words = line.split()
    if len(words) < 2 or not _COUNT.fullmatch(words[1]):
        raise place.refusal("write a host, then its number of slots and its queue")
    return SchedulerEntry(name=words[0], slots=int(words[1]), place=place)


def _machine_line(line: str, place: SchedulerPlace, warn: Warn) -> SchedulerEntry:
    """Read `host`, `host:8`, or `host slots=8` with other words of Open MPI and MPICH after it.

    Source: Open MPI 4.1 orte/util/hostfile/hostfile_lex.l; MPICH 4 src/pm/hydra, `HYDU_process_mfile_token`
    """
    target, *words = re.sub(r"\s*=\s*", "=", line).split()
    name, text = split_slots(target)
    texts = [] if text is None else [text]
    user, at, host = name.rpartition("@")
    login = user if at else None
    unread: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        key = key.replace("-", "_")
        if equals and key in _SLOT_KEYS:
            texts.append(value)
        elif equals and key in _USER_KEYS:
            login = value.strip('"')
        else:
            unread.append(word)
    if unread:
        warn(f"{place.where}: {' '.join(unread)[:120]!r} has no effect")
    if len(texts) > 1 or not all(_COUNT.fullmatch(one) for one in texts):
        raise place.refusal("allowed is a host, with its number of slots as in 'node1:8' or 'node1 slots=8'")
    bare = host[1:-1] if host.startswith("[") and is_ipv6(host[1:-1]) else host
    return SchedulerEntry(name=bare, slots=int(texts[0]) if texts else None, place=place, user=login)
