"""One job from options to exit code: read, plan, do."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from ..backends.choose import HostAccess, choose_access
from ..backends.refused_before import RefusedBefore
from ..controller.job_signals import ENDING, no_worker_signals, received, unignored
from ..controller.lasting import Lasting
from ..errors import LaunchError
from ..job.gateways import plan_groups
from ..job.mesh import fit
from ..job.plan import Plan
from ..job.resize import next_attempt
from ..job.restart import Attempt, Decision, decide
from ..job.verdict import Verdict
from ..options import Options
from ..options.backend import PDSH
from ..options.option import given_in, refuse
from ..output.console import LAST_WORDS_S, Console
from ..output.event_files import write_events
from ..output.job_report import BegunAttempt, EndedAttempt, check_place, is_of_system
from ..registry.foreground import watch_foreground
from ..registry.record import name_from
from ..sync.sync_job import SyncJob
from ..telemetry.summary import end_event
from ..telemetry.telemetry import Telemetry, describe_job
from .host_watch import Hosts, watch_hosts
from .known_limits import keep_limits, limits_of
from .make_plan import choose_attempt, make_plan
from .no_workers_yet import no_workers_yet
from .outcome import end_job, forget_trace, noted, show_timings, write_reports, write_trace_of
from .pdsh import as_openssh
from .show_plan import show_job, warn_of_plan

if TYPE_CHECKING:
    from ..controller.kept_agents import KeptAgents


def run(options: Options, *, telemetry: Telemetry | None = None, output: IO[bytes] | None = None) -> int:
    """Start the job, or print its plan; return the exit code.

    `telemetry`: knows the state of the job when it has ended. `output`: takes what would go to stdout and
    stderr. Both are for jobs in the foreground.
    Errors: LaunchError for a mistake in the options.
    """
    if options.detach.is_on and not options.dry_run:
        from .run_detached import run_detached

        return run_detached(options, run_with)
    watch = watch_foreground(options)
    try:
        console = Console(
            log_level=options.log_level,
            logs=options.logs,
            watch=watch,
            telemetry=telemetry,
            out=output,
            err=output,
        )
        return run_with(options, console)
    finally:
        if watch is not None and watch.entry is not None:
            watch.entry.remove()


def run_with(options: Options, console: Console) -> int:
    """Start the job, or print its plan, with this console; return the exit code."""
    try:
        return _run_and_tell(options, console)
    except KeyboardInterrupt:
        if not console.has_begun:
            raise
        raise click.exceptions.Exit(130) from None  # the end of the job was reported, or is being reported


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
            console.drain(LAST_WORDS_S)  # earlier warnings
            raise
        except KeyboardInterrupt:
            code = 130
            raise
        finally:
            duration_s = round(time.monotonic() - began, 3)
            # The job is over: a signal from here on gives up the reports, and does not change how the job
            # ended.
            with contextlib.suppress(KeyboardInterrupt):
                console.telemetry.flush()
            with contextlib.suppress(KeyboardInterrupt):
                console.telemetry.record("end", exit_code=code, duration_s=duration_s)
                console.telemetry.close()
            if options.end.is_on and not options.dry_run:
                with received(unignored(ENDING), lambda _number, _frame: None):
                    _tell_end(options, console, code, duration_s=duration_s, error=failure)


def _tell_end(options: Options, console: Console, code: int, *, duration_s: float, error: str) -> None:
    """Report the end to --on_end and --webhook."""
    from .job_end import tell_end

    at = round(time.time(), 3)
    state = console.telemetry.state
    event = end_event(state, exit_code=code, duration_s=duration_s, at=at, error=error)
    tell_end(options.end, event, warn=console.warn)
    console.drain(LAST_WORDS_S)


def _begin_events(options: Options, console: Console) -> None:
    """Open the file of events. Errors: LaunchError if it cannot be made"""
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
        from ..output.spans import send_spans

        send_spans(console.telemetry, os.environ, say=console.say, warn=console.warn)
    if options.metrics.endpoint is not None:
        _open_endpoint(options, console, *options.metrics.endpoint)


def _refuse_what_is_unknown(options: Options) -> None:
    """Errors: LaunchError for options that need facts about a job whose processes MPI or Slurm starts"""
    if options.rendezvous.no_ssh:
        why = "--no_ssh, where each node has a dslaunch of its own, and would tell of its end"
        refuse(given_in(options.end), why)
        options.metrics.refuse("--no_ssh, where no node knows the numbers of the others")
    if options.backend.launcher.starts_itself:
        why = f"--launcher={options.backend.launcher.name}, which tells no numbers"
        options.metrics.refuse(why)


def _refuse_one_file_for_both(events: str, report: str | None) -> None:
    """Errors: LaunchError if the report would take the place of the events"""
    if report and Path(events).resolve() == Path(report).resolve() and not is_of_system(Path(report).parent):
        raise LaunchError(f"--events={events} and --report={report} are the same file; give each its own")


def _open_endpoint(options: Options, console: Console, address: str, port: int) -> None:
    """Open the endpoint. Errors: LaunchError if there can be none"""
    from ..output.prometheus import open_endpoint

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
        from .part_of_job import run_part_of_job

        return run_part_of_job(options, console)
    with no_workers_yet(is_first=True, last_act=console.abandoned):
        first = choose_attempt(options, console)
    options.logs.check(sum(len(one.devices) for one in first.hosts))
    if options.backend.launcher.starts_itself:
        why = f"--launcher={options.backend.launcher.name}, which prints what the ranks write"
        refuse(given_in(options.logs), why)
        if options.metrics.has_own_interval:
            one = options.backend.launcher.name
            raise LaunchError(
                f"--metrics_interval has no effect with --launcher={one}, whose ranks have no agent to tell; "
                "leave it out"
            )
        from .owned_job import run_owned_job

        return run_owned_job(options, make_plan(options, first), console)
    if options.dry_run:
        return show_job(options, first, console)
    ended: list[EndedAttempt] = []
    try:
        _run_attempts(options, first, console, ended)
    except LaunchError as error:
        if ended:  # the records of earlier attempts are not lost
            decision = f"{ended[-1].decision}; {error}"
            ended[-1] = ended[-1]._replace(decision=decision)
            unwritten = write_reports(options, ended, console, error=error)
            if unwritten is not None:
                console.error(str(unwritten))
        raise
    return end_job(options, ended, console)


def _run_attempts(options: Options, first: Attempt, console: Console, ended: list[EndedAttempt]) -> None:
    """Start the job, and again after failures as the options say; add each attempt that has ended to `ended`.

    Errors: LaunchError if an attempt cannot be made
    """
    attempt: Attempt | None = first
    refused = RefusedBefore()
    kept = _kept_agents(options)
    limits = limits_of(options)
    lasting = Lasting(kept, limits)
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
                    _warn(options, plan, console)
                if options.moves_files:
                    from .job_files import files_of

                    files = files_of(options, plan, console, before=files)
            begun = BegunAttempt(number=attempt.number, hosts=plan.host_names)
            groups = plan_groups(plan.all_nodes, options.tree)
            access = choose_access(options, plan.all_nodes, groups, say=console.say, refused=refused)
            try:
                with _warm_spares(options, attempt, plan, kept, refused, console):
                    verdict = _run_attempt(plan, access, console, attempt, hosts, files, lasting)
            finally:
                access.close()
            decision = _decide(options, attempt, verdict, hosts)
            if kept is not None:
                _keep_for(decision.attempt, kept)
            if options.start.shows_timings:
                show_timings(verdict, console, access.summary())
            interrupted = write_trace_of(options, plan, files, console, verdict)
            console.report(verdict, took_s=begun.duration_s, written=options.report or "")
            if decision.why:
                console.say(decision.why)
            ended.append(noted(begun.end(verdict, decision.why), console))
            attempt = decision.attempt
            if attempt is not None and interrupted is not None:
                raise interrupted
    finally:
        if kept is not None:
            kept.close()
        if limits is not None:
            keep_limits(options, limits)
        forget_trace(files)


def _warn(options: Options, plan: Plan, console: Console) -> None:
    """Warn of what the first plan shows."""
    warn_of_plan(plan, console)
    names = given_in(options.ssh)
    is_here = all(node.is_local for node in plan.all_nodes)
    if names and is_here and not options.restart.is_on:
        console.warn(f"no effect, for all ranks run on this machine: {', '.join(names)}")


def _kept_agents(options: Options) -> KeptAgents | None:
    """Return the keeper of agents between attempts; None for a job whose agents end with each attempt.

    Those of hosts behind gateways do: who is to blame for a lost gateway is known to its own attempt only.
    """
    if not options.may_start_again or options.tree.above is not None:
        return None
    from ..controller.kept_agents import KeptAgents

    return KeptAgents(heartbeat_s=options.heartbeat_s)


def _warm_spares(
    options: Options,
    attempt: Attempt,
    plan: Plan,
    kept: KeptAgents | None,
    refused: RefusedBefore,
    console: Console,
) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the agents of spares are started."""
    if kept is None or not attempt.spares:
        return contextlib.nullcontext()
    from .warm_spares import warm_spares

    return warm_spares(options, attempt.spares, kept, plan=plan, refused=refused, tell=console.debug)


