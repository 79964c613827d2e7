"""The words and tables of a page about a run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from ..inputs.host_list import folded
from ..run_state.attempt import AttemptState, AttemptVerdict, failure_text
from ..run_state.goodput import share_of
from ..run_state.metric_table import SPENT
from ..run_state.recovery import STAGES
from ..run_state.run_state import SaidNote, Straggler
from ..run_state.values import items, text, texts
from ..wording import count, shown_size, shown_time
from .chart import by_number, said, shown
from .curves import HostCurves
from .markup import element, escaped, fold, lines_of, moment, pairs, table, tree
from .run import Run

MAX_HOSTS = 400  # rows of the table
MAX_FAILURES = 20  # failures in full
MAX_WAYS = 100  # ways back into training


def state_of(run: Run) -> tuple[str, str]:
    """Return the state of the run in a few words, and the class of their color."""
    code = run.exit_code
    if code is None:
        return run.word or "not ended, as far as this file says", "warn"
    if code == 0:
        return "ended well", "good"
    last = run.last_attempt
    if last is not None and last.verdict is not None:
        if last.verdict.keys.get("interrupted_by"):
            return f"interrupted by {text(last.verdict.keys['interrupted_by'])}", "warn"
        if last.verdict.keys.get("change"):
            return "saved and ended for a change of hosts", "warn"
    return f"failed with exit code {code}", "bad"


def facts(run: Run) -> str:
    """Return the most important numbers."""
    last_loss = run.state.last_loss
    rows = [
        ("exit code", "none yet" if run.exit_code is None else str(run.exit_code)),
        ("time", shown_time(run.duration_s)),
        ("hosts", str(len(run.hosts)) if run.last_attempt else ""),
        ("ranks", str(run.num_ranks or "")),
        ("servers", str(len(run.state.servers) or "")),
        ("attempts", str(run.state.num_attempts or "")),
        ("steps", shown_steps(run)),
        ("rate", _rate(run)),
        ("last loss", "" if last_loss is None else said(last_loss)),
        ("goodput", _goodput(run)),
    ]
    cells = "".join(
        element("div", element("dt", escaped(name)) + element("dd", escaped(value)))
        for name, value in rows
        if value
    )
    return element("dl", cells, class_="facts")


def shown_steps(run: Run) -> str:
    """Return the number of steps done, of as many as the program announced."""
    state = run.state
    if state.last_step is None:
        return ""
    done = shown(state.last_step)
    return done if state.total_steps is None else f"{done} of {shown(state.total_steps)}"


def mean_rate(run: Run) -> float:
    """Return steps a second while there were steps, NaN if there were none."""
    return run.curves.stepped / run.curves.stepped_s if run.curves.stepped_s else math.nan


def _rate(run: Run) -> str:
    rate = mean_rate(run)
    if math.isnan(rate):
        return ""
    return f"{shown(rate, 3)} steps/s" if rate >= 0.5 or rate == 0 else f"{shown(1 / rate, 3)} s/step"


def _goodput(run: Run) -> str:
    share = share_of(run.state.spent_s)
    return "" if share is None else f"{100 * share:.0f} %"


def spent(run: Run) -> str:
    """Return the time of the job by what it was spent on, and each way back into training."""
    seconds = run.state.spent_s
    total = sum(seconds.values())
    if share_of(seconds) is None:
        return ""
    rows = [
        (one.label, shown_time(seconds[name]), f"{100 * seconds[name] / total:.1f} %", one.help)
        for name, one in SPENT.items()
    ]
    made = table(("", "time", "part", ""), rows)
    ways = run.state.recoveries[-MAX_WAYS:]
    if not ways:
        return made
    known = [one for one in STAGES if any(one.title in way.stages_s for way in ways)]
    cells = [
        (
            str(way.attempt + 1),
            *(_seconds(way.stages_s.get(one.title)) for one in known),
            _seconds(way.total_s),
            "" if way.steps_again is None else str(way.steps_again),
        )
        for way in ways
    ]
    head = ("attempt", *(one.title for one in known), "in all", "steps again")
    made += table(head, cells, caption="From a failure to the next step, in seconds", numbers=True)
    return made + fold("The columns", pairs([(one.title, escaped(one.help)) for one in known]))


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def command(run: Run) -> str:
    """Return the typed command, its folder, its user, and the version."""
    job = run.state.job
    rows: list[tuple[str, str]] = []
    if job.command:
        rows.append(("command", element("code", escaped(shlex.join(job.command), 20_000))))
    for name, value in (
        ("in folder", job.cwd),
        ("name", job.name),
        ("user", job.user),
        ("on", job.host),
        ("launcher", job.launcher),
        ("dslaunch", job.version),
    ):
        if value:
            rows.append((name, escaped(value)))
    rows.append(("began", escaped(moment(run.state.began_at))))
    rows.append(("last heard of" if run.exit_code is None else "ended", escaped(moment(run.state.at))))
    if run.hosts:
        rows.append(("hosts", escaped(folded(run.hosts))))
    last = run.last_attempt
    if last is not None and last.log_folder:
        rows.append(("log files", element("code", escaped(last.log_folder))))
    return pairs(rows)


def configuration(run: Run) -> str:
    """Return the configuration as it took effect on rank 0, and where other ranks had another one."""
    if not run.state.configs:
        return ""
    first = min(run.state.configs)
    found = run.state.configs[first]
    made = element("div", tree(found), class_="config")
    others = [
        rank for rank in sorted(run.state.configs) if rank != first and run.state.configs[rank] != found
    ]
    if others:
        rows = [
            (name, a, b, f"rank {rank}")
            for rank in others[:8]
            for name, a, b in differences(found, run.state.configs[rank])
        ]
        made += table(
            ("key", f"rank {first}", "differs", "on"), rows[:200], caption="Ranks that have it otherwise"
        )
    return made


def differences(a: Any, b: Any) -> list[tuple[str, str, str]]:
    """Return keys in which two configurations differ, and both values; empty for a missing one."""
    from .markup import as_value

    left, right = flat(a), flat(b)
    names = [*left, *(name for name in right if name not in left)]
    return [
        (name, as_value(left[name]) if name in left else "", as_value(right[name]) if name in right else "")
        for name in names
        if name not in left or name not in right or left[name] != right[name]
    ]


def flat(value: Any, prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """Return each value by its path: `zero_optimization.stage`."""
    if isinstance(value, Mapping) and value and depth < 20:
        found: dict[str, Any] = {}
        for name, one in value.items():
            found.update(flat(one, f"{prefix}.{name}" if prefix else str(name), depth + 1))
        return found
    return {prefix or "(all)": value}


def attempts(run: Run) -> str:
    """Return a table of all starts, and below it each failure in full."""
    if not run.attempts:
        return ""
    rows = []
    for one in run.attempts:
        verdict = one.verdict
        rows.append(
            (
                str(one.number + 1),
                moment(one.began_at),
                shown_time(max(0.0, (one.ended_at or one.last_at) - one.began_at)),
                f"{len(one.hosts)}: {folded(one.hosts)}" if one.hosts else "",
                "has not ended" if verdict is None else verdict.text,
                "" if verdict is None else verdict.decision,
            )
        )
    made = table(("attempt", "began", "took", "hosts", "how it ended", "what was decided"), rows)
    left_out = run.state.num_attempts - len(rows)
    made += element("p", f"{left_out} earlier attempts are not shown.") if left_out else ""
    failures = [one for one in run.attempts if one.verdict is not None and one.verdict.culprit]
    shown_ones = failures if len(failures) <= MAX_FAILURES else [*failures[:3], *failures[3 - MAX_FAILURES :]]
    made += "".join(failure(one, one.verdict) for one in shown_ones if one.verdict is not None)
    if len(failures) > len(shown_ones):
        made += element("p", f"{len(failures) - len(shown_ones)} further failures are not shown in full.")
    return made


def failure(one: AttemptState, verdict: AttemptVerdict) -> str:
    """Return the first failure, the evidence, its traceback or last lines, and the failures with it."""
    culprit = verdict.culprit
    made = element("h3", escaped(f"Attempt {one.number + 1}: {verdict.text}"))
    for sentence in texts(culprit.get("evidence"))[:20]:
        made += element("p", escaped(sentence))
    if culprit.get("kind") == "rank" and text(culprit.get("message")):
        made += element("p", escaped(text(culprit["message"])))
    traceback, last = texts(culprit.get("traceback")), texts(culprit.get("last_lines"))
    if traceback:
        made += fold("Its traceback", lines_of(traceback), is_open=True)
    if last:
        made += fold(
            f"The last lines of its {text(culprit.get('last_lines_of')) or 'output'}",
            lines_of(last),
            is_open=not traceback,
        )
    others = items(verdict.keys.get("others"))
    if others:
        inner = table(("also failed",), [(failure_text(other),) for other in others[:100]])
        made += fold(f"{count(len(others), 'other failure')} before the job was told to stop", inner)
    if one.exits:
        rows = [
            (
                f"{row.at - one.began_at:.2f} s",
                f"rank {row.rank}",
                row.host,
                f"signal {row.signal}" if row.signal else f"code {row.code}",
            )
            for row in one.exits
        ]
        made += fold(
            f"How {count(one.num_exits, 'worker')} ended", table(("after", "rank", "host", ""), rows)
        )
    return element("div", made, class_="failure")


def stragglers(run: Run) -> str:
    """Return the ranks that others waited for: together by rank and cause, and each time."""
    known = run.state.stragglers
    if not len(known):
        return ""
    groups: dict[tuple[int, str, str], list[Straggler]] = {}
    for one in known:
        groups.setdefault((one.rank, one.host, one.cause), []).append(one)
    rows = []
    for (rank, host, cause), found in sorted(groups.items(), key=lambda item: -len(item[1]))[:100]:
        share = max(one.share for one in found)
        rows.append(
            (
                str(rank),
                host,
                cause,
                str(len(found)),
                f"{100 * share:.0f} %" if share and math.isfinite(share) else "",
                moment(found[0].at),
                moment(found[-1].at),
                moment(found[-1].over_at) or "not known to be over",
            )
        )
    made = table(
        ("rank", "host", "cause", "times", "of a step, at most", "first", "last", "well again"), rows
    )
    made += fold("Each time", table(("when", ""), [(moment(one.at), one.text) for one in known][:200]))
    if known.num_left_out:
        made += element("p", f"{known.num_left_out} in the middle are not shown.")
    return made


def hangs(run: Run) -> str:
    """Return the reports of watchdogs, and the stacks that were asked for."""
    made = ""
    for one in run.state.hangs:
        title = f"{moment(one.at)}: rank {one.rank} told of a collective that takes too long"
        made += fold(title, lines_of(one.lines))
    for one in run.state.stacks:
        made += fold(f"{moment(one.at)}: {one.title[:300]}", lines_of(one.lines, 2000))
    return made


def servers(run: Run) -> str:
    """Return a table of the servers beside the ranks, in the last attempt; empty without any."""
    rows = [
        (one.role, one.host, str(one.num_restarts), "" if one.exit_code is None else str(one.exit_code))
        for one in run.state.servers.values()
    ]
    return table(("role", "host", "started again", "exit code"), rows, caption="Servers") if rows else ""


def hosts(run: Run) -> str:
    """Return the facts about each host."""
    if not run.curves.hosts:
        return ""
    rows = []
    for host, found in sorted(run.curves.hosts.items(), key=lambda one: by_number(one[0]))[:MAX_HOSTS]:
        rows.append((host, *_host_row(found)))
    head = (
        *("host", "cores", "memory", "cpu, mean", "memory, most", "network in, mean", "out, mean"),
        *("GPUs", "GPU, mean", "GPU memory, most", "hottest", "ECC errors"),
    )
    left_out = len(run.curves.hosts) - len(rows)
    empty = {place for place in range(len(head)) if all(not row[place] for row in rows)}
    made = table(
        [name for place, name in enumerate(head) if place not in empty],
        [[cell for place, cell in enumerate(row) if place not in empty] for row in rows],
        numbers=True,
    )
    return made + (element("p", f"{left_out} further hosts are not shown.") if left_out else "")


def _host_row(found: HostCurves) -> tuple[str, ...]:
    def mean(name: str) -> float | None:
        return found.sums[name] / found.num if name in found.sums and found.num else None

    def size(value: float | None, ending: str = "") -> str:
        return "" if value is None or not math.isfinite(value) else shown_size(int(value)) + ending

    def share(value: float | None) -> str:
        return "" if value is None else f"{100 * value:.0f} %"

    cores = found.last.get("cores")
    return (
        "" if cores is None else shown(cores),
        size(found.last.get("mem_total")),
        share(mean("cpu")),
        size(found.most.get("mem_used")),
        size(mean("net_in"), "/s"),
        size(mean("net_out"), "/s"),
        str(found.num_gpus) if found.num_gpus else "",
        share(mean("gpu_util")),
        size(found.most.get("gpu_mem_used")),
        f"{found.most['gpu_temp_c']:.0f} °C" if "gpu_temp_c" in found.most else "",
        shown(found.last["gpu_ecc"]) if "gpu_ecc" in found.last else "",
    )


_LEVELS = ((40, "error"), (30, "warning"), (20, "info"), (0, "debug"))


def notes(run: Run) -> str:
    """Return the messages of dslaunch."""
    known = run.state.notes
    if not len(known):
        return ""

    def rows(found: Iterable[SaidNote]) -> list[tuple[str, str, str]]:
        return [(moment(one.at), _level(one.level), one.text) for one in found]

    grave = [one for one in known if one.level >= 30]
    made = table(("when", "level", ""), rows(grave)) if grave else element("p", "No warning and no error.")
    made += fold(f"All {len(known)}", table(("when", "level", ""), rows(known)))
    if known.num_left_out:
        made += element("p", f"{known.num_left_out} in the middle are not shown.")
    return made


def _level(level: int) -> str:
    return next((name for least, name in _LEVELS if level >= least), "debug")


def about(run: Run) -> str:
    """Return the sources of the page, and missing parts."""
    made = "".join(element("p", escaped(one), class_="warn") for one in run.problems)
    return made + element("p", f"Made of {', '.join(escaped(one) for one in run.sources)}.", class_="soft")
