"""One frame of the screen: everything that is shown, in lines, for a size of the terminal."""

from __future__ import annotations

import math
import textwrap
import time
from typing import NamedTuple

from ..run_state.goodput import describe, share_of
from ..run_state.metric_table import PHASES
from ..run_state.run_state import RunState, Straggler
from ..telemetry.stragglers import WINDOW_S
from ..wording import count, shown_time
from .amounts import shown_many, shown_number, shown_rate
from .bars import BLOCKS, LETTERS, Glyphs, spark
from .rows import host_rows, is_by_hosts, is_quiet, rank_rows
from .spans import Line, StyledText, fitted, line, shown, width_of
from .table import columns_for, fit, head_line, row_line, sorted_rows
from .view import JobFacts, View

MIN_ROWS = 3  # rows of the table, if there is any room
_TALL = 40  # number of a terminal's lines from which charts are drawn higher
_LEGEND = {name: one.short or name for name, one in PHASES.items()}
_LEVELS = {30: "warn", 40: "bad", 50: "bad"}


class Frame(NamedTuple):
    """`num_rows` is the number of rows of the table, `num_shown` the number of those on the screen; `sorts`
    are the titles of the columns by which it can be sorted.
    """

    lines: tuple[Line, ...]
    num_rows: int
    num_shown: int
    sorts: tuple[str, ...]


def make_frame(
    state: RunState,
    facts: JobFacts,
    view: View,
    *,
    width: int,
    height: int,
    now: float,
    glyphs: Glyphs = BLOCKS,
) -> Frame:
    """Make exactly `height` lines of at most `width` columns."""
    slow = state.straggler if facts.is_live else None
    above = [
        *_head(state, facts, width, now),
        *_spent(state, width, height),
        *_pictures(state, width, 1 if height < _TALL else 3, glyphs),
        *_warnings(state, facts, slow, width, height, now),
    ]
    notes = _notes(state, width, height)
    room = height - len(above) - len(notes) - 2  # without the head of the table and the foot
    if room < MIN_ROWS:
        room, notes = room + len(notes), []
    by_hosts = is_by_hosts(state, view.by)
    until = now if facts.is_live else math.inf
    rows = host_rows(state, slow, until) if by_hosts else rank_rows(state, slow, until)
    columns = columns_for(rows, by_hosts=by_hosts, has_numbers=state.has_numbers)
    kept = fit(columns, width)
    rows = sorted_rows(rows, kept, view.sort)
    room = max(0, room)
    offset = max(0, min(view.offset, len(rows) - room))
    shown_rows = rows[offset : offset + room]
    table = [head_line(kept, view.sort)] if rows else []
    table += [row_line(one, kept, glyphs) for one in shown_rows]
    is_part = 0 < len(shown_rows) < len(rows)
    where = f"rows {offset + 1} to {offset + len(shown_rows)} of {len(rows)}" if is_part else ""
    below = [*notes, _foot(state, view, width, where)]
    lines = [*above, *table][: max(0, height - len(below))]
    lines += [()] * (height - len(below) - len(lines))
    whole = tuple(fitted(one, width) for one in [*lines, *below][-height:])
    return Frame(whole, len(rows), len(shown_rows), tuple(one.title for one in kept))


def _head(state: RunState, facts: JobFacts, width: int, now: float) -> list[Line]:
    began_at = facts.began_at or state.job.at
    until = facts.ended_at or (now if facts.is_live else state.at)
    style = (
        "good" if facts.state == "running" else "bad" if facts.state == "lost" or facts.exit_code else "bold"
    )
    pieces = [StyledText(shown(facts.name), "bold"), StyledText("  "), StyledText(facts.state, style)]
    if began_at:
        pieces.append(StyledText(f" {shown_time(max(0.0, until - began_at))}"))
    num_hosts = len(state.hosts) or facts.num_hosts
    num_ranks = len(state.ranks) or facts.num_ranks
    if num_ranks:
        servers = f", {count(len(state.servers), 'server')}" if state.servers else ""
        pieces.append(StyledText(f"  {count(num_hosts, 'host')}, {count(num_ranks, 'rank')}{servers}"))
    attempt = state.attempt.number if state.attempt is not None else facts.attempt
    if attempt:
        pieces.append(StyledText(f"  attempt {attempt + 1}", "warn"))
    clock = time.strftime("%H:%M:%S", time.localtime(now))
    left = width - width_of(tuple(pieces)) - len(clock) - 4
    command = shown(" ".join(state.job.command), left - 3) if left > 20 else ""
    pieces.append(StyledText(f"  {command}" if command else "", "dim"))
    space = " " * max(1, width - width_of(tuple(pieces)) - len(clock))
    progress, share = _progress(state, facts, now), share_of(state.spent_s)
    goodput = "" if share is None else f"   goodput {100 * share:.0f} %"
    if width_of(progress) + len(goodput) <= width:
        progress = line(*progress, goodput)
    return [line(*pieces, space, StyledText(clock, "dim")), progress]


