"""Starts the workers of one host, each in its way: executed, or forked from a preloader."""

from __future__ import annotations

import os
import sys
import time

from ....shared import variables
from ...wire.frames import bytes_of
from ..system.private_folder import PrivateFolder
from .preparation import Prepared, Unprepared
from .worker import Worker, spawn

_OF_WORKERS = (  # besides those of the ranks
    variables.MASTER_ADDR,
    variables.MASTER_PORT,
    variables.ERROR_FILE,
    variables.PLACE_FILE,
    variables.METRICS_PIPE,
    variables.METRICS_INTERVAL,
    variables.MILESTONES,
    variables.MEMORY,
    variables.RESIZE_FILE,
    variables.TRACE_FILE,
)
MANY_WORKERS = 64  # from this number on a host's limits are looked at before any worker is started

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...wire.job import NodeJob, RankJob
    from .kept_preloader import KeptPreloader, Recipe
    from .milestones import MilestonePipe
    from .preload import Preloader, PreloadTimes


class Starter:
    """Resources that the job's workers on this host share, made before the job starts."""

    def __init__(
        self,
        job: NodeJob,
        prepared: Prepared,
        folder: PrivateFolder,
        *,
        num_devices: int,
        says: Callable[[str], object] = lambda step: None,
        kept: KeptPreloader | None = None,
    ) -> None:
        """Do the imports that the workers share, which may take a while, unless `kept` has a process that has
        done them; `says` is told before they begin.

        Errors: Unprepared
        """
        self._check_limits(job)
        self._job = job
        self._prepared = prepared
        self._folder = folder
        self.notes: list[str] = []  # notes for the user
        self.is_tracing = False  # the launcher asks for the traces of these ranks when they have ended
        self._pipe = folder.file("milestones") if job.has_milestones else None
        self._watched = "" if self._pipe is None else "all" if job.has_timings else "start"
        self.milestones = self._listen_to_milestones()
        self._kept = kept
        self._recipe = None if kept is None else self._recipe_for_next()
        self._preloader: Preloader | None = None
        if kept is not None and self._recipe is not None:
            self._preloader = kept.take(self._recipe)
        if self._preloader is not None:
            self._tell_timings(f"{len(job.ranks)} workers are forked from what an attempt before imported")
        elif job.preload:
            says(f"importing --preload={','.join(job.preload)}")
            self._preloader = self._preload(job.preload)
        elif job.preload is None and not job.is_verbatim:
            self._preloader = self._share_import(num_devices, says)
        self.metrics_pipe = folder.file("metrics") if job.metrics_interval_s else None
        if job.metrics_interval_s and self.metrics_pipe is None:
            self.notes.append("no temporary folder can be made, so no numbers of the workers here are seen")
        self._stdin = _stdin_of_launcher() if job.stdin_rank is not None else None
        self._resize_file = self._where_asked() if job.is_elastic else None
        self._hook = None
        if job.has_stacks or (self.milestones is not None and self._preloader is None):
            self._hook = _installed_hook(folder.file("hook"), has_milestones=self._pipe is not None)
        if job.adds_local_rank and job.script is not None and job.master_port is not None:
            self._look_for_misread(job.script)
        # After the start of the preloader, which must have the limits of this host, as the workers have.
        self._open_files = self._raise_open_files(len(job.ranks), holds_snapshots=job.holds_memory)

    @staticmethod
    def _check_limits(job: NodeJob) -> None:
        """Refuse a start that this host's limits do not allow. Errors: Unprepared"""
        num_workers = len(job.ranks)
        if _is_surely_allowed(num_workers):
            return
        from ..system.limits import why_too_many

        # Workers that a preloader forks share most of its memory.
        why = why_too_many(num_workers, is_python=job.python is not None and not job.preload)
        if why:
            raise Unprepared(why, exit_code=3)

    @staticmethod
    def _raise_open_files(num_workers: int, *, holds_snapshots: bool) -> tuple[int, int] | None:
        if not holds_snapshots and _is_surely_allowed(num_workers):
            return None
        from ..system.limits import raise_open_files

        return raise_open_files(num_workers, holds_snapshots=holds_snapshots)

    def start(self, rank: RankJob) -> Worker:
        """Start one rank."""
        env = {**self._prepared.env, **{bytes_of(name): bytes_of(value) for name, value in rank.env}}
        env.update(self._prepared.own_devices(env))
        error_file = self._folder.file(f"error-{rank.rank}.json")
        if error_file is not None and not self._job.is_verbatim:
            env[variables.ERROR_FILE.encode()] = os.fsencode(error_file)
        place_file = self._folder.file(f"place-{rank.rank}")
        if place_file is not None and not (self._job.is_verbatim or self._job.is_server):
            env[variables.PLACE_FILE.encode()] = os.fsencode(place_file)
        if self.metrics_pipe is not None and not self._job.is_server:  # a server's programs are no ranks
            env[variables.METRICS_PIPE.encode()] = os.fsencode(self.metrics_pipe)
            env[variables.METRICS_INTERVAL.encode()] = b"%g" % self._job.metrics_interval_s
        if self._pipe is not None:
            env[variables.MILESTONES.encode()] = os.fsencode(self._pipe)
        if self._resize_file is not None:
            env[variables.RESIZE_FILE.encode()] = os.fsencode(self._resize_file)
        if variables.TRACE.encode() in env:
            self._trace(rank, env)
        stacks_file = None
        if self._job.has_stacks and self._hook is not None:
            from .worker_hook import ask_for

            stacks_file = self._folder.file(f"stacks-{rank.rank}")
            ask_for(env, stacks_file=stacks_file)
        has_stdin = rank.rank == self._job.stdin_rank and self._stdin is not None
        worker = (None if has_stdin else self._fork(rank, env)) or self._execute(
            rank, env, stdin=self._stdin if has_stdin else None
        )
        worker.is_prompting = has_stdin and os.isatty(self._stdin or 0)
        worker.has_local_rank = self._job.adds_local_rank
        worker.error_file, worker.place_file, worker.stacks_file = error_file, place_file, stacks_file
        return worker

    def _trace(self, rank: RankJob, env: dict[bytes, bytes]) -> None:
        """Tell the rank where its trace goes; without a place it writes none, as the launcher reports."""
        trace_file = self._folder.file(f"trace-{rank.rank}")
        if trace_file is not None and any(name == variables.TRACE for name, _ in rank.env):
            self.is_tracing = True
            env[variables.TRACE_FILE.encode()] = os.fsencode(trace_file)
            quiet = variables.PROFILER_LOG_QUIET.encode()  # the profiler tells stderr that it begins and ends
            env.setdefault(variables.PROFILER_LOG.encode(), quiet)

    def end(self) -> None:
        """Let go of the preloader: all workers are started."""
        preloader, self._preloader = self._preloader, None
        if preloader is None:
            return
        kept, recipe = self._kept, self._recipe
        if kept is not None and kept.take_back(preloader):
            return
        if kept is not None and recipe is not None and preloader.imports.lines == recipe.lines:
            kept.keep(recipe, preloader)
        else:
            preloader.close()

    def prepare_next(self) -> None:
        """Have the imports done that the workers of the next attempt share, beside those that run now."""
        if self._kept is None or self._recipe is None or self._kept.has(self._recipe):
            return
        from .kept_preloader import FOLDER

        folder = self._folder.file(FOLDER)
        if folder is not None and self._open_files is None:  # else it would have the agent's limits
            self._kept.make(
                self._recipe,
                later=self._variables_of_workers(),
                argv=self._longest_argv(),
                folder=folder,
                times=self._times(),
            )

    def _variables_of_workers(self) -> list[str]:
        """Return the names of variables that a worker has, and a process that imports for it has not."""
        of_ranks = {name for rank in self._job.ranks for name, _ in rank.env}
        of_devices = [variables.DEVICES] if any(one.startswith("MIG-") for one in self._job.devices) else []
        return [*of_ranks, *_OF_WORKERS, *of_devices]

    def _recipe_for_next(self) -> Recipe | None:
        """Return what later attempts share; None if that is nothing."""
        from .kept_preloader import Recipe
        from .shared_import import imports_at_top

        job, env = self._job, self._prepared.env
        if self._prepared.python is None or job.is_verbatim or job.is_server:
            return None
        if job.preload is not None:
            lines = [[name] for name in job.preload]
        else:
            lines = imports_at_top(job.script, env=env)
        if not lines:
            return None
        python = self._argv(job.ranks[0])[: self._num_options()]
        return Recipe(lines, job.script, self._watched, python, dict(env), os.getcwdb())

    def close(self) -> None:
        """Let go of what the workers shared: they have ended, and the agent stays for another attempt."""
        self.end()
        if self.milestones is not None:
            self.milestones.close()
        if self._open_files is not None:
            from ..system.limits import lower_open_files

            lower_open_files(self._open_files)

    def _where_asked(self) -> str:
        """Return the file that appears when the workers are asked to save and end, the same for all here.
        Ranks look at it together, so each needs a path, if only of a file that never appears.
        """
        path = self._folder.file("resize")
        if path is None:
            self.notes.append(
                "no temporary folder can be made, so the workers here cannot be asked to save for a change "
                "of hosts; they end with those of other hosts"
            )
        return path or "/proc/dslaunch-resize"  # a file that never appears

    def ask_to_end(self, why: str, *, by_disk: bool) -> str:
        """Ask the workers to save, and to end with code 75; return why that failed, or nothing.

        The file appears whole or not at all. `by_disk`: a second file beside it says that a snapshot in
        memory is not enough.
        """
        if self._resize_file is None:
            return ""
        partial = f"{self._resize_file}.partial"
        try:
            if by_disk:
                open(f"{self._resize_file}{variables.BY_DISK}", "w").close()
            with open(partial, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write(f"{why}\n")
            os.replace(partial, self._resize_file)
        except OSError as error:
            return (
                f"its workers cannot be asked to save: {self._resize_file}: {os.strerror(error.errno or 0)}"
            )
        return ""

    def _look_for_misread(self, script: str) -> None:
        from .shared_import import source_of

        source = source_of(script)
        if b"argv" in source:
            from ..observe.refused_argument import why_misread

            self.notes += filter(None, [why_misread(source)])

    # Modules that only some jobs need are loaded when a job does.

    def _listen_to_milestones(self) -> MilestonePipe | None:
        if self._pipe is None:
            return None
        from .milestones import MilestonePipe

        return MilestonePipe(self._pipe)

    def _preload(self, modules: list[str]) -> Preloader | None:
        from .preload import Unpreloaded

        said = f"--preload={','.join(modules)}"
        try:
            preloader = self._preloader_of(modules)
        except Unpreloaded as error:
            raise Unprepared(f"{said}: {error}; correct it or leave it out", exit_code=3) from None
        if preloader.why_not:
            self.notes.append(f"{said}: {preloader.why_not}; each worker imports for itself")
            return None
        return preloader

    def _share_import(self, num_devices: int, says: Callable[[str], object]) -> Preloader | None:
        """Import torch once if that is safe for this script; a job that asks for its times is told so."""
        from .shared_import import shared_import

        num_workers = len(self._job.ranks)
        modules, why_not = shared_import(
            self._job.script, num_workers=num_workers, num_devices=num_devices, env=self._prepared.env
        )
        if not modules:
            self._tell_timings(why_not and f"each worker imports torch for itself: {why_not}")
            return None
        from .preload import Unpreloaded

        what = ", ".join(modules)
        says(f"importing {what}")
        began = time.monotonic()
        preloader = None
        try:
            preloader = self._preloader_of(modules)
            why_not = preloader.why_not
        except Unpreloaded as error:  # each worker will report the error
            why_not = str(error)
        if why_not:
            self._tell_timings(f"each worker imports {what} for itself: {why_not}")
            return None
        took_s = time.monotonic() - began
        self._tell_timings(f"{num_workers} workers are forked from one import of {what}: {took_s:.2f} s")
        return preloader

    def _tell_timings(self, note: str) -> None:
        if self._job.has_timings and note:
            self.notes.append(note)

    def _preloader_of(self, modules: list[str]) -> Preloader:
        """Start a preloader of these modules. Errors: Unpreloaded"""
        from .preload import Imports, Preloader

        preloader = Preloader(
            Imports([[name] for name in modules], self._job.script, self._watched),
            argv=self._longest_argv(),
            num_options=self._num_options(),
            env=self._prepared.env,
            folder=self._folder.file("preload"),
            times=self._times(),
        )
        self.notes += [f"while {', '.join(modules)} was imported: {line}" for line in preloader.notes]
        return preloader

    def _longest_argv(self) -> list[bytes]:
        """Return the longest command line of a worker: each gets its own in the place of that one."""
        return max(map(self._argv, self._job.ranks), key=lambda one: sum(map(len, one)))

    def _num_options(self) -> int:
        """Count the words of a worker before the script, or before -m."""
        return self._job.num_head - (self._job.module is not None)

    def _times(self) -> PreloadTimes:
        from .preload import PreloadTimes

        return PreloadTimes.within(
            prepare_timeout_s=self._job.prepare_timeout_s, heartbeat_s=self._job.heartbeat_s
        )

    def _fork(self, rank: RankJob, env: dict[bytes, bytes]) -> Worker | None:
        """Fork a worker from the preloader; None if there is none, or it has died."""
        if self._preloader is None:
            return None
        from .preload import Unpreloaded

        try:
            return self._preloader.spawn(
                rank=rank.rank,
                argv=self._argv(rank),
                num_arguments=len(rank.arguments) - self._job.num_head + 1,
                env=env,
                cores=self._cores(env),
            )
        except Unpreloaded:
            self._preloader = None
            return None

    def _execute(self, rank: RankJob, env: dict[bytes, bytes], *, stdin: int | None) -> Worker:
        if self._hook is not None:
            from .worker_hook import add_hook, ask_for

            add_hook(env, folder=self._hook)
            ask_for(env, watched=self._watched)
        return spawn(
            rank=rank.rank,
            argv=self._argv(rank),
            env=env,
            is_verbatim=self._job.is_verbatim,
            cores=self._cores(env),
            stdin=stdin,
            open_files=self._open_files,
        )

    def _argv(self, rank: RankJob) -> list[bytes]:
        program = [] if self._prepared.python is None else [self._prepared.python]
        return [bytes_of(one) for one in program + rank.arguments]

    def _cores(self, env: dict[bytes, bytes]) -> list[int] | None:
        return self._prepared.cores[int(env[b"LOCAL_RANK"])] if self._prepared.cores else None


def _is_surely_allowed(num_workers: int) -> bool:
    """Tell whether there are few workers and far more open files than they take, as in most jobs."""
    most = os.sysconf("SC_OPEN_MAX")
    return num_workers <= MANY_WORKERS and (most < 0 or most >= 4 * MANY_WORKERS)


def _installed_hook(path: str | None, *, has_milestones: bool) -> str | None:
    """Return the folder of the code that Python runs first in a worker; None without a place for it."""
    if path is None:
        return None
    from .worker_hook import hook_text, install_hook

    try:
        install_hook(path, hook_text(has_milestones=has_milestones))
    except OSError:  # the disk is full: the job runs without the hook
        return None
    return path


def _stdin_of_launcher() -> int | None:
    """Return the descriptor that a launcher on this machine passed: backends/local.py."""
    if len(sys.argv) < 2 or not sys.argv[1].isdigit():
        return None
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)  # the other workers do not get it
    return fd
