"""Requirements of a screen: a terminal, and the package that draws."""

from __future__ import annotations

import importlib.util
import os
import sys

from ..errors import LaunchError

PACKAGE = "textual"
_INSTALL = "pip install '.[watch]' in a clone of dslaunch"


def why_no_screen() -> str:
    """Return why no screen can be shown in this place; empty if one can."""
    if sys.stdout is None or not sys.stdout.isatty():
        return "standard output is no terminal"
    if sys.stdin is None or not sys.stdin.isatty():
        return "standard input is no terminal, so that no key can be read"
    if sys.stderr is None or not sys.stderr.isatty():
        return "standard error, which is drawn on, is no terminal"
    if os.environ.get("TERM", "") in ("", "dumb"):
        return f"TERM is {os.environ.get('TERM') or 'not set'}, a terminal on which nothing can be drawn"
    return ""


def require_package(what: str, *, instead: str = "") -> None:
    """Errors: LaunchError if the package that draws the screen is not installed"""
    if importlib.util.find_spec(PACKAGE) is None:
        raise LaunchError(
            f"{what} draws with the package {PACKAGE}, which is not installed here; install it: "
            f"{_INSTALL}{instead}"
        )
