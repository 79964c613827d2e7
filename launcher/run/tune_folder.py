"""The folder of a tuning: what was measured so far, the ds_config of each trial, and what its job printed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from ..errors import LaunchError
from ..fit.tuning import Outcome, TrialPlace
from ..node.system.plain_file import open_plain
from ..output.job_report import put_file
from ..registry.state_folder import writable_folder

_STATE = "tuning.json"
_VERSION = 1


def default_folder(name: str, key: str) -> Path:
    """Return the folder of a tuning for which no other was named, among this user's records.

    Errors: LaunchError as those of jobs
    """
    return writable_folder().parent / "tuning" / f"{name}.{key[:12]}"


class TuneFolder:
    """The folder. `known` are the trials that have ended, in an earlier call too; `key` says of what."""

    def __init__(self, path: Path, key: str) -> None:
        """Make the folder, or read it.

        Errors: LaunchError if it cannot be made, or holds other files
        """
        self.path, self._key = path, key  # the path has no link in it
        self.known: dict[TrialPlace, Outcome] = {}
        self.is_of_another = False  # it holds results of another job, ds_config or program
        names: list[str] = []
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            names = os.listdir(path)
            state = json.loads((path / _STATE).read_text()) if _STATE in names else None
        except OSError as error:
            raise LaunchError(
                f"the folder of the trials, {path}: {error.strerror}; name another with --tune_dir=DIR"
            ) from None
        except (ValueError, RecursionError):
            state = {}
        if _STATE in names:
            self._read(state)
        elif names:
            raise LaunchError(
                f"--tune_dir={path}: there are other files; give a new folder, or an earlier one's"
            )

    def _read(self, state: Any) -> None:
        """Take the outcomes of a file of this key; one of another form is of another version."""
        try:
            self.is_of_another = state["key"] != self._key or state["version"] != _VERSION
            ended = [] if self.is_of_another else state["ended"]
            self.known = {TrialPlace(one["name"], one["round"]): Outcome(**one["outcome"]) for one in ended}
        except (KeyError, TypeError):
            self.is_of_another = True

    def add(self, place: TrialPlace, outcome: Outcome) -> None:
        """Keep the outcome of a trial.

        Errors: LaunchError if it cannot be written
        """
        self.known[place] = outcome
        ended = [
            {"name": one.name, "round": one.number, "outcome": asdict(outcome)}
            for one, outcome in self.known.items()
        ]
        self.put(_STATE, {"version": _VERSION, "key": self._key, "ended": ended})

    def put(self, name: str, content: Mapping[str, Any]) -> Path:
        """Write a file of JSON, and return its path.

        Errors: LaunchError if it cannot be written
        """
        path = self.path / name
        try:
            put_file(path, (json.dumps(content, indent=2) + "\n").encode())
        except OSError as error:
            raise LaunchError(f"{path}: cannot be written: {error.strerror}") from None
        return path

    def open_log(self, name: str) -> IO[bytes]:
        """Return a new file for what a trial's job prints.

        Errors: LaunchError if it cannot be written
        """
        path = self.path / name
        try:
            return open(open_plain(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb", buffering=0)
        except OSError as error:
            raise LaunchError(f"{path}: cannot be written: {error.strerror}") from None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let no other dslaunch work in the folder meanwhile.

        Errors: LaunchError if one does
        """
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise LaunchError(
                    f"another dslaunch runs trials in {self.path}; wait for it, or give --tune_dir=DIR"
                ) from None
            except OSError:  # a file system without locks
                pass
            yield
        finally:
            os.close(fd)
