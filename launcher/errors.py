"""The one error that a user can cause or see: a sentence and its exit code."""

from __future__ import annotations

EXIT_MISTAKE = 2  # a given value is wrong
EXIT_HOST = 3  # a host could not be used
EXIT_CHANGE = 75  # a worker saved and ended because it was asked to, for a change of hosts


class LaunchError(Exception):
    """Error with one line for the user: what was given, what is allowed, what to do."""

    def __init__(self, message: str, *, exit_code: int = EXIT_MISTAKE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
