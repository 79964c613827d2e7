"""The screen: frames in a terminal, and keys. The one file, with dialogs.py, that imports textual.

[Note: The terminal] It must be as before when the screen is gone, however that ends: `q`, the end of the job,
SIGTERM, SIGHUP, a fault of ours. textual puts it back when its app ends, so signals end the app. A terminal
that is gone cannot be put back, and textual may wait for it for ever: a thread of ours ends the process then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, NamedTuple

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from ..errors import LaunchError
from ..registry.known_jobs import KnownJob
from ..registry.record import JobState
from ..registry.stacks_request import ask_stacks
from ..registry.stopping import Stopping
from ..run_state.metric_table import OTHER, PHASES
from .bars import BLOCKS, Glyphs
from .dialogs import HELP, Question, TextDialog
from .frame import Frame, make_frame
from .log_lines import LogLines
from .rows import is_by_hosts
from .spans import Line, shown
from .view import View
from .watched import Watched

EVERY_S = 1.0
ANSWER_WITHIN_S = 30.0  # time for ranks to answer a question for stacks
MESSAGE_S = 6.0
_END_WITHIN_S = 3.0  # after a signal
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

KEYS = {"q": "quit", "s": "sort", "h": "hosts", "t": "stacks", "x": "stop", "l": "logs", "?": "help"}
# Names of the terminal's own colors, so that its theme holds.
STYLES: dict[str, Style] = {
    "": Style(),
    "bold": Style(bold=True),
    "dim": Style(dim=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow", bold=True),
    "bad": Style(color="red", bold=True),
    "head": Style(reverse=True),
    "key": Style(color="cyan", bold=True),
    "loss": Style(color="cyan"),
    "steps/s": Style(color="magenta"),
    "lines/s": Style(color="magenta"),
    **{name: Style(color="black", bgcolor=one.color) for name, one in PHASES.items()},
    OTHER: Style(dim=True),
}


class ScreenOutcome(NamedTuple):
    """The end of the screen: `quit`, `ended` (the job), `console` (asked for), or `signal` with a number."""

    word: str
    signal: int = 0


class Picture(Widget):
    """Shows a frame; draws only changed lines again."""

    DEFAULT_CSS = "Picture { width: 100%; height: 100%; }"

    def __init__(self) -> None:
        super().__init__()
        self._lines: tuple[Line, ...] = ()

    def show(self, lines: tuple[Line, ...]) -> None:
        """Show the next frame."""
        before, self._lines = self._lines, lines
        if len(before) != len(lines):
            self.refresh()
            return
        changed = [
            Region(0, place, self.size.width, 1)
            for place, (old, new) in enumerate(zip(before, lines, strict=True))
            if old != new
        ]
        if changed:
            self.refresh(*changed)

    def render_line(self, y: int) -> Strip:
        spans = self._lines[y] if y < len(self._lines) else ()
        strip = Strip([Segment(one.text, STYLES.get(one.style, STYLES[""])) for one in spans])
        return strip.extend_cell_length(self.size.width).crop(0, self.size.width)


class Top(App[ScreenOutcome]):
    """The screen of one job. `is_watch`: it belongs to the command that started the job, ends with the job,
    and asks whether the job goes on.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; color: ansi_default; }
    ModalScreen { align: center middle; background: transparent; }
    Question > Static {
        width: auto; max-width: 90%; height: auto; max-height: 90%; padding: 1 2;
        border: solid ansi_cyan; background: ansi_default;
    }
    Question.small > Static { width: 100%; max-width: 100%; max-height: 100%; padding: 0; border: none; }
    Reading { background: ansi_default; }
    Reading > .title { text-style: reverse; width: 100%; }
    Reading > RichLog { background: ansi_default; height: 1fr; scrollbar-size: 1 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c,ctrl+q", "leave", priority=False),
        Binding("s", "sort(1)"),
        Binding("S", "sort(-1)"),
        Binding("h", "by"),
        Binding("t", "stacks"),
        Binding("x", "stop"),
        Binding("l", "logs"),
        Binding("question_mark,f1", "show_help"),
        Binding("up,k", "move(-1)"),
        Binding("down,j", "move(1)"),
        Binding("pageup", "page(-1)"),
        Binding("pagedown,space", "page(1)"),
        Binding("home,g", "end(False)"),
        Binding("end,G", "end(True)"),
    ]

    def __init__(self, job: KnownJob, *, is_watch: bool = False, glyphs: Glyphs = BLOCKS) -> None:
        super().__init__(ansi_color=True)
        self.watched = Watched(job)
        self.view = View()
        self.frame: Frame | None = None
        self._is_watch, self._glyphs = is_watch, glyphs
        self._message_until = 0.0
        self._asked_at = 0.0  # time of the question for stacks, on the monotonic clock; 0: none
        self._num_stacks = 0  # stacks that were there when they were asked for, or are shown

    def compose(self) -> ComposeResult:
        yield Picture()

    def on_mount(self) -> None:
        self._look()
        self.set_interval(EVERY_S, self._look)

    def on_resize(self, _: events.Resize) -> None:
        self._draw()

    # Updates.

    def _look(self) -> None:
        is_all = self.watched.look()
        self._look_at_stacks()
        if self._is_watch and is_all and self.watched.has_ended:
            self.exit(ScreenOutcome("ended"))
            return
        self._draw()
        if not is_all:
            self.call_later(self._look)

    def _draw(self) -> None:
        if time.monotonic() > self._message_until and self.view.message:
            self._change(message="")
        width, height = self.size
        if not width or not height:
            return
        state = self.watched.state
        other = "ranks" if is_by_hosts(state, self.view.by) else "hosts"
        self.frame = make_frame(
            state,
            self.watched.facts,
            replace(self.view, keys=tuple({**KEYS, "h": other}.items())),
            width=width,
            height=height,
            now=time.time(),
            glyphs=self._glyphs,
        )
        with contextlib.suppress(IndexError):  # there is no screen any more
            self.screen_stack[0].query_one(Picture).show(self.frame.lines)

    def _change(self, **changes: object) -> None:
        self.view = replace(self.view, **changes)  # type: ignore[arg-type] # by the callers' names

    def say(self, message: str) -> None:
        """Show a sentence at the bottom for some seconds."""
        self._change(message=shown(message))
        self._message_until = time.monotonic() + MESSAGE_S
        self._draw()

    # Keys.

    def action_sort(self, step: int) -> None:
        sorts = self.frame.sorts if self.frame is not None else ()
        if sorts:
            first = sorts[1] if is_by_hosts(self.watched.state, self.view.by) else sorts[0]
            place = sorts.index(self.view.sort) if self.view.sort in sorts else sorts.index(first)
            self._change(sort=sorts[(place + step) % len(sorts)], offset=0)
        self._draw()

    def action_by(self) -> None:
        state = self.watched.state
        if state.folded:
            self.say("a job of more than 64 ranks is shown by hosts only")
            return
        self._change(by="ranks" if is_by_hosts(state, self.view.by) else "hosts", offset=0, sort="")
        self._draw()

    def action_move(self, by: int) -> None:
        if self.frame is not None:
            last = max(0, self.frame.num_rows - self.frame.num_shown)
            self._change(offset=max(0, min(last, self.view.offset + by)))
        self._draw()

    def action_page(self, pages: int) -> None:
        self.action_move(pages * max(1, (self.frame.num_shown if self.frame is not None else 1) - 1))

    def action_end(self, is_last: bool) -> None:
        self.action_move(1_000_000 if is_last else -1_000_000)

    def action_show_help(self) -> None:
        self.push_screen(TextDialog("Help", HELP))

    def action_leave(self) -> None:
        if not self._is_watch or self.watched.has_ended:
            self.exit(ScreenOutcome("quit"))
            return
        answers = {
            "d": "leave it running, and end this command",
            "s": "stop it: SIGTERM to the workers, and SIGKILL after the grace",
            "a": "its console, as with `dslaunch attach`",
            "g": "go on watching",
        }
        self.push_screen(Question(f"{self.watched.job.record.name} runs. What now?", answers), self._left)

    def _left(self, answer: str | None) -> None:
        if answer == "d":
            self.exit(ScreenOutcome("quit"))
        elif answer == "a":
            self.exit(ScreenOutcome("console"))
        elif answer == "s":
            self._stop(is_now=False)

    def action_stop(self) -> None:
        job = self.watched.job
        if not job.is_live:
            self.say(f"{job.record.name} has ended")
            return
        answers = {
            "y": "stop it: SIGTERM to the workers, and SIGKILL after the grace",
            "k": "kill the workers now",
            "n": "go on",
        }
        question = f"Stop {job.record.name}?"
        if job.state == JobState.STOPPING.value:
            question = f"{job.record.name} is stopping already. Stop it again?"
        self.push_screen(Question(question, answers), self._stop_answered)

    def _stop_answered(self, answer: str | None) -> None:
        if answer in ("y", "k"):
            self._stop(is_now=answer == "k")

    def _stop(self, *, is_now: bool) -> None:
        job = self.watched.job
        self.say(f"{job.record.name} is told to stop")

        def stop() -> None:
            try:
                with Stopping(job) as stopping:
                    stopping.tell(is_now=is_now)
                    while is_now and not stopping.has_ended():
                        if said := stopping.end_by_force():
                            self.call_from_thread(self.say, said)
            except LaunchError as error:
                self.call_from_thread(self.say, str(error))

        threading.Thread(target=_quietly(stop), daemon=True).start()

    def action_stacks(self) -> None:
        job = self.watched.job
        if not job.is_live:
            self.say(f"{job.record.name} has ended")
            return
        try:
            ask_stacks(job)
        except LaunchError as error:
            self.say(str(error))
            return
        self._asked_at, self._num_stacks = time.monotonic(), self.watched.state.stacks.num
        self.say("the ranks are asked what they do")

    def _look_at_stacks(self) -> None:
        """Show the answer, once it is there."""
        if not self._asked_at:
            return
        if self.watched.state.stacks.num > self._num_stacks:
            self._asked_at = 0.0
            self.push_screen(TextDialog("what the ranks do", more=self._new_stacks, is_from_top=True))
        elif time.monotonic() > self._asked_at + ANSWER_WITHIN_S:
            self._asked_at = 0.0
            self.say("no rank has answered")

    def _new_stacks(self) -> list[str]:
        """Return the answers since the last time; one answer of several ranks comes in parts."""
        self.watched.look()
        state = self.watched.state
        num_new = min(state.stacks.num - self._num_stacks, len(state.stacks))
        self._num_stacks = state.stacks.num
        lines: list[str] = []
        for one in list(state.stacks)[len(state.stacks) - num_new :]:
            lines += [one.title, *(f"    {text}" for text in one.lines), ""]
        return lines

    def action_logs(self) -> None:
        job = self.watched.job
        if not job.record.is_detached:
            place = job.record.console or "its own process"
            self.say(f"{job.record.name} runs in the foreground, and shows its output in {place}")
            return
        lines = LogLines(job)
        self.push_screen(
            TextDialog(f"dslaunch logs -f {job.record.id}", lines.more(), more=lines.more),
            lambda _: lines.close(),
        )


