"""The launcher's settings in a worker's environment. The only file that reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from math import isfinite

from ..shared import variables
from ..shared.axes import AXES, ORDER
from .errors import ConfigError
from .started import StartedProcess, find_started

_DEFAULT_TIMEOUT_MIN = 30
_DEBUG = "collectives"  # allowed value of DSLAUNCH_DEBUG


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotSettings:
    """Snapshots in memory that the launcher was asked for: every so many steps, or seconds."""

    memory: str  # socket of the agent that holds them
    attempt: int  # number of starts of this job before
    steps: int | None
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnvironment:
    """One process of a job. `local_rank` chooses a device on its host and says nothing about `rank`."""

    rank: int
    local_rank: int
    world_size: int
    is_launched: bool  # False: a single process that was started without a launcher, so no address is known
    timeout: timedelta  # limit of one collective
    watchdog_s: float | None  # a collective that takes longer is reported; 0: none is; None: not set
    checks_order: bool  # compares collectives after every step
    max_restarts: int = 0  # number of times that the launcher starts a failed job again
    local_world_size: int = 1  # workers of the job on this host
    mesh: tuple[tuple[str, int], ...] = ()  # sizes of axes that the launcher was given, by name
    mesh_order: tuple[str, ...] = ()  # axes, the outermost first; empty: the launcher was given none
    resize_file: str | None = None  # exists once the hosts are to change; None: they cannot change
    snapshots: SnapshotSettings | None = None  # None: none are taken
    place_file: str | None = None  # file in which the launcher reads this rank's place along the axes
    # set if MPI or Slurm started this process: then all that is known of the job comes from them
    started: StartedProcess | None = None


def read_environment(environ: Mapping[str, str] | None = None) -> WorkerEnvironment:
    """Read RANK, LOCAL_RANK, WORLD_SIZE, DEEPSPEED_TIMEOUT (minutes), DSLAUNCH_WATCHDOG_S,
    DSLAUNCH_DEBUG, DSLAUNCH_MESH, DSLAUNCH_PLACE_FILE, DSLAUNCH_RESIZE_FILE, DSLAUNCH_MEMORY,
    DSLAUNCH_SNAPSHOT_EVERY, DSLAUNCH_ATTEMPT and the number of restarts.

    If LOCAL_WORLD_SIZE is missing, LOCAL_SIZE is read; if RANK and WORLD_SIZE are missing, the variables of
    MPI or Slurm.

    Errors: ConfigError for a value that is not allowed, a RANK without WORLD_SIZE, or a value that
    contradicts MPI or Slurm
    """
    env = os.environ if environ is None else environ
    is_told = "RANK" in env and "WORLD_SIZE" in env
    started = None if is_told else find_started(env)
    if not is_told and ("RANK" in env or "WORLD_SIZE" in env):
        _check_alike(env, started)
    debug = env.get("DSLAUNCH_DEBUG", "")
    if debug not in ("", _DEBUG):
        raise ConfigError(f"DSLAUNCH_DEBUG={debug!r} in the environment: must be {_DEBUG!r}, or unset")
    mesh, mesh_order = _mesh(env)
    world_size = _number(env, "WORLD_SIZE", 1) if started is None else started.size
    local_size = _number(env, "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in env else "LOCAL_SIZE", 1)
    return WorkerEnvironment(
        rank=_number(env, "RANK", 0) if started is None else started.rank,
        local_rank=_number(env, "LOCAL_RANK", 0) if started is None else started.local_rank,
        world_size=world_size,
        is_launched=started is not None or (is_told and (world_size != 1 or "MASTER_ADDR" in env)),
        timeout=_timeout(env),
        watchdog_s=_seconds(env, "DSLAUNCH_WATCHDOG_S"),
        checks_order=debug == _DEBUG,
        max_restarts=_number(env, "TORCHELASTIC_MAX_RESTARTS", 0),
        local_world_size=local_size if started is None else started.local_size,
        mesh=mesh,
        mesh_order=mesh_order,
        resize_file=env.get(variables.RESIZE_FILE) or None,
        snapshots=_snapshots(env),
        place_file=env.get(variables.PLACE_FILE) or None,
        started=started,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsPlace:
    """Destination of a worker's numbers: see docs/design/events.md."""

    path: str  # named pipe, which may not exist yet
    rank: int
    interval_s: float  # at most one line in so many seconds


