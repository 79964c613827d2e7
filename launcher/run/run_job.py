"""One job from options to exit code: read, plan, do."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import click

from ..backends.choose import Access, choose_access
from ..backends.refused_before import RefusedBefore
from ..controller.job_signals import ENDING, no_worker_signals, received, unignored
from ..controller.timings import describe as describe_timings, drawn
from ..errors import LaunchError
from ..inputs.rank_set import format_ranks
from ..job.gateways import gateways_of, plan_groups
from ..job.mesh import fit, warnings_of
from ..job.plan import Plan, origins_of, overruled
from ..job.resize import next_attempt
from ..job.restart import Attempt, decide
from ..job.trace_ranks import traced_ranks
from ..job.verdict import Verdict, signal_name
from ..options import Options
from ..options.backend import PDSH
from ..output.console import LAST_WORDS_S, Console
from ..output.event_files import write_events
from ..output.job_report import BegunAttempt, EndedAttempt, check_place, is_of_system, write_report
from ..output.log_files import REPORT
from ..registry.foreground import watch_foreground
from ..registry.record import name_from
from ..sync.sync_job import SyncJob
from ..telemetry.summary import end_event
from ..telemetry.telemetry import describe_job
from .exec_prefix import lost_input
from .host_pool import read_pool, select_hosts
from .host_watch import Hosts, watch_hosts
from .make_plan import choose_attempt, make_plan
from .no_workers_yet import InterruptedJob, given_up_at_signal, no_workers_yet
from .pdsh import as_openssh


def run(options: Options) -> int:
    """Start the job, or print its plan; returns the exit code.

    Errors: LaunchError for a mistake in what was given.
    """
    if options.detach.is_on and not options.dry_run:
        from .run_detached import run_detached  # here: few jobs are

        return run_detached(options, run_with)
    watch = watch_foreground(options)
    try:
        return run_with(options, Console(log_level=options.log_level, logs=options.logs, watch=watch))
    finally:
        if watch is not None and watch.entry is not None:
            watch.entry.remove()


def run_with(options: Options, console: Console) -> int:
    """The same with this console."""
    try:
        return _run_and_tell(options, console)
    except KeyboardInterrupt:
        if not console.has_begun:
            raise
        raise click.exceptions.Exit(130) from None  # how the job ended was said, or is being said


def _run_and_tell(options: Options, console: Console) -> int:
    began = time.monotonic()
    code, failure = 1, ""
    with no_worker_signals(console):
        try:
            _begin_events(options, console)
            code = _run(options, console)
            return code
        except LaunchError as error:
            code, failure = error.exit_code, str(error)
            console.telemetry.record("note", level=40, text=failure)
            console.drain(LAST_WORDS_S)  # warnings that came before it
            raise
        except KeyboardInterrupt:
            code = 130
            raise
        finally:
            duration_s = round(time.monotonic() - began, 3)
            # The job is over: a signal from here on gives up what waits, and is not how the job ended.
            with contextlib.suppress(KeyboardInterrupt):
                console.telemetry.flush()
            with contextlib.suppress(KeyboardInterrupt):
                console.telemetry.record("end", exit_code=code, duration_s=duration_s)
                console.telemetry.close()
            if options.end.is_on and not options.dry_run:
                with received(unignored(ENDING), lambda _number, _frame: None):
                    _tell_end(options, console, code, duration_s=duration_s, error=failure)


def _tell_end(options: Options, console: Console, code: int, *, duration_s: float, error: str) -> None:
    """To whom --on_end and --webhook name."""
    from .job_end import tell_end  # here: few jobs tell of it

    at = round(time.time(), 3)
    state = console.telemetry.state
    event = end_event(state, exit_code=code, duration_s=duration_s, at=at, error=error)
    tell_end(options.end, event, warn=console.warn)
    console.drain(LAST_WORDS_S)


def _begin_events(options: Options, console: Console) -> None:
    """Errors: LaunchError if the file for them cannot be made"""
    if options.dry_run:
        _refuse_what_is_unknown(options)
        return
    name = options.detach.name or name_from(options.program, is_module=options.is_module)
    launcher = "no_ssh" if options.rendezvous.no_ssh else options.backend.launcher.name
    console.telemetry.begin(describe_job(name=name, launcher=launcher), interval_s=options.metrics.interval_s)
    _refuse_what_is_unknown(options)
    if options.metrics.events is not None:
        _refuse_one_file_for_both(options.metrics.events, options.report)
        write_events(console.telemetry, Path(options.metrics.events), on_problem=console.warn)
    if any(name.startswith("OTEL_EXPORTER_OTLP_") for name in os.environ):
        from ..output.spans import send_spans  # here: few jobs send any

        send_spans(console.telemetry, os.environ, say=console.say, warn=console.warn)
    if options.metrics.endpoint is not None:
        _open_endpoint(options, console, *options.metrics.endpoint)


def _refuse_what_is_unknown(options: Options) -> None:
    """Errors: LaunchError for what needs more than is known of a job whose processes others start"""
    if options.rendezvous.no_ssh:
        options.end.refuse("--no_ssh, where each node has a dslaunch of its own, and would tell of its end")
        options.metrics.refuse("--no_ssh, where no node knows the numbers of the others")
    if options.backend.launcher.starts_itself:
        why = f"--launcher={options.backend.launcher.name}, which tells no numbers"
        options.metrics.refuse(why)


def _refuse_one_file_for_both(events: str, report: str | None) -> None:
    """Errors: LaunchError if the report would take the place of the events"""
    if report and Path(events).resolve() == Path(report).resolve() and not is_of_system(Path(report).parent):
        raise LaunchError(f"--events={events} and --report={report}: are one file; give each its own")


def _open_endpoint(options: Options, console: Console, address: str, port: int) -> None:
    """Errors: LaunchError if there can be none"""
    from ..output.prometheus import open_endpoint  # here: few jobs have one

    url = open_endpoint(console.telemetry, address, port, interval_s=options.metrics.interval_s)
    console.say(f"numbers for Prometheus: {url}")


def _run(options: Options, console: Console) -> int:
    if options.rendezvous.no_ssh_check:
        console.debug("--no_ssh_check has no effect: there is no check apart from connecting")
    if options.backend.launcher == PDSH:
        options = as_openssh(options, os.environ, say=console.say)
    if options.report:
        check_place(Path(options.report), option="--report")
    if options.rendezvous.no_ssh:
        return _run_part(options, console)
    with no_workers_yet(is_first=True, last_act=console.abandoned):
        first = choose_attempt(options, console)
    options.logs.check(sum(len(one.devices) for one in first.hosts))
    if options.backend.launcher.starts_itself:
        options.logs.refuse(f"--launcher={options.backend.launcher.name}, which prints what the ranks write")
        if options.metrics.has_own_interval:
            one = options.backend.launcher.name
            raise LaunchError(
                f"--metrics_interval has no effect with --launcher={one}, whose ranks have no agent to tell; "
                "leave it out"
            )
        return _run_owned(options, make_plan(options, first), console)
    if options.dry_run:
        return _show_job(options, first, console)
    ended: list[EndedAttempt] = []
    try:
        _run_attempts(options, first, console, ended)
    except LaunchError as error:
        if ended:  # what is known of the earlier attempts is not lost
            decision = f"{ended[-1].decision}; {error}"
            ended[-1] = ended[-1]._replace(decision=decision)
            unwritten = _write_reports(options, ended, console, error=error)
            if unwritten is not None:
                console.error(str(unwritten))
        raise
    return _end(options, ended, console)


def _forget_trace(files: SyncJob | None) -> None:
    """Leave no temporary folder, however the job ends."""
    if files is not None and files.trace is not None:
        files.trace.forget()


def _show_job(options: Options, first: Attempt, console: Console) -> int:
    """What --dry_run prints of a job whose processes we start ourselves."""
    plan = make_plan(options, first)
    gateways = gateways_of(plan_groups(plan.nodes, options.tree))
    from ..job.plan_text import describe  # here and below: jobs do not show their plan

    text = describe(plan, gateways=gateways)
    if options.sync.folder is not None:
        from .job_files import describe_sync

        text += f"\n{describe_sync(options, plan)}"
    if first.spares:
        text += f"\nspares: {', '.join(one.host.name for one in first.spares)}"
    if options.trace.is_on:
        ranks = format_ranks(rank for node in plan.nodes for rank in traced_ranks(node))
        text += f"\ntraced: step {options.trace.steps} of rank {ranks}"
    if options.check.is_on:
        text += "\nfirst all hosts are looked at, and unfit ones left out if the job may (--check)"
    return _show_plan(plan, text, console)


def _show_plan(plan: Plan, text: str, console: Console) -> int:
    _warn_of_plan(plan, console)
    if why_not := _why_no_script(plan):  # a start says so of each host
        console.warn(why_not)
    console.drain(LAST_WORDS_S)
    click.echo(text.encode())  # UTF-8 whatever the locale is
    return 0


def _why_no_script(plan: Plan) -> str:
    """Why the script cannot be run, where that is known without a look at a host; else empty."""
    script = plan.program.script
    hosts = [node.host for node in plan.nodes if node.is_local]
    is_here = len(hosts) == len(plan.nodes) and not any(one.cwd or one.exec_prefix for one in hosts)
    if script is None or not is_here or plan.cwd != os.getcwd():
        return ""
    from ..node.workers.preparation import why_no_script  # here: only --dry_run asks before the start

    return why_no_script(script)


def _warn_of_plan(plan: Plan, console: Console) -> None:
    if unread := lost_input(plan):
        console.warn(unread)
    for line in () if plan.mesh is None else warnings_of(plan.mesh, plan.host_slots):
        console.warn(line)
    for entry in overruled(plan):
        console.warn(
            f"{entry.source}: {entry.name} is not used: every rank gets its own from dslaunch; leave it out"
        )


def _run_attempts(options: Options, first: Attempt, console: Console, ended: list[EndedAttempt]) -> None:
    """Start the job, and again after failures as the options say; each attempt that has ended
    is added to `ended`.

    Errors: LaunchError if an attempt cannot be made
    """
    attempt: Attempt | None = first
    refused = RefusedBefore()
    hosts = watch_hosts(options, first, console, refused)
    files: SyncJob | None = None
    try:
        while attempt is not None:
            is_first = attempt is first
            with no_workers_yet(is_first=is_first, last_act=console.abandoned):
                if options.check.is_on:
                    attempt = _checked(options, attempt, console, hosts, refused)
                plan = make_plan(options, attempt)
                if is_first:
                    _warn_of_plan(plan, console)
                    if (
                        options.ssh.given
                        and not options.restart.is_on
                        and all(node.is_local for node in plan.nodes)
                    ):
                        console.warn(
                            f"no effect, for all ranks run on this machine: {', '.join(options.ssh.given)}"
                        )
                if options.moves_files:
                    from .job_files import files_of  # here: most jobs move no files

                    files = files_of(options, plan, console, before=files)
            begun = BegunAttempt(number=attempt.number, hosts=plan.host_names)
            groups = plan_groups(plan.nodes, options.tree)
            access = choose_access(options, plan.nodes, groups, say=console.say, refused=refused)
            try:
                verdict = _run_attempt(plan, access, console, attempt, hosts, files)
            finally:
                access.close()
            if options.start.shows_timings:
                _show_timings(verdict, console, access.summary())
            interrupted = _write_trace(options, plan, files, console, verdict)
            console.report(verdict, took_s=begun.duration_s, written=options.report or "")
            if hosts is None:
                decision = fit(decide(attempt, verdict, options.restart), options.mesh, options.restart)
            else:
                decision = next_attempt(attempt, verdict, hosts.known(), hosts.rules)
            if decision.why:
                console.say(decision.why)
            ended.append(_note(begun.end(verdict, decision.why), console))
            attempt = decision.attempt
            if attempt is not None and interrupted is not None:
                raise interrupted
    finally:
        _forget_trace(files)


def _write_trace(
    options: Options,
    plan: Plan,
    files: SyncJob | None,
    console: Console,
    verdict: Verdict,
    *,
    node_rank: int | None = None,
) -> InterruptedJob | None:
    """Of the steps that were traced, if any were asked for; a file that cannot be written fails no job.
    A signal gives the file up, and is returned.
    """
    if files is None or files.trace is None:
        return None
    from ..registry.record import name_from  # here and below: few jobs trace
    from ..trace.write import free_path, write_trace

    name = options.detach.name or name_from(options.program, is_module=options.is_module)
    path = free_path(options.trace, name, node_rank=node_rank)
    with given_up_at_signal(last_act=console.abandoned) as signals:
        try:
            write_trace(options.trace, plan, files.trace, console, verdict, path=path)
        except LaunchError as error:
            console.error(str(error))
        except Exception as error:  # the job has ended as it has, whatever its trace is
            console.error(f"--trace: there is no file: {type(error).__name__}: {error}")
    if not signals:
        return None
    console.warn(f"--trace: {signal_name(signals[0].number)} while it was written, so there is no file")
    return signals[0]


def _checked(
    options: Options, attempt: Attempt, console: Console, hosts: Hosts | None, refused: RefusedBefore
) -> Attempt:
    """The attempt with hosts that are fit. Errors: LaunchError if too few of them are"""
    from .check_first import check_first  # here: most jobs do not look

    fit_attempt = check_first(options, attempt, console, refused)
    if hosts is not None:
        before = {one.host.name for one in (*attempt.hosts, *attempt.spares)}
        hosts.leave_out(before - {one.host.name for one in (*fit_attempt.hosts, *fit_attempt.spares)})
    return fit_attempt


def _show_timings(verdict: Verdict, console: Console, summary: str = "") -> None:
    console.say("; ".join(filter(None, (describe_timings(verdict.phases_s), summary))))
    for line in drawn(verdict.phases_s):
        console.say(f"  {line}")


def _run_attempt(
    plan: Plan,
    access: Access,
    console: Console,
    attempt: Attempt,
    hosts: Hosts | None,
    files: SyncJob | None,
) -> Verdict:
    # Here, because it takes 10 ms, and the first hosts are being connected already.
    from ..controller.controller import Controller

    controller = Controller(
        plan, connect=access.connect, console=console, window=access.window, watch=hosts, files=files
    )
    if hosts is None:
        return controller.run()
    verdict: Verdict | None = None
    hosts.begin(attempt)
    try:
        verdict = controller.run()
    finally:
        hosts.end(verdict)
    return verdict


def _note(ended: EndedAttempt, console: Console) -> EndedAttempt:
    """The events have it, too."""
    console.telemetry.flush()
    console.telemetry.record_of_attempt("verdict", **{**ended.to_dict(), "decision": ended.decision})
    return ended


def _write_reports(
    options: Options, attempts: Sequence[EndedAttempt], console: Console, *, error: LaunchError | None = None
) -> LaunchError | None:
    """Write all that are asked for; returns what the first one that cannot be written is told by.

    `error`: why there is no next attempt, where one was decided on.
    """
    exit_code = None if error is None else error.exit_code
    number = error.number if isinstance(error, InterruptedJob) else None
    places: list[tuple[Path, str]] = []
    if console.log_folder is not None:
        places.append((console.log_folder / REPORT, "--log_dir"))
    if options.report:
        places.append((Path(options.report), "--report"))
    failure: LaunchError | None = None
    for path, option in places:
        try:
            write_report(path, attempts, option=option, exit_code=exit_code, interrupted_by=number)
        except LaunchError as error:
            failure = failure or error
    return failure


def _end(options: Options, attempts: Sequence[EndedAttempt], console: Console) -> int:
    """Write the report and what is left to say; returns the exit code.

    Errors: LaunchError if something cannot be written, unless the job has failed anyway
    """
    verdict = attempts[-1].verdict
    unwritten = _write_reports(options, attempts, console)
    if unwritten is not None:
        if verdict.exit_code == 0:
            raise unwritten
        console.error(str(unwritten))
    console.finish(is_patient=verdict.interrupted_by is None)
    if console.failure is not None and verdict.exit_code == 0:
        raise console.failure
    return verdict.exit_code


def _run_owned(options: Options, plan: Plan, console: Console) -> int:
    """A job whose processes MPI or Slurm starts."""
    from ..external.runner import plan_owned, run_owned  # here: only such jobs need it

    plan, job = plan_owned(options, plan)
    if options.dry_run:
        from ..job.plan_text import describe

        return _show_plan(plan, f"{describe(plan, how=f'by {job.argv[0]}')}\n{job.describe()}", console)
    _warn_of_plan(plan, console)
    begun = BegunAttempt(hosts=plan.host_names)
    console.register(origins_of(plan))
    verdict = run_owned(job, console)
    console.report(verdict, took_s=begun.duration_s, written=options.report or "")
    return _end(options, (_note(begun.end(verdict), console),), console)


def _run_part(options: Options, console: Console) -> int:
    """This node's part of a job that is started on every node."""
    from ..rendezvous.node_part import (  # here: only such jobs need it
        check_options,
        plan_part,
        run_part,
        where_its_words_are,
    )

    check_options(options, console)
    pool = read_pool(options, console)
    selected = select_hosts(pool.hosts, options)
    options.logs.check(sum(len(one.devices) for one in selected))
    plan = make_plan(options, Attempt(hosts=selected, run_id="", hosts_from=pool.found_in))
    part = plan_part(options, plan, pool=[host.name for host in pool.hosts], environ=os.environ)
    if options.dry_run:
        from ..job.plan_text import describe

        return _show_plan(
            part.plan, f"{describe(part.plan, how='by its own dslaunch')}\n{part.describe()}", console
        )
    _warn_of_plan(part.plan, console)
    begun = BegunAttempt(hosts=part.plan.host_names)
    files = None
    if options.trace.is_on and traced_ranks(part.node):
        from .job_files import trace_files_of  # here: few jobs trace

        files = SyncJob(trace=trace_files_of(options))
    try:
        verdict = run_part(part, console, files)
        _write_trace(options, part.own_plan, files, console, verdict, node_rank=part.node.node_rank)
    finally:
        _forget_trace(files)
    if options.start.shows_timings:
        _show_timings(verdict, console)
    console.report(verdict, took_s=begun.duration_s, written=options.report or "")
    if where := where_its_words_are(verdict, part):
        console.error(where)
    return _end(options, (_note(begun.end(verdict), console),), console)
