"""The `deepspeed` that a Python finds, as one that starts now sees it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ..launcher.errors import LaunchError
from . import VARIABLE

_LIMIT_S = 60

# The metadata tells whether a package is ours, wherever it lies. A folder without __init__.py is no package,
# and has no origin.
_PROGRAM = """
import glob, json, os, sys
from importlib.metadata import distributions
from importlib.util import find_spec

def origin():
    sys.path_importer_cache.clear()
    try:
        spec = find_spec("deepspeed")
    except (ImportError, ValueError):
        spec = None
    return spec and spec.origin

def versions():
    return [one.version for one in distributions(name="deepspeed")]

def is_ours(folder):
    return bool(glob.glob(os.path.join(glob.escape(folder), "deepspeed-*+dslaunch.*-info")))

found = {"origin": origin(), "version": (versions() or [None])[0]}
sys.path[:] = [one for one in sys.path if not is_ours(one)]
found |= {"other": origin(), "other_version": (versions() or [None])[0]}
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The package that `import deepspeed` gives, and the one that it would give without dslaunch. None: no
    package.
    """

    origin: str | None  # the file
    version: str | None  # version in the metadata
    other: str | None
    other_version: str | None

    @property
    def is_ours(self) -> bool:
        return self.origin is not None and self.origin != self.other

    @property
    def other_words(self) -> str:
        """Packages beside ours, in words; empty if there are none."""
        version = "" if self.other_version is None else f" {self.other_version}"
        return f"DeepSpeed{version} ({self.other or 'its metadata alone'})" if self.other or version else ""


def look(python: Path, *, heeds_variable: bool) -> Seen:
    """Ask a new process of this Python, which looks at DSLAUNCH_DROP_IN or not.

    Errors: LaunchError if it does not start
    """
    env = {name: value for name, value in os.environ.items() if heeds_variable or name != VARIABLE}
    # Run in /: Python looks for modules in its folder, and a folder `deepspeed` there is not the package.
    try:
        ended = subprocess.run(
            [python, "-c", _PROGRAM],
            cwd="/",
            env=env,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{python} was asked which deepspeed it finds, and failed: no answer for {_LIMIT_S} s"
        ) from None
    except OSError as error:
        raise LaunchError(
            f"{python}, which runs dslaunch, does not start: {error.strerror}; install dslaunch again"
        ) from None
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or [f"it ended with {ended.returncode}"])[-1]
        raise LaunchError(f"{python} was asked which deepspeed it finds, and failed: {last}")
    return Seen(**json.loads(ended.stdout.splitlines()[-1]))