def _decide(options: Options, attempt: Attempt, verdict: Verdict, hosts: Hosts | None) -> Decision:
    if hosts is None:
        return fit(decide(attempt, verdict, options.restart), options.mesh, options.restart)
    return next_attempt(attempt, verdict, hosts.known(), hosts.rules)


def _keep_for(attempt: Attempt | None, kept: KeptAgents) -> None:
    """Keep the agents that this attempt could have, before anything is reported: the others end now."""
    if attempt is None:
        kept.close()
    else:
        members = (*attempt.hosts, *attempt.spares, *(one.host for one in attempt.servers))
        kept.leave_only({one.host.name for one in members})


def _checked(
    options: Options, attempt: Attempt, console: Console, hosts: Hosts | None, refused: RefusedBefore
) -> Attempt:
    """Return the attempt with the fit hosts. Errors: LaunchError if too few of them are"""
    from .check_first import check_first

    fit_attempt = check_first(options, attempt, console, refused)
    if hosts is not None:
        before = {one.host.name for one in (*attempt.hosts, *attempt.spares)}
        hosts.leave_out(before - {one.host.name for one in (*fit_attempt.hosts, *fit_attempt.spares)})
    return fit_attempt


def _run_attempt(
    plan: Plan,
    access: HostAccess,
    console: Console,
    attempt: Attempt,
    hosts: Hosts | None,
    files: SyncJob | None,
    lasting: Lasting,
) -> Verdict:
    # At this place, because it takes 10 ms, and the first hosts are being connected already.
    from ..controller.controller import Controller

    controller = Controller(
        plan,
        connect=access.connect,
        console=console,
        window=access.window,
        watch=hosts,
        files=files,
        lasting=lasting,
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
