"""The one error a person can cause or see: a sentence and the exit code that goes with it."""

from __future__ import annotations

EXIT_MISTAKE = 2  # something that was given is wrong
EXIT_HOST = 3  # a host could not be used
EXIT_CHANGE = 75  # a worker saved and ended because it was asked to, for a change of hosts


class LaunchError(Exception):
    """One line for the person at the keyboard: what was given, what is allowed, what to do."""

    def __init__(self, message: str, *, exit_code: int = EXIT_MISTAKE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
