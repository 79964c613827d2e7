"""The hosts of a Slurm allocation, from the variables that Slurm sets; scontrol is not needed.

[Note: Slots of a Slurm host]
Each process of a job uses one GPU, so the GPUs of the allocation are the slots: those asked for on each node
(SLURM_GPUS_PER_NODE), else those on this node (SLURM_GPUS_ON_NODE, SLURM_JOB_GPUS), which --gres gives to
each. Without GPUs the tasks are the slots. One task on each node is ignored, because Slurm sets it by
itself.

Source: Slurm 22.05, sbatch(1) and srun(1), "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from .host_range import MAX_HOSTS, RangeMistake, expand
from .hostfile_list import split_list
from .scheduler_entry import SchedulerEntry, SchedulerPlace, refusal

NODES, STEP_NODES = "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"
_TASKS, _NUM_NODES = "SLURM_TASKS_PER_NODE", "SLURM_JOB_NUM_NODES"
_TASK_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")
_GPU_COUNT = re.compile(r"(?:[^,:]+:)*([0-9]{1,9})")


def allocation_entries(nodes: str, environ: Mapping[str, str]) -> list[SchedulerEntry]:
    """Return the hosts of the allocation, in Slurm's order. See [Note: Slots of a Slurm host].

    Errors: LaunchError with the variable and its value, also for variables that contradict each other.
    """
    if environ.get("SLURM_HET_SIZE", "1") not in ("", "0", "1"):
        why = f"a job of several components, and {NODES} has the hosts of one of them"
        raise refusal("SLURM_HET_SIZE", environ["SLURM_HET_SIZE"], why)
    names = _names(NODES, nodes)
    number = environ.get(_NUM_NODES, "")
    if number and number != str(len(names)):
        why = f"{NODES} has {len(names)} hosts, so the two are not of one allocation"
        raise refusal(_NUM_NODES, number, why)
    tasks = _tasks(environ, len(names))
    gpus = _gpus(environ, len(names), tasks)
    return _entries(NODES, names, gpus or ([] if set(tasks) == {1} else tasks))


def step_entries(nodes: str, environ: Mapping[str, str]) -> list[SchedulerEntry]:
    """Return the hosts of the step that started this process once on each of them, in Slurm's order.

    Errors: as allocation_entries()
    """
    names = _names(STEP_NODES, nodes)
    return _entries(STEP_NODES, names, _gpus(environ, len(names), []))


def _entries(where: str, names: list[str], slots: list[int]) -> list[SchedulerEntry]:
    """Make the entries; if `slots` is empty, their slots are unknown."""
    place = SchedulerPlace(where, ",".join(names[:4]))
    return [
        SchedulerEntry(name=name, slots=slots[index] if slots else None, place=place)
        for index, name in enumerate(names)
    ]


def _names(where: str, nodes: str) -> list[str]:
    names: list[str] = []
    for word in split_list(nodes):
        try:
            names += expand(word.strip())
        except RangeMistake as mistake:
            raise refusal(where, word, str(mistake)) from None
        if len(names) > MAX_HOSTS:
            raise refusal(where, nodes, f"more hosts than the {MAX_HOSTS} that a job may have")
    known: set[str] = set()
    for name in names:
        if name in known:
            raise refusal(where, nodes, f"host {name!r} is named twice")
        known.add(name)
    return names


def _tasks(environ: Mapping[str, str], num_hosts: int) -> list[int]:
    """Return the tasks of each host; empty if they are not given."""
    text = environ.get(_TASKS, "")
    if not text:
        return []
    pieces = [_TASK_COUNT.fullmatch(piece) for piece in text.split(",")]
    counts = [(int(one[1]), int(one[2] or 1)) for one in pieces if one is not None]
    if len(counts) < len(pieces):
        raise refusal(_TASKS, text, "allowed are numbers, and numbers of hosts behind them, as in 2(x3),1")
    total = sum(times for _, times in counts)
    if total != num_hosts:
        if STEP_NODES in environ:  # srun has set the variable for the hosts of this step
            return []
        why = f"tasks of {total} hosts, and {NODES} has {num_hosts}"
        raise refusal(_TASKS, text, why)
    return [number for number, times in counts for _ in range(times)]


def _gpus(environ: Mapping[str, str], num_hosts: int, tasks: list[int]) -> list[int]:
    """Return the GPUs of each host; empty if there are none, or they are not given."""
    asked = _gpu_count(environ, "SLURM_GPUS_PER_NODE")
    if asked:
        return [asked] * num_hosts
    here = _gpu_count(environ, "SLURM_GPUS_ON_NODE")
    where = "SLURM_GPUS_ON_NODE"
    if not here and environ.get("SLURM_JOB_GPUS"):
        where = "SLURM_JOB_GPUS"
        here = len(environ[where].split(","))
    if not here:
        return []
    in_all = _gpu_count(environ, "SLURM_GPUS")
    is_uneven = bool(environ.get("SLURM_GPUS_PER_TASK")) and len(set(tasks)) > 1
    if is_uneven or (in_all and in_all != here * num_hosts):
        why = (
            f"{here} GPUs on this host, but not every one of the {num_hosts} hosts has as many, and Slurm "
            "does not say how many each has"
        )
        raise refusal(where, environ[where], why)
    return [here] * num_hosts


def _gpu_count(environ: Mapping[str, str], variable: str) -> int:
    """Return 8 for `8`, `a100:8` and `a100:4,v100:4`; 0 if the variable is not set."""
    text = environ.get(variable, "")
    if not text:
        return 0
    pieces = [_GPU_COUNT.fullmatch(piece) for piece in text.split(",")]
    counts = [int(one[1]) for one in pieces if one is not None]
    if len(counts) < len(pieces):
        raise refusal(variable, text, "allowed are numbers of GPUs, with a type or without, as 8 or a100:8")
    return sum(counts)