def _progress(state: RunState, facts: JobFacts, now: float) -> Line:
    """Describe the progress of the run, or its end."""
    if not facts.is_live:
        return _ending(state, facts)
    if state.exit_code is not None:
        still = StyledText("; --on_end or --webhook may still run", "dim")
        return (*_ending(state, facts), still)
    if not facts.has_events and not state.attempts:
        return line(StyledText("this job has no events yet", "dim"))
    step, pieces = state.step, []
    if step is None:
        return _start(state, now)
    total = state.total_steps
    text = f"step {step:,}"
    if total:
        text += f" of {total:,}, {min(100.0, step / total * 100):.0f} %"
    pieces.append(StyledText(text, "bold"))
    for name in ("steps", "samples", "tokens"):
        rate = state.last(f"{name}_per_s")
        if rate is not None and (name != "samples" or state.last("tokens_per_s") is None):
            pieces += [StyledText("   "), StyledText(shown_rate(rate, name))]
    left_s = state.left_s
    if left_s is not None:
        pieces += [StyledText("   "), StyledText(f"{shown_time(left_s)} left")]
    if is_quiet(state.step_at, state, now):
        pieces += [StyledText("   "), StyledText(f"no step for {shown_time(now - state.step_at)}", "warn")]
    return line(*pieces)


def _start(state: RunState, now: float) -> Line:
    """Describe the time before the first step, or a job that reports no steps."""
    attempt = state.attempt
    if attempt is None:
        return line(StyledText("nothing has been started yet", "dim"))
    if attempt.running_at:
        has_told = any(one.at for one in state.sources)
        told = "its ranks tell no steps" if has_told or now - attempt.running_at > 20 else "no step yet"
        return line(f"all workers run for {shown_time(max(0.0, now - attempt.running_at))}; {told}")
    behind = ", ".join(f"{one.name} {shown_time(one.ended_at - attempt.began_at)}" for one in attempt.phases)
    return line(f"starts for {shown_time(max(0.0, now - attempt.began_at))}", f": {behind}" if behind else "")


def _ending(state: RunState, facts: JobFacts) -> Line:
    if facts.why:
        return line(StyledText(shown(facts.why), "warn"))
    code = facts.exit_code if facts.exit_code is not None else state.exit_code
    verdict = state.attempt.verdict if state.attempt is not None else None
    why = facts.verdict or (verdict.text if verdict is not None and verdict.exit_code else "")
    if not code:
        return line(StyledText(f"ended with exit code {code or 0}", "good"), f": {shown(why)}" if why else "")
    return line(StyledText(f"ended with exit code {code}", "bad"), f": {shown(why)}" if why else "")


def _spent(state: RunState, width: int, height: int) -> list[Line]:
    """Describe where the time of the job went, its limits, and the last ways back, where there is room."""
    if height < _TALL:
        return []
    limits = ", ".join(f"{section} {shown_time(one)}" for section, one in state.limits.items())
    stands = f"may stand still (--hang_limit): {limits}" if limits else ""
    found = [describe(state.spent_s), stands, *(one.text for one in state.recoveries[-4:])]
    return [line(StyledText(shown(one, width), "dim")) for one in found if one]


def _pictures(state: RunState, width: int, height: int, glyphs: Glyphs) -> list[Line]:
    found: list[Line] = []
    loss = state.loss
    if loss:
        values = [one.mean for one in loss.points()]
        style = "" if math.isfinite(loss.last) else "bad"
        found += _picture(
            ("loss", shown_number(loss.last), style), values, "whole run", (width, height), glyphs
        )
    name, title = ("steps_per_s", "steps/s") if state.recent("steps_per_s") else ("lines_per_s", "lines/s")
    recent = state.recent(name)
    if recent:
        values = [value for _, value in recent]
        seconds = recent[-1][0] - recent[0][0]
        said = (title, shown_many(values[-1]), "")
        found += _picture(said, values, f"last {shown_time(seconds)}", (width, height), glyphs, floor=0.0)
    return found