def read_metrics(environ: Mapping[str, str] | None = None) -> MetricsPlace | None:
    """Read DSLAUNCH_METRICS_PIPE, DSLAUNCH_METRICS_INTERVAL (seconds, default 1) and RANK; None if no pipe is
    set.

    Errors: ConfigError for a value that is not allowed
    """
    env = os.environ if environ is None else environ
    path = env.get(variables.METRICS_PIPE)
    if not path:
        return None
    interval_s = _seconds(env, variables.METRICS_INTERVAL)
    return MetricsPlace(
        path=path, rank=_number(env, "RANK", 0), interval_s=1.0 if interval_s is None else interval_s
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MilestonesPlace:
    """Destination of the phases of a worker's start."""

    path: str  # named pipe
    rank: int


def read_milestones(environ: Mapping[str, str] | None = None) -> MilestonesPlace | None:
    """Read DSLAUNCH_MILESTONES and RANK; None if no pipe is set.

    Errors: ConfigError for a value that is not allowed
    """
    env = os.environ if environ is None else environ
    path = env.get(variables.MILESTONES)
    return MilestonesPlace(path=path, rank=_number(env, "RANK", 0)) if path else None


def claim_metrics(path: str) -> bool:
    """Return whether this process writes the worker's numbers into that pipe."""
    return claim("DSLAUNCH_METRICS_PROCESS", path)


def claim(variable: str, path: str) -> bool:
    """Return whether this process writes into that pipe: the first process that asks does. Its child
    processes find its number in the variable and leave the pipe alone. A child that is a worker of another
    job finds a different pipe there, and claims its own.
    """
    pid, _, of = os.environ.get(variable, "").partition(" ")
    if of != path:
        os.environ[variable] = f"{os.getpid()} {path}"
        return True
    return pid == str(os.getpid())


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """Steps, counted from 1, that the launcher has asked this rank to trace, and the files for the trace."""

    first: int
    last: int
    path: str  # the beginning of the files' names


def read_trace(environ: Mapping[str, str] | None = None) -> TraceRequest | None:
    """Read DSLAUNCH_TRACE (steps, as 10-12) and DSLAUNCH_TRACE_FILE; None unless both are there.

    Errors: ConfigError for a text that names no steps
    """
    env = os.environ if environ is None else environ
    text, path = env.get(variables.TRACE, ""), env.get(variables.TRACE_FILE, "")
    if not text or not path:
        return None
    first, dash, last = text.partition("-")
    last = last if dash else first
    is_number = first.isascii() and first.isdigit() and last.isascii() and last.isdigit()
    if not (is_number and 1 <= int(first) <= int(last)):
        raise ConfigError(
            f"DSLAUNCH_TRACE={text!r} in the environment: must be steps as 10-12, from 1; "
            "dslaunch --trace sets it"
        )
    return TraceRequest(first=int(first), last=int(last), path=path)


CONFIGURED, PLAIN, STAGE_0 = "configured", "plain", "stage0"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsRun:
    """One run of a program that `dslaunch numerics` compares with another run of it."""

    part: str  # CONFIGURED: as the program says; PLAIN: by torch alone; STAGE_0: the engine at stage 0
    steps: int  # optimizer steps after which the run ends
    folder: str  # all runs of the comparison write there

    @property
    def is_plain(self) -> bool:
        """Tell whether every rank computes with the whole model."""
        return self.part == PLAIN

    @property
    def is_at_stage_0(self) -> bool:
        """Tell whether the engine is to shard nothing."""
        return self.part == STAGE_0


def read_numerics(environ: Mapping[str, str] | None = None) -> NumericsRun | None:
    """Read DSLAUNCH_NUMERICS; None if it is not set.

    Errors: ConfigError for a value that is not allowed
    """
    text = (os.environ if environ is None else environ).get(variables.NUMERICS)
    if not text:
        return None
    part, _, rest = text.partition(":")
    steps, _, folder = rest.partition(":")
    is_number = steps.isascii() and steps.isdigit() and int(steps) > 0
    if part not in (CONFIGURED, PLAIN, STAGE_0) or not is_number or not folder:
        raise ConfigError(
            f"{variables.NUMERICS}={text!r} in the environment: must be {CONFIGURED}, {PLAIN} or {STAGE_0}, "
            "the number of steps and a folder, with colons between; dslaunch numerics sets it"
        )
    return NumericsRun(part=part, steps=int(steps), folder=folder)


def computes_plainly() -> bool:
    """Tell whether this run is the plain one of `dslaunch numerics`, in which ranks divide nothing."""
    run = read_numerics()
    return run is not None and run.is_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRun:
    """One run of a program whose first optimizer steps `dslaunch plan --tune` measures."""

    warm_up: int  # steps before those that are measured
    steps: int  # measured steps, after which the run ends
    kept_files: str  # why what the program writes is kept; empty: it vanishes with the run


def read_trial(environ: Mapping[str, str] | None = None) -> TrialRun | None:
    """Read DSLAUNCH_TRIAL and DSLAUNCH_KEPT_FILES; None if the first is not set.

    Errors: ConfigError for a value that is not allowed
    """
    env = os.environ if environ is None else environ
    text = env.get(variables.TRIAL)
    if not text:
        return None
    words = text.split(":")
    if len(words) != 2 or not all(one.isascii() and one.isdigit() and int(one) > 0 for one in words):
        raise ConfigError(
            f"{variables.TRIAL}={text!r} in the environment: must be two numbers of steps, before the "
            "measurement and in it, with a colon between; dslaunch plan --tune sets it"
        )
    warm_up, steps = map(int, words)
    return TrialRun(warm_up=warm_up, steps=steps, kept_files=env.get(variables.KEPT_FILES, ""))


def read_accelerator(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the accelerator that DS_ACCELERATOR names, or None."""
    return (os.environ if environ is None else environ).get("DS_ACCELERATOR") or None


def _check_alike(env: Mapping[str, str], started: StartedProcess | None) -> None:
    """Check that RANK or WORLD_SIZE, where only one of them is set, agrees with MPI or Slurm."""
    given, missing = ("RANK", "WORLD_SIZE") if "RANK" in env else ("WORLD_SIZE", "RANK")
    if started is None:
        raise ConfigError(f"{given} is set but {missing} is not; start with dslaunch, or set both or neither")
    number = started.rank if given == "RANK" else started.size
    if _number(env, given, 0) != number:
        raise ConfigError(
            f"{given}={env[given]} is set, but {started.who} is one of {started.size} processes; "
            f"set {missing}, too, or leave out {given}"
        )


def _snapshots(env: Mapping[str, str]) -> SnapshotSettings | None:
    memory, every = env.get(variables.MEMORY, ""), env.get(variables.SNAPSHOT_EVERY, "")
    if not memory or not every:
        return None
    number = every[:-1] if every.endswith("s") else every
    steps = None if every.endswith("s") else _number(env, variables.SNAPSHOT_EVERY, 0)
    try:
        seconds = float(number) if steps is None else None
    except ValueError:
        seconds = 0.0
    if not (isfinite(seconds) and seconds > 0.0 if seconds is not None else steps is not None and steps > 0):
        raise ConfigError(
            f"{variables.SNAPSHOT_EVERY}={every!r} in the environment: must be a number of steps, or of "
            "seconds as 30s; dslaunch --snapshot_every sets it"
        )
    attempt = _number(env, variables.ATTEMPT, 0)
    return SnapshotSettings(memory=memory, attempt=attempt, steps=steps, seconds=seconds)


def _timeout(env: Mapping[str, str]) -> timedelta:
    minutes = _number(env, "DEEPSPEED_TIMEOUT", _DEFAULT_TIMEOUT_MIN)
    if minutes < 1:
        raise ConfigError(
            f"DEEPSPEED_TIMEOUT={minutes} in the environment: must be 1 or more, in minutes; for less, give "
            "init_distributed(timeout=datetime.timedelta(seconds=...))"
        )
    return timedelta(minutes=minutes)


def _seconds(env: Mapping[str, str], name: str) -> float | None:
    text = env.get(name)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not (isfinite(seconds) and seconds >= 0.0):
        raise ConfigError(f"{name}={text!r} in the environment: must be seconds, or 0 for none")
    return seconds


def _mesh(env: Mapping[str, str]) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
    text = env.get(variables.MESH, "")
    sizes: dict[str, int] = {}
    order: tuple[str, ...] = ()
    for item in text.split(",") if text else ():
        axis, _, size = item.partition("=")
        is_order = axis == "order" and not order
        if is_order:
            order = tuple(size.split("-"))
        is_size = axis in AXES and axis not in sizes and size.isascii() and size.isdigit() and int(size) > 0
        if not (set(order) <= set(ORDER) and len(set(order)) == len(order) if is_order else is_size):
            raise ConfigError(
                f"DSLAUNCH_MESH={text!r} in the environment: must be sizes of {', '.join(AXES)}, each once, "
                "and may have an order of all but ep, as in pp=2,tp=2,order=dp-tp-pp; dslaunch --mesh sets it"
            )
        if is_size:
            sizes[axis] = int(size)
    return tuple(sizes.items()), order


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} in the environment: must be a whole number") from None
