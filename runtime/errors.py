"""Errors of the runtime that a user can cause: one line each, no traceback, and a fixed exit code.

What DeepSpeed raises in their place
------------------------------------
For a config or a call that cannot be used: ValueError, AssertionError or RuntimeError, depending on the
place. For checkpoints: these three and FileNotFoundError. The classes here inherit from all of those, so that
the `except` clauses of programs written for DeepSpeed catch them.
Source: DeepSpeed 0.19.8 runtime/config.py, runtime/engine.py, runtime/zero/partition_parameters.py,
        utils/zero_to_fp32.py
"""

from __future__ import annotations

import atexit
import gc
import io
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

# Parts of a URL that may be secret: the text before the host's @, and after `?`, where signatures stand.
_CREDENTIALS = (
    (re.compile(r"""://[^/\s'"]*@"""), "://***@"),
    (re.compile(r"""(://[^\s'"?]*\?)(?!\*{3})[^\s'";,)]+"""), r"\1***"),
)


def without_credentials(text: str) -> str:
    """Return the text without the parts of its URLs that may be secret, to show it in messages."""
    if "://" not in text:
        return text
    for pattern, instead in _CREDENTIALS:
        text = pattern.sub(instead, text)
    return text


class UserError(Exception):
    """A mistake in what was given to the runtime: what was given, what is allowed, what to do."""

    exit_code = 2


class ConfigError(UserError, ValueError, AssertionError, RuntimeError):
    """The ds_config, or an argument of `initialize()`, cannot be used."""


class PipelineError(ConfigError):
    """A model in stages was used as one that is whole."""


class CheckpointError(UserError, ValueError, AssertionError, RuntimeError):
    """A checkpoint cannot be written, found or read."""

    def __str__(self) -> str:
        return without_credentials(super().__str__())


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint in the given place."""


class WrongNumbersError(UserError, RuntimeError):
    """A rank has computed something wrong: its host is faulty."""

    exit_code = 1


class CollectiveError(UserError):
    """The ranks did not do the same collectives in the same order."""

    exit_code = 1


class OffloadError(UserError):
    """A local disk could not write, or read back, values that were offloaded to it."""

    exit_code = 1


class RecordingError(UserError):
    """The numbers of a run cannot be written for a comparison with another."""


class LossScaleError(UserError):
    """float16 cannot hold the gradients, however small the loss scale is."""

    exit_code = 1


class SkippedStepsError(UserError):
    """Too many steps in a row were skipped, so training makes no progress."""

    exit_code = 1


_excepthook = sys.excepthook
_EXPLANATIONS: dict[type[BaseException], Callable[[], str]] = {}
_WRITERS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)


def explain(kind: type[BaseException], text: Callable[[], str]) -> None:
    """If an error of this kind ends the process, print what `text` returns after its traceback."""
    _EXPLANATIONS[kind] = text


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, UserError):
        _excepthook(kind, error, trace)
        for known, text in _EXPLANATIONS.items():
            if isinstance(error, known):
                _tell(text)
        return
    # Not sys.stderr: torch.distributed's own hook, which calls this one, holds that back and loses it at
    # SystemExit.
    print(f"dslaunch: {error}", file=sys.__stderr__, flush=True)
    if hasattr(sys, "ps1") or sys.flags.inspect:  # a person goes on typing
        return
    raise SystemExit(error.exit_code)  # an exception hook that raises SystemExit sets the exit code


def _tell(text: Callable[[], str]) -> None:
    """Print it, or why it cannot be had: the error that it explains has been printed, and stays the cause."""
    try:
        lines = text().splitlines()
    except Exception as error:
        lines = [f"more cannot be said about it: {type(error).__name__}: {error}"]
    print(*(f"dslaunch: {line}" for line in lines), sep="\n", file=sys.__stderr__, flush=True)


def show_user_errors_in_one_line() -> None:
    """Make an uncaught UserError end the program with its line and exit code instead of a traceback; an
    interactive session of Python gets the line and goes on. After any uncaught error the process ends soon.
    """
    sys.excepthook = _show
    atexit.unregister(_end_soon)
    atexit.register(_end_soon)


def _end_soon() -> None:
    """After an uncaught error, keep Python from searching all of torch for garbage before the process ends:
    a second or more, for which the other ranks wait to start again. Files are written out first, since those
    among the garbage are not found then.
    """
    if not hasattr(sys, "last_value"):  # Python sets it before it shows an uncaught error
        return
    for one in gc.get_objects():
        if issubclass(type(one), _WRITERS):
            with suppress(OSError, ValueError):
                one.flush()
    gc.freeze()
