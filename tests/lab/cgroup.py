"""The cgroups of one host: freezer from the start, cpu and memory from the first limit on.

They lie below the cgroups of the process that makes the lab, so a limit set on that one still holds for all
its hosts.
Limits need version 1. The freezer is that of version 2 where there is one: what it has frozen can still be
killed. With version 1 a killed process stays until the host is thawed, and a process that waits for it hangs.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from . import procfs
from .place import LabError, Place

CPU_PERIOD_US = 100_000
FREEZE_TIMEOUT_S = 10.0


class Cgroups:
    """The cgroups of one host. Their folders are noted in a file, so that a later process can remove them."""

    def __init__(self, place: Place, host: str) -> None:
        self._name = f"dslaunch-{place.name}-{host}"
        self._host = host
        self._note = place.host_folder(host) / "cgroups"

    def make(self) -> None:
        """Make the freezer's, if this machine has that controller."""
        if own_folder("freezer") is not None and self._find("freezer") is None:
            self._add("freezer")

    def procs_files(self) -> tuple[Path, ...]:
        """The files into which a new process of this host writes itself."""
        return tuple(folder / "cgroup.procs" for folder in self._folders().values())

    def remove(self) -> None:
        """Remove the folders; every process in them must be gone."""
        for folder in self._folders().values():
            # A process that is past its end may still be counted for a moment.
            if not procfs.wait_until(partial(_try_rmdir, folder), timeout_s=procfs.DEATH_TIMEOUT_S):
                raise LabError(
                    f"{folder}: cannot be removed; `cat {folder}/cgroup.procs` lists what is in it"
                )
        self._note.unlink(missing_ok=True)

    def freeze(self) -> None:
        folder = self._find("freezer")
        if folder is None:
            raise self._missing("freezer")
        if not procfs.wait_until(partial(_try_freeze, folder), timeout_s=FREEZE_TIMEOUT_S):
            raise LabError(f"{self._host}: not frozen within {FREEZE_TIMEOUT_S:.0f} s; thaw() takes it back")

    def thaw(self) -> None:
        """Thaw; nothing happens where there is no freezer."""
        folder = self._find("freezer")
        if folder is not None:
            _write_freezer(folder, is_frozen=False)

    def is_frozen(self) -> bool:
        folder = self._find("freezer")
        return folder is not None and _is_frozen(folder)

    def limit(self, controller: str, file: str, value: int, *, pids: tuple[int, ...]) -> None:
        """Write a limit; the first one makes the cgroup of that controller and moves `pids` into it."""
        folder = self._find(controller)
        if folder is None:
            folder = self._add(controller)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    (folder / "cgroup.procs").write_text(str(pid))
        (folder / file).write_text(str(value))

    def unlimit(self) -> None:
        """Take back every limit."""
        for controller, file in (("cpu", "cpu.cfs_quota_us"), ("memory", "memory.limit_in_bytes")):
            folder = self._find(controller)
            if folder is not None:
                (folder / file).write_text("-1")

    def _missing(self, controller: str) -> LabError:
        return LabError(
            f"{self._host}: no cgroup controller {controller!r} here; freeze and limits need it; "
            f"mount it at /sys/fs/cgroup/{controller}"
        )

    def _folders(self) -> dict[str, Path]:
        """Controller -> folder."""
        lines = self._note.read_text().splitlines() if self._note.exists() else []
        noted = {controller: Path(path) for controller, path in (line.split(" ", 1) for line in lines)}
        return {controller: path for controller, path in noted.items() if path.is_dir()}

    def _find(self, controller: str) -> Path | None:
        return self._folders().get(controller)

    def _add(self, controller: str) -> Path:
        own = own_folder(controller)
        if own is None:
            raise self._missing(controller)
        folder = own / self._name
        with self._note.open(
            "a"
        ) as note:  # noted first: a crash in between must not leave one that is not known
            note.write(f"{controller} {folder}\n")
        folder.mkdir(exist_ok=True)
        return folder


def own_folder(controller: str) -> Path | None:
    """The cgroup of this process in which hosts get theirs; None if the machine does not
    have that controller.
    """
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    paths = {
        name: path.lstrip("/") for _, names, path in lines for name in names.split(",")
    }  # '' is version 2
    if controller == "freezer" and "" in paths:
        for root in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
            if (root / "cgroup.controllers").exists():
                return root / paths[""]
    root = Path("/sys/fs/cgroup") / controller
    return root / paths[controller] if controller in paths and (root / "cgroup.procs").exists() else None


def _write_freezer(folder: Path, *, is_frozen: bool) -> None:
    version_2 = folder / "cgroup.freeze"
    if version_2.exists():
        version_2.write_text("1" if is_frozen else "0")
    else:
        (folder / "freezer.state").write_text("FROZEN" if is_frozen else "THAWED")


def _is_frozen(folder: Path) -> bool:
    if (folder / "cgroup.freeze").exists():
        return "frozen 1" in (folder / "cgroup.events").read_text()
    return (folder / "freezer.state").read_text().strip() == "FROZEN"


def _try_freeze(folder: Path) -> bool:
    # Written again each time: with version 1 a task that forks meanwhile may need a second push.
    _write_freezer(folder, is_frozen=True)
    return _is_frozen(folder)


def _try_rmdir(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
