"""A process that has imported what the workers of the next attempts need.

It outlives an attempt, as the agent does. The first attempt may have left its own; else one is made beside
the running job, so that it is there when the job starts again. While that one imports it gives way to the
workers, but not at the lowest priority: where workers keep all cores busy, it would never be done.
"""

from __future__ import annotations

from _thread import allocate_lock, start_new_thread

from ..system.lean_stdlib import suppress
from ..system.private_folder import KEPT
from .preload import Imports, Preloader, PreloadTimes, Unpreloaded

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from typing import Any, NamedTuple
else:
    from ...wire.fast_tuple import Record as NamedTuple

MAKE_AFTER_S = 3.0  # after the start of the workers, which are busy with their own imports first
FOLDER = f"{KEPT}imports"


class Recipe(NamedTuple):
    """All that decides what a preloader is. Two attempts with equal ones can use the same process."""

    lines: list[list[str]]
    script: str | None
    watched: str
    python: list[bytes]  # with its options
    env: dict[bytes, bytes]
    cwd: bytes


class KeptPreloader:
    """At most one preloader that waits, and at most one that is being made."""

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._preloader: Preloader | None = None
        self._recipe: Recipe | None = None  # what the preloader was made for
        self._taken: Preloader | None = None  # it starts workers now
        self._is_making = False
        self._num_made = 0
        self._making = 0  # the process that imports for the one that is being made

    def pids(self) -> set[int]:
        """Return the processes that are to be spared when a job ends."""
        with self._lock:
            ready = [one for one in (self._preloader, self._taken) if one is not None and one.is_there]
            return {one.pid for one in ready} | ({self._making} if self._making else set())

    def take(self, recipe: Recipe) -> Preloader | None:
        """Return the preloader for this recipe; it is still spared. None if there is no such one."""
        with self._lock:
            preloader, self._preloader = self._preloader, None
            is_fit = preloader is not None and preloader.is_there and self._recipe == recipe
            self._taken = preloader if is_fit else None
        if preloader is not None and not is_fit:
            preloader.close()
        return self._taken

    def keep(self, recipe: Recipe, preloader: Preloader) -> None:
        """Keep another preloader than the one before."""
        with self._lock:
            before, self._preloader = self._preloader, preloader
            self._recipe, self._taken = recipe, None
        if before is not None:
            before.close()

    def take_back(self, preloader: Preloader) -> bool:
        """Keep the preloader that was taken, now that it has started the workers; False for another one."""
        with self._lock:
            if self._taken is not preloader:
                return False
            self._preloader, self._taken = preloader, None
        return True

    def has(self, recipe: Recipe) -> bool:
        """Tell whether there is, or soon will be, one for this recipe."""
        return self._is_making or (self._preloader is not None and self._recipe == recipe)

    def make(
        self, recipe: Recipe, *, later: list[str], argv: list[bytes], folder: str, times: PreloadTimes
    ) -> None:
        """Make one in a thread, and keep it. `later`, `argv`, `folder` and `times` are for Preloader."""
        self._is_making = True

        def run() -> None:
            lines = recipe.lines
            try:
                for _ in range(2):
                    self._num_made += 1
                    made = Preloader(
                        Imports(lines, recipe.script, recipe.watched, later),
                        argv=argv,
                        num_options=len(recipe.python),
                        env=recipe.env,
                        folder=f"{folder}-{self._num_made}",
                        times=times,
                        start=self._start,
                    )
                    if not made.why_not:
                        self.keep(recipe, made)
                        return
                    lines = lines[: made.num_fit]
                    if not lines:
                        return
            except Unpreloaded:  # the job goes on, and its next attempt imports for itself
                pass
            finally:
                self._making, self._is_making = 0, False

        with suppress(RuntimeError):  # no more threads are allowed here
            start_new_thread(run, ())
            return
        self._is_making = False

    def _start(self, *words: Any, **more: Any) -> subprocess.Popen[bytes]:
        """Start a process that is spared from its first moment."""
        import subprocess

        with self._lock:
            process = subprocess.Popen(*words, **more)
            self._making = process.pid
        return process
