"""What was asked for on the command line, checked for form only.

It may import inputs and what stands below it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import click

from . import (
    backend,
    binding,
    check,
    detach,
    drop_in,
    elastic,
    end,
    logs,
    mesh,
    metrics,
    process,
    rendezvous,
    restart,
    start,
    sync,
    trace,
    tree,
)
from .backend import BackendOptions
from .binding import BindingOptions
from .check import CheckOptions
from .detach import DetachOptions
from .drop_in import DropInOptions
from .elastic import ElasticOptions
from .end import EndOptions
from .hosts import SshOptions as SshOptions
from .logs import LogOptions
from .mesh import MeshOptions
from .metrics import MetricsOptions
from .process import ProcessOptions
from .rendezvous import RendezvousOptions
from .restart import RestartOptions
from .start import StartOptions
from .sync import SyncOptions
from .trace import TraceOptions
from .tree import TreeOptions


class Options(NamedTuple):
    """One `dslaunch` command. `hostfile` is None if it was not given; -1 means not given for the counts."""

    program: str
    hostfile: str | None = None
    include: str = ""
    exclude: str = ""
    num_nodes: int = -1
    num_gpus: int = -1
    master_addr: str | None = None
    master_port: int | None = None
    ssh: SshOptions = SshOptions()
    venv_script: str | None = None
    is_module: bool = False
    no_python: bool = False
    no_local_rank: bool = False
    force_multi: bool = False
    exec_prefix: tuple[str, ...] = ()  # for the hosts that the hostfile gives none
    dry_run: bool = False
    kill_grace_s: float = 30.0
    heartbeat_s: float = 30.0
    log_level: str = "info"
    report: str | None = None
    backend: BackendOptions = BackendOptions()
    binding: BindingOptions = BindingOptions()
    check: CheckOptions = CheckOptions()
    detach: DetachOptions = DetachOptions()
    drop_in: DropInOptions = DropInOptions()
    elastic: ElasticOptions = ElasticOptions()
    end: EndOptions = EndOptions()
    logs: LogOptions = LogOptions()
    mesh: MeshOptions = MeshOptions()
    metrics: MetricsOptions = MetricsOptions()
    process: ProcessOptions = ProcessOptions()
    rendezvous: RendezvousOptions = RendezvousOptions()
    restart: RestartOptions = RestartOptions()
    start: StartOptions = StartOptions()
    sync: SyncOptions = SyncOptions()
    trace: TraceOptions = TraceOptions()
    tree: TreeOptions = TreeOptions()
    arguments: tuple[str, ...] = ()

    @property
    def moves_files(self) -> bool:
        """Whether files go to the hosts before the job, or come from them after it."""
        return self.sync.is_on or self.trace.is_on


_SUBJECTS = (
    *(logs, restart, elastic, rendezvous, mesh, binding, process),
    *(drop_in, backend, start, tree, check, detach, sync, metrics, end, trace),
)
SUBJECT_OPTIONS: tuple[click.Option, ...] = tuple(option for one in _SUBJECTS for option in one.OPTIONS)


def read_subjects(given: dict[str, Any]) -> dict[str, Any]:
    """The options that have a file of their own, as fields of Options."""
    return {subject.__name__.rpartition(".")[2]: subject.read(given) for subject in _SUBJECTS}
