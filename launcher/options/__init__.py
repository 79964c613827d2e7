"""The options of the command line, checked for form only.

An option is one field of a record, made by `option()` or `flag()` of option.py: they have everything that the
command line, the help and the shells need. It may import inputs and what stands below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import click

from ..errors import LaunchError
from ..inputs.env_file import EnvEntry
from ..inputs.host import MAX_SLOTS
from .backend import WAY_OPTION, BackendOptions
from .binding import BindingOptions
from .check import CheckOptions
from .detach import DetachOptions
from .drop_in import DropInOptions
from .elastic import ElasticOptions
from .end import EndOptions
from .exec_prefix import prefix
from .hosts import SshOptions as SshOptions, num_nodes
from .logs import LogOptions
from .mesh import MeshOptions
from .metrics import MetricsOptions
from .number import PORT, Seconds, Whole
from .option import flag, given_in, option, options_of, record
from .process import ProcessOptions
from .rendezvous import RendezvousOptions
from .restart import RestartOptions
from .roles import RoleOptions
from .snapshots import SnapshotOptions
from .start import StartOptions
from .sync import SyncOptions
from .text import address
from .trace import TraceOptions
from .tree import TreeOptions

# A larger number is surely a typing mistake, and would start that many processes here. Up to this number the
# host's own limits decide: see node/system/limits.py.
NUM_GPUS = Whole(0, MAX_SLOTS, absent=-1, meaning=", the most that one host may have (0: no limit)")


@record
class Options(NamedTuple):
    """One `dslaunch` command. `hostfile` is None if it was not given; -1 means not given for the counts.

    The help shows the options of a topic in the order of these fields.
    """

    program: str
    hostfile: str | None = option(
        "-H",
        "--hostfile",
        topic="hosts",
        takes_stream=True,
        metavar="FILE",
        help="Hosts and slots: a file, -, or a list.  [default: /job/hostfile, or a batch system's]",
    )
    include: str = option(
        "-i",
        "--include",
        topic="hosts",
        default="",
        metavar="HOSTS",
        help="Use only these: host[:slot,...][@host...].",
    )
    exclude: str = option(
        "-e", "--exclude", topic="hosts", default="", metavar="HOSTS", help="Use all but these; same form."
    )
    num_nodes: int = option(
        "--num_nodes",
        topic="hosts",
        default=-1,
        callback=num_nodes,
        metavar="N",
        help="Use the first N hosts, or of a job MIN:MAX of them.",
    )
    num_gpus: int = option(
        "--num_gpus",
        deepspeed="--num_accelerators",
        topic="hosts",
        default=-1,
        type=NUM_GPUS,
        metavar="N",
        help="Use the first N slots of each host.",
    )
    force_multi: bool = flag(
        "--force_multi", topic="hosts", help="Reach every host by SSH, this machine too."
    )
    ssh: SshOptions = SshOptions()
    quiet: bool = flag("-q", "--quiet", topic="output", help="The same as --log_level=error.")
    log_level: str = option(
        "--log_level",
        topic="output",
        default="info",
        read=str.lower,
        type=click.Choice(["debug", "info", "warning", "error", "critical"], case_sensitive=False),
        help="What dslaunch itself prints.  [default: info]",
    )
    logs: LogOptions = LogOptions()
    report: str | None = option(
        "--report",
        topic="output",
        metavar="FILE",
        help="Write how the job ended, and its phases, to FILE as JSON.",
    )
    metrics: MetricsOptions = MetricsOptions()
    is_module: bool = flag(
        "-m", "--module", topic="start", help="SCRIPT is a Python module, as with `python -m`."
    )
    no_python: bool = flag("--no_python", topic="start", help="SCRIPT is a program to run as it is.")
    no_local_rank: bool = flag(
        "--no_local_rank", topic="start", help="Do not add --local_rank=N to the script's arguments."
    )
    venv_script: str | None = option(
        "--venv_script", topic="start", metavar="FILE", help="Shell script to source on every host first."
    )
    exec_prefix: tuple[str, ...] = option(  # the prefix for hosts without one in the hostfile
        "--exec_prefix",
        topic="start",
        default=(),
        read=prefix,
        metavar="WORDS",
        help=(
            'On every host, run the job inside a container that these words lead into: "podman exec -i box". '
            "{host} is the host's name."
        ),
    )
    drop_in: DropInOptions = DropInOptions()
    start: StartOptions = StartOptions()
    process: ProcessOptions = ProcessOptions()
    mesh: MeshOptions = MeshOptions()
    master_addr: str | None = option(
        "--master_addr",
        topic="start",
        read=address,
        metavar="ADDR",
        help="Address of rank 0.  [default: node 0's, as the others reach it]",
    )
    master_port: int | None = option(
        "--master_port",
        topic="start",
        type=PORT,
        metavar="PORT",
        help="Port of rank 0.  [default: 29500, or another if that is in use]",
    )
    binding: BindingOptions = BindingOptions()
    check: CheckOptions = CheckOptions()
    tree: TreeOptions = TreeOptions()
    end: EndOptions = EndOptions()
    trace: TraceOptions = TraceOptions()
    restart: RestartOptions = RestartOptions()
    snapshots: SnapshotOptions = SnapshotOptions()
    roles: RoleOptions = RoleOptions()
    heartbeat_s: float = option(
        "--heartbeat",
        topic="failures",
        default=30.0,
        type=Seconds(1),
        metavar="S",
        help="Seconds of silence after which a host counts as lost.  [default: 30]",
    )
    kill_grace_s: float = option(
        "--kill_grace",
        topic="failures",
        default=30.0,
        type=Seconds(),
        metavar="S",
        help="Seconds between SIGTERM and SIGKILL when the job is stopped.  [default: 30]",
    )
    detach: DetachOptions = DetachOptions()
    elastic: ElasticOptions = ElasticOptions()
    sync: SyncOptions = SyncOptions()
    backend: BackendOptions = BackendOptions()
    rendezvous: RendezvousOptions = RendezvousOptions()
    autotuning: str | None = option(
        "--autotuning",
        topic="deepspeed",
        type=click.Choice(["tune", "run"]),
        help="Find the fastest ds_config, as `dslaunch plan --tune` does; run: and start the job with it.",
    )
    dry_run: bool = flag("--dry_run", topic="information", help="Print what would run where, and stop.")
    arguments: tuple[str, ...] = ()
    variables: tuple[EnvEntry, ...] = ()  # those that a command of dslaunch sets for every rank

    @property
    def moves_files(self) -> bool:
        """Tell whether files go to the hosts before the job, or come from them after it."""
        return self.sync.is_on or self.trace.is_on

    @property
    def may_start_again(self) -> bool:
        """Tell whether another attempt of the job may follow."""
        return self.restart.is_on or self.elastic.is_on

    def settled(self, given: Mapping[str, Any]) -> Options:
        """Settle the options. Errors: LaunchError for options without effect in this way of starting a job"""
        launcher, no_ssh = self.backend.launcher, self.rendezvous.no_ssh
        for subject in (self.tree, self.detach, self.sync, self.roles):
            subject.check(launcher, no_ssh=no_ssh)
        self.snapshots.check(
            launcher,
            no_ssh=no_ssh,
            may_start_again=self.may_start_again,
            has_tree=self.tree.above is not None,
        )
        if self.roles.is_on and self.elastic.is_on:
            name = next((one for one in given_in(self.elastic)), "--max_nodes (--num_nodes MIN:MAX)")
            raise LaunchError(
                f"{name} and --role exclude each other: servers do not move when the hosts of a job change; "
                "leave out one of them (--spares and --min_nodes replace trainers after a failure)"
            )
        if self.autotuning is not None:
            self._check_autotuning()
        return self._replace(log_level="error") if self.quiet else self

    def _check_autotuning(self) -> None:
        """Errors: LaunchError for options that trials cannot have"""
        for name, is_given in (
            ("--dry_run", self.dry_run),
            ("--detach", self.detach.is_on),
            ("--watch", self.detach.is_watched),
            ("--role", self.roles.is_on),
        ):
            if is_given:
                raise LaunchError(
                    f"--autotuning={self.autotuning} and {name} exclude each other: trials run one after "
                    "the other, in the foreground, and start no servers; leave out one of them"
                )


JOB_OPTIONS = options_of(Options)
_CHOICE = ("hostfile", "include", "exclude", "num_nodes", "exec_prefix")
# Options of the other commands that reach hosts.
HOST_OPTIONS: tuple[click.Option, ...] = (
    *(one for one in JOB_OPTIONS if one.name in _CHOICE),
    *options_of(SshOptions),
    WAY_OPTION,
)