def show(job: KnownJob, *, is_watch: bool = False, glyphs: Glyphs = BLOCKS) -> ScreenOutcome:
    """Show the job until the user, the job or a signal ends it. See [Note: The terminal]."""
    app = Top(job, is_watch=is_watch, glyphs=glyphs)

    async def run() -> ScreenOutcome | None:
        loop = asyncio.get_running_loop()
        for one in _SIGNALS:
            loop.add_signal_handler(one, _end, app, one)
        return await app.run_async(mouse=False)

    has_ended = threading.Event()
    threading.Thread(target=_end_without_terminal, args=(has_ended,), daemon=True).start()
    try:
        outcome = asyncio.run(run())
    finally:
        has_ended.set()
        app.watched.close()
    if outcome is None:
        raise LaunchError(
            "the screen of dslaunch top ended by a fault, which is shown above; report it", exit_code=1
        )
    return outcome


def _end(app: Top, number: int) -> None:
    app.exit(ScreenOutcome("signal", number))
    timer = threading.Timer(_END_WITHIN_S, os._exit, (128 + number,))
    timer.daemon = True
    timer.start()


def _end_without_terminal(has_ended: threading.Event) -> None:
    """End the process a while after its terminal is gone, if nothing else does."""
    while os.isatty(0):
        if has_ended.wait(EVERY_S):
            return
    if not has_ended.wait(_END_WITHIN_S):
        os._exit(128 + signal.SIGHUP)


def _quietly(run: Callable[[], None]) -> Callable[[], None]:
    """Run it in a thread that may outlive the screen."""

    def quiet() -> None:
        with contextlib.suppress(RuntimeError):  # there is no screen any more
            run()

    return quiet
