"""Actions on a job that goes on running: pass a signal on, ask for the ranks' stacks, stop this process."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from ..job.plan import Plan, origins_of
from ..job.section_limits import SectionLimits
from ..job.verdict import Failure, HangFailure, signal_name
from ..output.console import Console
from ..run_state.recovery import FIRST_STEP
from ..telemetry.straggler_watch import FoundStraggler, StragglerWatch
from ..wire.frames import AskStacks, Exited, Frame, Hold, Metrics, Signal, Stacks, Started, Told
from ..wording import count
from .job_signals import ASKING, PASSED_ON, STOPPING, stop_until_continued, tell_unheard
from .link import LinkEnd
from .roster import HostState, Roster
from .section_watch import LongStandstill, SectionWatch
from .stacks import StackWatch

HOLD_S = 3600.0  # the workers run on so long while this process is stopped
HOLD_DRAIN_S = 1.0
STACKS_S = 1.0  # for the stacks of a job that hangs, before it is ended
WAY_AFTER_S = 1.5  # after the first step, until all ranks have told of their start, and of a step


class RunningJob:
    """The workers on all hosts, as long as there are any."""

    def __init__(
        self,
        roster: Roster,
        console: Console,
        plan: Plan,
        failures: list[Failure],
        limits: SectionLimits | None = None,
    ) -> None:
        self._roster = roster
        self._failures = failures
        self._console = console
        self._telemetry = console.telemetry
        self.has_trained = False
        self._say_way_at = float("inf")
        self._stacks = StackWatch(plan.stack_on_hang_s, place_of=plan.place_of)
        self._limits, self._sections = limits, None
        if limits is not None:
            self._sections = SectionWatch(limits, (one.rank for node in plan.nodes for one in node.ranks))
        self._limits_told: dict[str, float] = {}
        self._standstill: LongStandstill | None = None
        self._given_up_at = float("inf")
        self._stragglers: StragglerWatch | None = StragglerWatch(
            (one for one in origins_of(plan) if not one.role), place_of=plan.place_of
        )

    def heard_output(self, at_s: float) -> None:
        """Note the output of a rank; may be called from any thread."""
        self._stacks.last_output_at = at_s

    def take_stacks(self, item: Stacks) -> None:
        self._stacks.take(item)

    def ask_stacks(self, why: str) -> None:
        """Ask for the stacks of all ranks, which are shown once the answers are there."""
        if self._stacks.ask(why, self._roster.running_ranks(), now=time.monotonic()):
            for host in self._roster:
                if host.pids and not host.plan.role:
                    host.send(AskStacks())

    def phase(self, phase: str, at_s: float) -> None:
        """Record that all hosts, or ranks, have completed a phase of the start."""
        self._telemetry.record_of_attempt("phase", at_s=at_s, phase=phase)
        if phase == FIRST_STEP:
            self.has_trained = True
            self._say_way_at = time.monotonic() + WAY_AFTER_S

    def _say_way_back(self) -> None:
        """Describe the way back into training, if the attempt follows a failure."""
        self._say_way_at = float("inf")
        with self._telemetry.lock:
            ways, attempt = self._telemetry.state.recoveries, self._telemetry.state.attempt
        if ways and attempt is not None and ways[-1].attempt == attempt.number:
            self._console.say(ways[-1].text)

    def record(self, host: HostState, item: Frame | LinkEnd, at_s: float) -> None:
        """Publish the frames of a host that displays and records need."""
        if isinstance(item, Metrics):
            self._telemetry.take_metrics(host.name, item)
            told_at = min(at_s, item.at + host.clock_offset_s)
            self._take_for_stragglers(host.name, item, told_at)
            if self._sections is not None:
                self._sections.take(host.name, item, told_at)
        elif isinstance(item, Told):
            self._telemetry.take_told(item)
        elif isinstance(item, Started):
            self._telemetry.record_of_attempt(
                "started", at_s=at_s, rank=item.rank, host=host.name, pid=item.pid
            )
        elif isinstance(item, Exited):
            ended_at = min(at_s, item.at + host.clock_offset_s)
            ended = {"rank": item.rank, "host": host.name, "code": item.code, "signal": item.signal}
            self._telemetry.record_of_attempt("exited", at_s=ended_at, **ended)

    def look(self, *, started_at: float | None) -> None:
        """Publish the numbers of the ranks. Ask for stacks if the ranks have been silent for too long, and
        show the answers. End a job that stands still for longer than its limit.

        `started_at` None: not running.
        """
        now = time.monotonic()
        self._telemetry.look(now)
        if now >= self._say_way_at:
            self._say_way_back()
        self._look_at_stragglers(now)
        if started_at is not None:
            silent_s = self._stacks.silence_to_ask_about(now, started_at=started_at)
            if silent_s:
                self.ask_stacks(f"no output for {silent_s:.0f} s")
        if self._stacks.is_asked:
            blocks = self._stacks.blocks(now, ended=self._roster.ended_ranks())
            for block in blocks:
                self._console.show(block.title, block.lines)
                self._telemetry.record("stacks", title=block.title, lines=list(block.lines))
            if blocks:
                self._console.answered()
        if started_at is not None and not self._failures:
            self._look_at_sections(now, started_at)

    def _look_at_sections(self, now: float, started_at: float) -> None:
        """Ask for stacks if the job stands still for too long; it has failed once they are shown."""
        if self._sections is None or self._limits is None:
            return
        self._sections.begin(started_at)
        limits = self._limits.all
        if limits != self._limits_told:
            self._limits_told = limits
            self._telemetry.record("limits", limits=limits)
        found = self._sections.look(now)
        if found is not None:
            self._standstill, self._given_up_at = found, now + STACKS_S
            self.ask_stacks(found.text)
        if self._standstill is None or (self._stacks.is_asked and now < self._given_up_at):
            return
        found, self._standstill = self._standstill.with_stopped(self._stacks.stopped), None
        host = next((one.name for one in self._roster if found.rank in one.ranks), "")
        self._failures.append(HangFailure(found.text, now, found.rank, host))

    def _take_for_stragglers(self, host: str, item: Metrics, at_s: float) -> None:
        try:
            if self._stragglers is not None:
                self._stragglers.take(host, item, at_s)
        except Exception as error:
            self._give_up_stragglers(error)

    def _give_up_stragglers(self, error: Exception) -> None:
        """Give up the search for stragglers; the job does not end for them."""
        self._stragglers = None
        self._console.warn(f"stragglers are not looked for any more: {type(error).__name__}: {error}")

    def _look_at_stragglers(self, now: float) -> None:
        news: list[FoundStraggler] = []
        try:
            if self._stragglers is not None:
                news = self._stragglers.look(now)
        except Exception as error:
            self._give_up_stragglers(error)
        for one in news:
            rank, host, cause = one.rank, one.host, one.cause
            if one.is_over:
                self._telemetry.record("straggler_over", rank=rank, host=host, cause=cause)
                continue
            self._telemetry.record(
                "straggler", rank=rank, host=host, cause=cause, share=one.share, text=one.text
            )
            if one.is_said:
                self._console.warn(one.text)

    def warn_of_left_over(self, host: HostState, num_processes: int) -> None:
        """Warn of processes that a host has ended at the job's end."""
        if num_processes == 1:
            self._console.warn(f"{host.name}: ended 1 process that outlived its worker")
        elif num_processes:
            self._console.warn(f"{host.name}: ended {num_processes} processes that outlived their worker")

    def obey(self, number: int, *, has_peers: bool) -> bool:
        """Do what a signal to this process asks for; return False if it is one that ends the job."""
        if number in PASSED_ON:
            self.pass_on(number)
        elif number == ASKING and not self._roster.num_running:
            tell_unheard(number, self._console)
        elif number == ASKING:
            self.ask_stacks(signal_name(number))
        elif number != STOPPING:
            return False
        elif has_peers:
            self._console.warn(
                "stopping this dslaunch would end the job on the other nodes, so Ctrl-Z is ignored"
            )
        else:
            self.stop_this_process()
        return True

    def pass_on(self, number: int) -> None:
        """Pass a signal on to the ranks: to servers it may mean something else."""
        trainers = [host for host in self._roster if not host.plan.role]
        num_workers = sum(host.num_running for host in trainers)
        for host in trainers:
            if host.pids:
                host.send(Signal(number))
        if num_workers:
            self._console.say(f"{signal_name(number)}: passed on to {num_workers} workers")
        else:
            tell_unheard(number, self._console)

    def stop_this_process(self) -> None:
        """Stop this process; the workers go on until their output fills the pipes.

        It stops for HOLD_S at most: agents that hear nothing end.
        """
        self._console.say(
            f"stopping; the workers run on, for at most {HOLD_S / 60:.0f} minutes, and wait when their "
            "output is not read; `fg` or `bg` goes on"
        )
        self._console.drain(HOLD_DRAIN_S)
        self._roster.send(Hold(HOLD_S))
        stop_until_continued()
        self._roster.forgive_standstill()
        self._roster.send(Hold(0.0))

    def announce_stop(
        self, grace_s: float, failures: Sequence[Failure], interrupted_by: int | None, *, has_started: bool
    ) -> str:
        """Report why and how the running workers are stopped; return the failure that the report names."""
        running = self._roster.num_running
        if not running:
            if interrupted_by and not has_started:
                self._console.say(f"{signal_name(interrupted_by)}: nothing was started")
            return ""
        announced = "" if interrupted_by else min(failures, key=lambda one: one.at_s).name
        why = signal_name(interrupted_by) if interrupted_by else f"{announced} failed"
        servers = sum(host.num_running for host in self._roster if host.plan.role)
        workers = count(running - servers, f"{'' if interrupted_by else 'other '}worker")
        if servers:
            workers = (
                f"{workers} and {count(servers, 'server')}" if running > servers else count(servers, "server")
            )
        how = f"SIGTERM, and SIGKILL after {grace_s:g} s" if grace_s else "SIGKILL"
        hint = "; Ctrl-C again kills them now" if interrupted_by == signal.SIGINT and grace_s else ""
        self._console.say(f"{why}: stopping {workers} ({how}{hint})")
        return announced
