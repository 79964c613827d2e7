"""Programs of the runtime, which need torch: each is a process of its own, because the launcher loads neither
the runtime nor torch.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import Any

from ..errors import LaunchError

NEEDED = ("torch", "numpy", "pydantic", "hjson", "fsspec", "xxhash")  # packages of pyproject's [train]


def require_runtime(what: str) -> None:
    """Errors: LaunchError if a package that the runtime needs is not installed"""
    missing = next((name for name in NEEDED if find_spec(name) is None), None)
    if missing is not None:
        raise LaunchError(
            f"{what} needs {missing}, which {sys.executable} does not find; install it with: pip "
            "install '.[train]' in a clone of dslaunch"
        )


def require_pages(what: str) -> None:
    """Errors: LaunchError if a package that draws pages is not installed"""
    missing = next((name for name in ("bokeh", "numpy") if find_spec(name) is None), None)
    if missing is not None:
        raise LaunchError(
            f'{what} needs the package {missing}; install it: pip install ".[report]" in a clone of dslaunch'
        )


def run_program(module: str, request: dict[str, Any], *, what: str) -> int:
    """Run `dslaunch.runtime.<module>` with the request as JSON, on this terminal; return its exit code,
    128 + n for signal n.

    Errors: LaunchError if a package that the runtime needs is not installed
    """
    import subprocess

    require_runtime(what)
    package = __package__.partition(".")[0]
    command = [sys.executable, "-m", f"{package}.runtime.{module}", json.dumps(request)]
    # Start in /, because `-m` looks for modules in the working folder: a user's file torch.py must not be
    # found.
    code = subprocess.run(command, cwd="/", check=False).returncode
    return code if code >= 0 else 128 - code