def _picture(
    said: tuple[str, str, str],
    values: list[float],
    when: str,
    size: tuple[int, int],
    glyphs: Glyphs,
    *,
    floor: float = math.inf,
) -> list[Line]:
    """Draw values over time after their title, the last value and its style. The bottom is `floor` if no
    value is lower.
    """
    title, last, style = said
    width, height = size
    left, right = f"{title:<8}", f"  {when:<16}"
    room = width - len(left) - 10 - len(right)
    if room < 10:
        return [line(StyledText(left, "dim"), StyledText(last, style or "bold"))]
    finite = [one for one in values if math.isfinite(one)]
    low = min([*finite, floor])
    rows = spark(values, room, height, glyphs, low=low)
    words = [when, f"to {shown_number(max(finite))}", f"from {shown_number(low)}"] if finite else [when]
    found = []
    for place, row in enumerate(rows):
        head = (
            (StyledText(left, "dim"), StyledText(f"{last:<10}", style or "bold"))
            if not place
            else (StyledText(" " * 18),)
        )
        word = words[place] if place < len(words) else ""
        found.append(line(*head, StyledText(row, title), StyledText(f"  {word}", "dim")))
    return found


def _warnings(
    state: RunState, facts: JobFacts, slow: Straggler | None, width: int, height: int, now: float
) -> list[Line]:
    """Return warnings, each in a line."""
    found: list[Line] = []
    if facts.is_live and slow is not None:
        found += [line(StyledText(one, "warn")) for one in _wrapped(shown(slow.text), width)]
    elif facts.is_live and state.step_s is not None and len(state.ranks) > 1 and _is_looked_at(state, now):
        found.append(line(StyledText("no rank is slower than the others", "dim")))
    attempt, report = state.attempt, state.last_hang
    if report is not None and attempt is not None and report.at >= max(attempt.began_at, state.step_at):
        ago = shown_time(max(0.0, now - report.at))
        first = next((one for one in report.lines if one.strip()), "")
        found.append(line(StyledText(f"hangs, said rank {report.rank} {ago} ago: ", "bad"), shown(first)))
    ended = [one for one in state.attempts.values() if one.verdict is not None and one is not state.attempt]
    for one in ended[-(1 if height < _TALL else 4) :]:
        verdict = one.verdict
        if verdict is not None:
            head = f"attempt {one.number + 1}, {shown_time(verdict.duration_s)}: "
            first, *rest = _wrapped(head + shown(verdict.text), width)
            found += [line(StyledText(head, "bad"), first[len(head) :]), *map(line, rest)]
    if state.num_lost:
        found.append(
            line(
                StyledText(f"{count(state.num_lost, 'event')} could not be kept, and are not in this", "warn")
            )
        )
    return found


def _is_looked_at(state: RunState, now: float) -> bool:
    """Tell whether its workers run for so long that a straggler would be known."""
    running_at = 0.0 if state.attempt is None else state.attempt.running_at
    return bool(running_at) and now - running_at > WINDOW_S


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap it in two lines at most."""
    width = max(10, width)
    return textwrap.wrap(text, width, subsequent_indent="    ", max_lines=2, placeholder=" ~")


def _notes(state: RunState, width: int, height: int) -> list[Line]:
    """Return the last messages of dslaunch."""
    room = 3 if height < _TALL else 8
    notes = [one for one in state.notes if one.level >= 20][-room:]
    found: list[Line] = []
    for one in notes:
        clock = time.strftime("%H:%M:%S", time.localtime(one.at))
        found.append(
            line(
                StyledText(f"{clock} ", "dim"), StyledText(shown(one.text, width), _LEVELS.get(one.level, ""))
            )
        )
    return found


def _foot(state: RunState, view: View, width: int, where: str) -> Line:
    if view.message:
        return line(StyledText(view.message, "warn"))
    keys: list[StyledText] = []
    for key, what in view.keys:
        keys += [StyledText(f" {key}", "key"), StyledText(f" {what} ")]
    legend: list[StyledText] = []
    for name, letter in LETTERS.items() if state.has_numbers else ():
        legend += [
            StyledText("  "),
            StyledText(letter, name),
            StyledText(f" {_LEGEND.get(name, name)}", "dim"),
        ]
    space = width - width_of(tuple(keys)) - width_of(tuple(legend))
    if space >= 0:
        return line(*keys, " " * space, *legend)
    space = width - width_of(tuple(keys)) - len(where)
    return line(*keys, StyledText(" " * space + where, "dim")) if space >= 1 else line(*keys)
