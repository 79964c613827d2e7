"""`import deepspeed` and DeepSpeed's commands in one environment, for every program and for good:
`dslaunch drop-in`.

What is made, and what of it can be removed
-------------------------------------------
A `.pth` file puts the folder `path/` last on the module path, so that a DeepSpeed that is installed later
wins. Small commands go on to those in `bin/`, by the Python that has installed them. A record beside the
`.pth` file has the digest of each.

The record is written first and removed last: what is left of an installation that was killed can be installed
over or uninstalled. A file counts as ours if the record has its digest; all others stay as they are. Where
dslaunch itself is uninstalled first, Python passes over a `.pth` file whose folder is gone, and the commands
say what is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from .. import __version__
from ..launcher.errors import LaunchError
from ..launcher.node.system.plain_file import open_plain, read_plain
from . import FOLDER
from .installed_files import RECORD, File, InstallPlace, files_for, place_of_this_python
from .seen import Seen, look

__all__ = ["install", "place_of_this_python", "status", "uninstall"]

_MAX_BYTES = 1 << 20  # limit for a file that may be ours
_UNINSTALL = "dslaunch drop-in uninstall"


class FileState(Enum):
    """State of a file that the record names, or that is to be made."""

    OURS = "as it was made"
    CHANGED = "changed since, or made by another program"
    MISSING = "not there"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationRecord:
    """Files of an installation: the digest of each file, by its path."""

    version: str  # dslaunch's version
    folder: str  # folder of the package `deepspeed`
    digests: Mapping[Path, str]

    def state_of(self, path: Path) -> FileState:
        if not os.path.lexists(path):
            return FileState.MISSING
        return FileState.OURS if _digest_of(path) == self.digests.get(path) else FileState.CHANGED

    @property
    def states(self) -> dict[Path, FileState]:
        return {path: self.state_of(path) for path in self.digests}


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationPlan:
    """Changes of an installation. `removed` are files of ours from before, some of which are made anew."""

    removed: tuple[Path, ...]
    made: tuple[File, ...]
    left: tuple[Path, ...] = ()  # files in the record that were changed, and are not to be made


# ---- read


def read_record(place: InstallPlace) -> InstallationRecord | None:
    """Return what an installation has written down; None if there is none.

    Errors: LaunchError if it cannot be read
    """
    path = place.packages / RECORD
    if not os.path.lexists(path):
        return None
    try:
        content = json.loads(read_plain(str(path), max_bytes=_MAX_BYTES))
        digests = {
            Path(os.path.normpath(place.packages / name)): str(digest)
            for name, digest in content["files"].items()
        }
        if any(one.parent not in (place.packages, place.scripts) for one in digests):
            raise ValueError("it names files in other folders")
        return InstallationRecord(
            version=str(content["version"]), folder=str(content["folder"]), digests=digests
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise LaunchError(
            f"{path} cannot be read: {error}; remove it, and the files that begin with 'Made by `dslaunch "
            f"drop-in install`' in {place.scripts}"
        ) from None


# ---- plan


def plan_install(place: InstallPlace, files: tuple[File, ...]) -> InstallationPlan | None:
    """Return the plan of an installation; None if all is there.

    Errors: LaunchError if DeepSpeed is there, a file is in the way, or a folder cannot be written
    """
    for folder in (place.packages, place.scripts):
        if not folder.is_dir():
            raise LaunchError(f"{place.python} has no folder {folder}; use a virtual environment")
        if not os.access(folder, os.W_OK):
            raise LaunchError(f"{folder}: you may not write there; use a virtual environment of your own")
    seen = look(place.python, heeds_variable=False)
    if seen.other_words:
        raise LaunchError(
            f"{place.python} has {seen.other_words}, which stays as it is: uninstall it first, or have "
            "single jobs get dslaunch by `dslaunch --drop_in=always`"
        )
    record = read_record(place)
    old = {} if record is None else record.states
    in_the_way = [
        str(file.path)
        for file in files
        if os.path.lexists(file.path) and old.get(file.path, FileState.CHANGED) is FileState.CHANGED
    ]
    if in_the_way:
        raise LaunchError(
            f"{', '.join(in_the_way)}: there already, and not as dslaunch has made it; move it "
            "away, and install again"
        )
    is_all = all(old.get(file.path) is FileState.OURS for file in files)
    if is_all and record is not None and record.digests == {file.path: _digest(file.data) for file in files}:
        return None
    wanted = {file.path for file in files}
    return InstallationPlan(
        removed=tuple(path for path, state in old.items() if state is FileState.OURS),
        made=files,
        left=tuple(path for path, state in old.items() if state is FileState.CHANGED and path not in wanted),
    )


# ---- do


def install(place: InstallPlace, *, is_dry_run: bool) -> Iterator[str]:
    """Let an environment find dslaunch's `deepspeed`; yield the changes, in lines.

    A failed installation leaves all as it was.

    Errors: LaunchError as plan_install(), or if a file cannot be written,
            or the Python does not find it afterwards
    """
    plan = plan_install(place, files_for(place))
    if plan is None:
        yield f"installed already: {place.packages / RECORD} lists the files"
    elif is_dry_run:
        yield from (f"would write {file.path}" for file in plan.made)
    else:
        try:
            _carry_out(place, plan)
        except OSError as error:
            raise LaunchError(f"{error.filename}: {error.strerror}; nothing is installed") from None
        yield from (f"wrote {file.path}" for file in plan.made)
        yield from (f"left {path}, which was {FileState.CHANGED.value}" for path in plan.left)
        yield f"`import deepspeed` of {place.python} gets dslaunch; `{_UNINSTALL}` undoes it"
    if not is_dry_run:
        yield from _command_hint(place, is_wanted=True)


def _carry_out(place: InstallPlace, plan: InstallationPlan) -> None:
    with ExitStack() as undo:
        for path in plan.removed:
            undo.callback(_write, path, path.read_bytes(), mode=path.stat().st_mode & 0o777)
            path.unlink()
        _write_record(place, plan.made, undo)
        for file in plan.made:
            _write(file.path, file.data, mode=_mode(is_command=file.is_command), undo=undo)
        if not look(place.python, heeds_variable=False).is_ours:
            raise LaunchError(
                f"{place.python} does not read {place.packages} when it starts, so that nothing there is "
                "found; nothing is installed: use a virtual environment"
            )
        undo.pop_all()


def _write_record(place: InstallPlace, files: tuple[File, ...], undo: ExitStack) -> None:
    path = place.packages / RECORD
    if os.path.lexists(path):
        undo.callback(_write, path, path.read_bytes(), mode=path.stat().st_mode & 0o777)
        path.unlink()
    text = json.dumps(
        {
            "about": f"what `dslaunch drop-in install` has made; `{_UNINSTALL}` removes it",
            "version": __version__,
            "folder": FOLDER,
            "files": {os.path.relpath(file.path, place.packages): _digest(file.data) for file in files},
        },
        indent=2,
    )
    _write(path, f"{text}\n".encode(), mode=_mode(is_command=False), undo=undo)


def uninstall(place: InstallPlace, *, is_dry_run: bool) -> Iterator[str]:
    """Remove what an installation has made and is unchanged; yields what was done, in lines.

    Errors: LaunchError if a file cannot be removed, or the record cannot be read
    """
    record = read_record(place)
    if record is None:
        yield f"nothing to remove: {place.packages / RECORD} is not there"
        return
    for path, state in record.states.items():
        if state is FileState.CHANGED:
            yield f"{'would leave' if is_dry_run else 'left'} {path}, which was {state.value}"
        if state is FileState.OURS:
            yield from _remove(path, is_dry_run=is_dry_run)
    yield from _remove(place.packages / RECORD, is_dry_run=is_dry_run)


def _remove(path: Path, *, is_dry_run: bool) -> Iterator[str]:
    if not is_dry_run:
        try:
            path.unlink()
        except OSError as error:
            raise LaunchError(f"{path} cannot be removed: {error.strerror}") from None
    yield f"{'would remove' if is_dry_run else 'removed'} {path}"


def status(place: InstallPlace) -> Iterator[str]:
    """Yield in lines what is installed, and which `deepspeed` programs and shells get.

    Errors: LaunchError if the record cannot be read, or the Python does not start
    """
    record = read_record(place)
    if record is None:
        yield f"{place.python}: not installed; `dslaunch drop-in install` does it"
    else:
        yield f"{place.python}: installed by dslaunch {record.version}, from {record.folder}"
        yield from (f"  {path}: {state.value}" for path, state in record.states.items())
        if record.folder != FOLDER:
            yield f"  dslaunch is in another place now, {FOLDER}: install again"
    seen = look(place.python, heeds_variable=True)
    yield f"import deepspeed: {_words(seen)}"
    yield from _command_hint(place, is_wanted=record is not None)


def _words(seen: Seen) -> str:
    if seen.origin is None:
        return "no module of that name"
    name = "dslaunch" if seen.is_ours else "DeepSpeed"
    return f"{name} {seen.version or '(no metadata)'} ({seen.origin})"


def _command_hint(place: InstallPlace, *, is_wanted: bool) -> Iterator[str]:
    """Say which command `deepspeed` a shell finds, and how it would find ours if that `is_wanted`."""
    path, ours = shutil.which("deepspeed"), place.scripts / "deepspeed"
    is_ours = path is not None and ours.exists() and os.path.samefile(path, ours)
    advice = f"; put {place.scripts} first on PATH to have {ours}" if is_wanted and not is_ours else ""
    yield f"command deepspeed: {path or 'none on PATH'}{advice}"


# ---- files


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def _digest_of(path: Path) -> str | None:
    try:
        return _digest(read_plain(str(path), max_bytes=_MAX_BYTES))
    except OSError:  # no regular file, which we never make
        return None


def _mode(*, is_command: bool) -> int:
    return 0o777 if is_command else 0o666  # the umask narrows it


def _write(path: Path, data: bytes, *, mode: int, undo: ExitStack | None = None) -> None:
    """Make a new file.

    Errors: OSError that names it; there is none then
    """
    try:
        fd = open_plain(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with open(fd, "wb") as file:
                file.write(data)
        except BaseException:
            path.unlink()
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    if undo is not None:
        undo.callback(path.unlink, missing_ok=True)
