"""The end of a job or an attempt, for reports, timings, the trace and the exit code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..controller.timings import describe as describe_timings, drawn
from ..errors import LaunchError
from ..job.plan import Plan
from ..job.verdict import Verdict, signal_name
from ..options import Options
from ..output.console import Console
from ..output.job_report import EndedAttempt, write_report
from ..output.log_files import REPORT
from ..registry.record import name_from
from ..sync.sync_job import SyncJob
from ..telemetry.summary import course_of
from .no_workers_yet import InterruptedJob, given_up_at_signal


def noted(ended: EndedAttempt, console: Console) -> EndedAttempt:
    """Record the end of an attempt as an event, too."""
    console.telemetry.flush()
    console.telemetry.record_of_attempt("verdict", **{**ended.to_dict(), "decision": ended.decision})
    return ended


def write_reports(
    options: Options, attempts: Sequence[EndedAttempt], console: Console, *, error: LaunchError | None = None
) -> LaunchError | None:
    """Write all reports; return the error of the first one that cannot be written.

    `error`: why there is no next attempt, where one was decided on.
    """
    exit_code = None if error is None else error.exit_code
    number = error.number if isinstance(error, InterruptedJob) else None
    places: list[tuple[Path, str]] = []
    if console.log_folder is not None:
        places.append((console.log_folder / REPORT, "--log_dir"))
    if options.report:
        places.append((Path(options.report), "--report"))
    with console.telemetry.lock:
        course = course_of(console.telemetry.state)
    failure: LaunchError | None = None
    for path, option in places:
        try:
            write_report(
                path, attempts, option=option, exit_code=exit_code, interrupted_by=number, course=course
            )
        except LaunchError as error:
            failure = failure or error
    return failure


def end_job(options: Options, attempts: Sequence[EndedAttempt], console: Console) -> int:
    """Write the report and the last lines; return the exit code.

    Errors: LaunchError if a file cannot be written, unless the job has failed anyway
    """
    verdict = attempts[-1].verdict
    unwritten = write_reports(options, attempts, console)
    if unwritten is not None:
        if verdict.exit_code == 0:
            raise unwritten
        console.error(str(unwritten))
    console.finish(is_patient=verdict.interrupted_by is None)
    if console.failure is not None and verdict.exit_code == 0:
        raise console.failure
    return verdict.exit_code


def show_timings(verdict: Verdict, console: Console, summary: str = "") -> None:
    console.say("; ".join(filter(None, (describe_timings(verdict.phases_s), summary))))
    for line in drawn(verdict.phases_s):
        console.say(f"  {line}")


def write_trace_of(
    options: Options,
    plan: Plan,
    files: SyncJob | None,
    console: Console,
    verdict: Verdict,
    *,
    node_rank: int | None = None,
) -> InterruptedJob | None:
    """Write the trace of the traced steps, if any were asked for; a file that cannot be written fails no job.
    A signal gives the file up, and is returned.
    """
    if files is None or files.trace is None:
        return None
    from ..trace.write import free_path, write_trace

    name = options.detach.name or name_from(options.program, is_module=options.is_module)
    path = free_path(options.trace, name, node_rank=node_rank)
    with given_up_at_signal(last_act=console.abandoned) as signals:
        try:
            write_trace(options.trace, plan, files.trace, console, verdict, path=path)
        except LaunchError as error:
            console.error(str(error))
        except Exception as error:  # an error of its trace does not change how the job has ended
            console.error(f"--trace: there is no file: {type(error).__name__}: {error}")
    if not signals:
        return None
    console.warn(f"--trace: {signal_name(signals[0].number)} while it was written, so there is no file")
    return signals[0]


def forget_trace(files: SyncJob | None) -> None:
    """Remove the temporary folder, however the job ends."""
    if files is not None and files.trace is not None:
        files.trace.forget()
