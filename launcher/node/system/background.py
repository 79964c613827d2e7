"""Work that would keep the agent from listening: done in a thread."""

from __future__ import annotations

import os
from _thread import start_new_thread  # threading takes 2 ms

from ...wire.frames import Frame, Problem
from .lean_stdlib import Selector

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable


def in_background(selector: Selector, work: Callable[[], Frame], finish: Callable[[Frame], None]) -> None:
    """Do work in a thread; the loop that waits at the selector calls `finish` with the answer, in its own
    thread.

    Work that fails is answered with a Problem, and its traceback goes to stderr.
    """
    answers: list[Frame] = []
    done_read, done_write = os.pipe()

    def run() -> None:
        try:
            answers.append(work())
        except Exception as error:  # any error that ends the thread is reported to the launcher
            answers.append(_problem_of(error))
        finally:
            os.close(done_write)

    def end() -> None:
        selector.forget(done_read)
        os.close(done_read)
        finish(answers[0])

    selector.on_read(done_read, end)
    try:
        start_new_thread(run, ())
    except RuntimeError as error:  # no more threads are allowed here
        answers.append(_problem_of(error))
        os.close(done_write)


def _problem_of(error: Exception) -> Problem:
    from .limits import why_not_started

    why = why_not_started("what prepares the job", error)
    if not why:
        print_traceback()
    return Problem(why or f"cannot prepare the job: {type(error).__name__}: {error}", 3)


def print_traceback() -> None:
    """Print the traceback of the exception that is being handled."""
    import traceback

    traceback.print_exc()
