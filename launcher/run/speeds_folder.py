"""The measured speeds that this user's folder keeps, and those of a job's hosts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import LaunchError
from ..fit.measured_speeds import OPTION, ClusterSpeeds, file_name, find_speeds, read_speeds, write_speeds
from ..fit.past_run import CompareRun
from ..job.mesh import HostSlots
from ..job.plan import NodePlan
from ..registry.state_folder import SPEEDS, VARIABLE, alone_in, readable_folder, writable_folder


def hosts_of(nodes: Sequence[NodePlan]) -> tuple[HostSlots, ...]:
    """Return the hosts by names that mean the same on every machine: this one by its own name."""
    return tuple(
        HostSlots(socket.gethostname() if node.is_local else node.host.name, len(node.ranks))
        for node in nodes
    )


def check_speeds_place() -> None:
    """Errors: LaunchError if measured speeds cannot be kept in this user's folder"""
    writable_folder(SPEEDS)


def keep(cluster: ClusterSpeeds) -> Path:
    """Write the speeds into this user's folder; return the file.

    Errors: LaunchError if that fails
    """
    path = writable_folder(SPEEDS) / file_name(cluster.hosts, cluster.device)
    with alone_in(path.parent):
        write_speeds(path, cluster)
    return path


def keep_run(path: Path, planned_by: ClusterSpeeds, run: CompareRun) -> str:
    """Add a run to the file of the speeds that it was planned by, as the file is now; return an empty text,
    or why it was not added.
    """
    try:
        with alone_in(path.parent):
            cluster = read_speeds(path)
            if cluster.measured_at != planned_by.measured_at:
                return f"{path}: the hosts were measured anew meanwhile; plan the job once more"
            write_speeds(path, cluster.with_run(run))
    except LaunchError as error:
        return str(error)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return ""


def speeds_of(
    nodes: Sequence[NodePlan], given: str | None, fits: Callable[[ClusterSpeeds], bool]
) -> tuple[Path, ClusterSpeeds] | None:
    """Return the file that was given, or that of the job's hosts, with its speeds; None if there is none.

    `fits`: whether the job's ranks may compute on what was measured. Errors: LaunchError for a file that
    cannot be read, or is of other devices
    """
    if given is None:
        has_place = os.environ.get("HOME") or os.environ.get(VARIABLE)
        return find_speeds(readable_folder(SPEEDS) if has_place else None, hosts_of(nodes), fits)
    path = Path(given).expanduser()
    cluster = read_speeds(path, option=OPTION)
    if not fits(cluster):
        raise LaunchError(
            f"--speeds={path}: was measured on {cluster.device_name}, and the job has other devices; leave "
            "the option out, or change --gpu"
        )
    return path, cluster
