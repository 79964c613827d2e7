"""Windows in front of the screen: help, a question, text to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import ModalScreen
from textual.widgets import RichLog, Static

from ..run_state.metric_table import OTHER_HELP, OTHER_LETTER, PHASES
from .spans import cut, shown

MAX_LINES = 5000

_AROUND_ROWS = 8  # rows of a question beside its answers: frame, space, the question itself
_WHOLE_COLUMNS = 74  # its longest answer is one line then

HELP = (
    "q, Ctrl-C    quit; the job goes on",
    "s, S         sort by the next column, or the one before; * marks it",
    "h            hosts or ranks; of more than 64 ranks only hosts are shown",
    "t            ask all ranks what they do, as `dslaunch stacks`",
    "x            stop the job; asks first",
    "l            what the job shows, as `dslaunch logs -f`",
    "arrows, page up, page down, home, end   move in the table",
    "",
    "s/step       seconds of a step, in the mean of the last ones",
    "of a step    where they go; sorted by what a rank does itself, without c:",
    *(f"               {one.letter}  {one.help}" for one in PHASES.values()),
    f"               {OTHER_LETTER}  {OTHER_HELP}",
    "memory       of the device that a rank trains on, or of its host",
    "waits for    which rank (or others, where none is slower than the rest) or",
    "             data, and how much of a step",
)


class TextDialog(ModalScreen[None]):
    """Text that can be scrolled; `more` is asked each half second for lines to add."""

    BINDINGS = [  # noqa: RUF012 - textual's form
        Binding("escape,q,enter,ctrl+c", "close", "close"),
        Binding("up,k", "by(-1)", show=False),
        Binding("down,j", "by(1)", show=False),
        Binding("pageup", "page(-1)", show=False),
        Binding("pagedown,space", "page(1)", show=False),
        Binding("home,g", "end(False)", show=False),
        Binding("end,G", "end(True)", show=False),
    ]

    def __init__(
        self,
        title: str,
        lines: Iterable[str] = (),
        *,
        more: Callable[[], list[str]] | None = None,
        is_from_top: bool = False,
    ) -> None:
        """`is_from_top`: it does not follow added lines."""
        super().__init__()
        self._is_following = more is not None and not is_from_top
        self._title, self._lines, self._more = title, list(lines), more

    def compose(self) -> ComposeResult:
        yield Static(f"{self._title}   (q closes)", classes="title", markup=False)
        yield RichLog(max_lines=MAX_LINES, wrap=True, highlight=False, markup=False, auto_scroll=False)

    def on_mount(self) -> None:
        self._add(self._lines)
        if self._is_following:
            self._log.scroll_end(animate=False)
        if self._more is not None:
            self._look()
            self.set_interval(0.5, self._look)

    @property
    def _log(self) -> RichLog:
        return self.query_one(RichLog)

    def _look(self) -> None:
        if self._more is not None:
            self._add(self._more())

    def _add(self, lines: list[str]) -> None:
        log = self._log
        is_at_end = self._is_following and log.scroll_offset.y >= log.max_scroll_y - 1
        for one in lines:
            log.write(shown(one, 2000), scroll_end=is_at_end)

    def action_close(self) -> None:
        self.dismiss(None)

    def action_by(self, lines: int) -> None:
        self._log.scroll_relative(y=lines, animate=False)

    def action_page(self, pages: int) -> None:
        self._log.scroll_relative(y=pages * max(1, self._log.size.height - 1), animate=False)

    def action_end(self, is_last: bool) -> None:
        if is_last:
            self._log.scroll_end(animate=False)
        else:
            self._log.scroll_home(animate=False)


class Question(ModalScreen[str]):
    """A question that a key answers; `answers` has the meaning of each key. Escape is the last one.

    In a small terminal it has no frame, and each line is cut.
    """

    def __init__(self, text: str, answers: Mapping[str, str]) -> None:
        super().__init__()
        self._text, self._answers = text, dict(answers)

    def compose(self) -> ComposeResult:
        yield Static(markup=False)

    def on_resize(self, event: events.Resize) -> None:
        width, height = event.size
        is_small = width < _WHOLE_COLUMNS or height < len(self._answers) + _AROUND_ROWS
        self.set_class(is_small, "small")
        rows = [f"{key}   {what}" for key, what in self._answers.items()]
        if not is_small:
            rows = [self._text, "", *(f"  {row}" for row in rows)]
        elif height > len(rows):
            rows = [cut(row, width) for row in (self._text, *rows)]
        else:
            rows = [cut(f"{'/'.join(self._answers)}: {self._text}", width)]
        self.query_one(Static).update("\n".join(rows))

    def on_key(self, event: events.Key) -> None:
        event.stop()
        if event.key in ("escape", "ctrl+c"):
            self.dismiss(list(self._answers)[-1])
        elif event.character in self._answers:
            self.dismiss(event.character)
