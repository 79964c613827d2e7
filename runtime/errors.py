"""The runtime's errors that a user can cause: one line each, no traceback, and a fixed exit code."""

from __future__ import annotations

import sys
from types import TracebackType


class UserError(Exception):
    """A mistake in what was given to the runtime: what was given, what is allowed, what to do."""

    exit_code = 2


class ConfigError(UserError):
    """The ds_config, or an argument of `initialize()`, cannot be used."""


class CheckpointError(UserError):
    """A checkpoint cannot be written, found or read."""


class CollectiveError(UserError):
    """The ranks did not do the same collectives in the same order."""

    exit_code = 1


class OffloadError(UserError):
    """A local disk does not take, or give back, what was offloaded to it."""

    exit_code = 1


class LossScaleError(UserError):
    """float16 cannot hold the gradients, however small the loss scale is."""

    exit_code = 1


_excepthook = sys.excepthook


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, UserError):
        _excepthook(kind, error, trace)
        return
    # Not sys.stderr: torch.distributed's own hook, which calls this one, holds that back and loses it at SystemExit.
    print(f"dslaunch: {error}", file=sys.__stderr__, flush=True)
    raise SystemExit(error.exit_code)  # an exception hook that raises SystemExit sets the exit code


def report_user_errors_in_one_line() -> None:
    """Make an uncaught UserError end the program with its line and exit code instead of a traceback."""
    sys.excepthook = _report
