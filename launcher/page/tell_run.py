"""What a page says of a run in words and tables."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..inputs.host_list import folded
from ..run_state.values import mapping, number, text, texts, whole_or
from ..wording import count, shown_size, shown_time
from .chart import by_number, said, shown
from .markup import element, escaped, fold, lines_of, moment, pairs, table, tree
from .run import Attempt, HostFacts, Run

MAX_HOSTS = 400  # rows of the table
MAX_FAILURES = 20  # told in full
CAUSES = {
    "compute": "its own computing takes longer",
    "data": "it waits for its data",
    "link": "its link is slow",
}


def state_of(run: Run) -> tuple[str, str]:
    """How the run is, in a few words, and the class of their color."""
    code = run.exit_code
    if code is None:
        if run.state:
            return run.state, "warn"
        return "not ended, as far as this file says", "warn"
    if code == 0:
        return "ended well", "good"
    last = run.last_attempt
    if last is not None and last.ended is not None:
        if last.ended.get("interrupted_by"):
            return f"interrupted by {text(last.ended['interrupted_by'])}", "warn"
        if last.ended.get("change"):
            return "saved and ended for a change of hosts", "warn"
    return f"failed with exit code {code}", "bad"


def facts(run: Run) -> str:
    """The most important numbers."""
    last = run.last_attempt
    rows = [
        ("exit code", "none yet" if run.exit_code is None else str(run.exit_code)),
        ("time", shown_time(run.duration_s)),
        ("hosts", str(len(last.hosts)) if last else ""),
        ("ranks", str(run.num_ranks or "")),
        ("attempts", str(len(run.attempts) or "")),
        ("steps", shown_steps(run)),
        ("rate", _rate(run)),
        ("last loss", "" if run.last_loss is None else said(run.last_loss)),
    ]
    cells = "".join(
        element("div", element("dt", escaped(name)) + element("dd", escaped(value)))
        for name, value in rows
        if value
    )
    return element("dl", cells, class_="facts")


def shown_steps(run: Run) -> str:
    """Those that were done, of as many as the program says."""
    done, total = shown(run.step), shown(run.total_steps)
    return f"{done} of {total}" if done and total else done


def mean_rate(run: Run) -> float:
    """Steps a second while there were steps, NaN if there were none."""
    return run.stepped / run.stepped_s if run.stepped_s else math.nan


def _rate(run: Run) -> str:
    rate = mean_rate(run)
    if math.isnan(rate):
        return ""
    return f"{shown(rate, 3)} steps/s" if rate >= 0.5 or rate == 0 else f"{shown(1 / rate, 3)} s/step"


def command(run: Run) -> str:
    """What was typed, where, by whom, and with which version."""
    job = run.job
    words = texts(job.get("command"))
    rows: list[tuple[str, str]] = []
    if words:
        rows.append(("command", element("code", escaped(shlex.join(words), 20_000))))
    for name, key in (
        ("in folder", "cwd"),
        ("name", "name"),
        ("user", "user"),
        ("on", "host"),
        ("launcher", "launcher"),
    ):
        if text(job.get(key)):
            rows.append((name, escaped(text(job[key]))))
    if text(job.get("version")):
        rows.append(("dslaunch", escaped(text(job["version"]))))
    rows.append(("began", escaped(moment(run.began_at))))
    rows.append(("last heard of" if run.exit_code is None else "ended", escaped(moment(run.last_at))))
    last = run.last_attempt
    if last is not None and last.hosts:
        rows.append(("hosts", escaped(folded(last.hosts))))
    if last is not None and last.log_folder:
        rows.append(("log files", element("code", escaped(last.log_folder))))
    return pairs(rows)


def configuration(run: Run) -> str:
    """The configuration as it took effect, of rank 0, and where other ranks had another one."""
    if not run.configs:
        return ""
    first = min(run.configs)
    found = run.configs[first]
    made = element("div", tree(found), class_="config")
    others = [rank for rank in sorted(run.configs) if rank != first and run.configs[rank] != found]
    if others:
        rows = [
            (name, a, b, f"rank {rank}")
            for rank in others[:8]
            for name, a, b in differences(found, run.configs[rank])
        ]
        made += table(
            ("key", f"rank {first}", "differs", "on"), rows[:200], caption="Ranks that have it otherwise"
        )
    return made


def differences(a: Any, b: Any) -> list[tuple[str, str, str]]:
    """Keys in which two configurations differ, and both values; empty for what one does not have."""
    from .markup import as_value

    left, right = flat(a), flat(b)
    names = [*left, *(name for name in right if name not in left)]
    return [
        (name, as_value(left[name]) if name in left else "", as_value(right[name]) if name in right else "")
        for name in names
        if name not in left or name not in right or left[name] != right[name]
    ]


def flat(value: Any, prefix: str = "", depth: int = 0) -> dict[str, Any]:
    """Each value by its path: `zero_optimization.stage`."""
    if isinstance(value, Mapping) and value and depth < 20:
        found: dict[str, Any] = {}
        for name, one in value.items():
            found.update(flat(one, f"{prefix}.{name}" if prefix else str(name), depth + 1))
        return found
    return {prefix or "(all)": value}


def attempts(run: Run) -> str:
    """A table of all starts, and below it each failure in full."""
    if not run.attempts:
        return ""
    rows = []
    for _, one in sorted(run.attempts.items())[:MAX_HOSTS]:
        ended = one.ended or {}
        rows.append(
            (
                str(one.number + 1),
                moment(one.began_at),
                shown_time(max(0.0, (one.ended_at or one.last_at) - one.began_at)),
                f"{len(one.hosts)}: {folded(one.hosts)}" if one.hosts else "",
                _how(one),
                text(ended.get("decision")),
            )
        )
    made = table(("attempt", "began", "took", "hosts", "how it ended", "what was decided"), rows)
    failures = [
        one for _, one in sorted(run.attempts.items()) if one.ended is not None and one.ended.get("culprit")
    ]
    shown_ones = failures if len(failures) <= MAX_FAILURES else [*failures[:3], *failures[3 - MAX_FAILURES :]]
    made += "".join(failure(one) for one in shown_ones)
    if len(failures) > len(shown_ones):
        made += element("p", f"{len(failures) - len(shown_ones)} further failures are not shown in full.")
    return made


def _how(one: Attempt) -> str:
    if one.ended is None:
        return "has not ended"
    culprit = mapping(one.ended.get("culprit"))
    if culprit:
        return culprit_words(culprit)
    if one.ended.get("interrupted_by"):
        return f"interrupted by {text(one.ended['interrupted_by'])}"
    if one.ended.get("change"):
        return text(one.ended["change"])
    return f"exit code {one.ended.get('exit_code')}"


def culprit_words(culprit: Mapping[str, Any]) -> str:
    """A sentence on what failed."""
    if culprit.get("kind") != "rank":
        host = text(culprit.get("host"))
        message = text(culprit.get("message"))
        return f"{host}: {message}" if host else message or "unknown"
    place = f" ({text(culprit.get('place'))})" if culprit.get("place") else ""
    how = (
        f"was killed by {text(culprit.get('signal_name')) or culprit.get('signal')}"
        if culprit.get("signal")
        else f"exited with code {culprit.get('code')}"
    )
    return f"rank {culprit.get('rank')} on {culprit.get('host')}{place} {how}"


def failure(one: Attempt) -> str:
    """What failed first, the evidence, its traceback or last lines, and what failed with it."""
    ended = one.ended or {}
    culprit = mapping(ended.get("culprit"))
    made = element("h3", escaped(f"Attempt {one.number + 1}: {culprit_words(culprit)}"))
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
    others = ended.get("others")
    others = [mapping(other) for other in others] if isinstance(others, list) else []
    if others:
        inner = table(("also failed",), [(culprit_words(other),) for other in others[:100]])
        made += fold(f"{count(len(others), 'other failure')} before the job was told to stop", inner)
    if one.exits:
        rows = [
            (
                f"{row['at'] - one.began_at:.2f} s",
                f"rank {row.get('rank')}",
                text(row.get("host")),
                _ending(row),
            )
            for row in one.exits[:200]
        ]
        made += fold(
            f"How {count(len(one.exits), 'worker')} ended", table(("after", "rank", "host", ""), rows)
        )
    return element("div", made, class_="failure")


def _ending(row: Mapping[str, Any]) -> str:
    return f"signal {row['signal']}" if row.get("signal") else f"code {row.get('code')}"


def stragglers(run: Run) -> str:
    """Who others waited for: together by rank and cause, and each time."""
    if not run.stragglers:
        return ""
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for one in run.stragglers:
        key = str(one.get("rank", "")), text(one.get("host")), text(one.get("cause"))
        groups.setdefault(key, []).append(one)
    rows = []
    for (rank, host, cause), found in sorted(groups.items(), key=lambda item: -len(item[1]))[:100]:
        shares = [value for one in found if (value := number(one.get("share"))) is not None]
        rows.append(
            (
                rank,
                host,
                CAUSES.get(cause, cause),
                str(len(found)),
                f"{100 * max(shares):.0f} %" if shares and math.isfinite(max(shares)) else "",
                moment(found[0]["at"]),
                moment(found[-1]["at"]),
                moment(found[-1].get("over_at", 0.0)) or "not known to be over",
            )
        )
    made = table(
        ("rank", "host", "cause", "times", "of a step, at most", "first", "last", "well again"), rows
    )
    each = [
        (moment(one["at"]), text(one.get("text")) or str(one.get("rank"))) for one in run.stragglers[:200]
    ]
    made += fold("Each time", table(("when", ""), each))
    if run.num_stragglers_left_out:
        made += element("p", f"{run.num_stragglers_left_out} later ones are not shown.")
    return made


def hangs(run: Run) -> str:
    """What watchdogs told, and what ranks did when somebody asked."""
    made = ""
    for one in run.hangs[:50]:
        title = f"{moment(one['at'])}: rank {one.get('rank')} told of a collective that takes too long"
        made += fold(title, lines_of(text(one.get("report")).splitlines()))
    for one in run.stacks[:50]:
        made += fold(
            f"{moment(one['at'])}: {text(one.get('title'))[:300]}", lines_of(texts(one.get("lines")), 2000)
        )
    return made


def hosts(run: Run) -> str:
    """What is known of each host."""
    if not run.hosts:
        return ""
    rows = []
    for host, found in sorted(run.hosts.items(), key=lambda one: by_number(one[0]))[:MAX_HOSTS]:
        rows.append((host, *_host_row(found)))
    head = (
        *("host", "cores", "memory", "cpu, mean", "memory, most", "network in, mean", "out, mean"),
        *("GPUs", "GPU, mean", "GPU memory, most", "hottest", "ECC errors"),
    )
    left_out = len(run.hosts) - len(rows)
    empty = {place for place in range(len(head)) if all(not row[place] for row in rows)}
    made = table(
        [name for place, name in enumerate(head) if place not in empty],
        [[cell for place, cell in enumerate(row) if place not in empty] for row in rows],
        numbers=True,
    )
    return made + (element("p", f"{left_out} further hosts are not shown.") if left_out else "")


def _host_row(found: HostFacts) -> tuple[str, ...]:
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
        size(found.most.get("gpu_mem")),
        f"{found.most['gpu_temp']:.0f} °C" if "gpu_temp" in found.most else "",
        shown(found.last["gpu_errors"]) if "gpu_errors" in found.last else "",
    )


_LEVELS = ((40, "error"), (30, "warning"), (20, "info"), (0, "debug"))


def notes(run: Run) -> str:
    """What dslaunch said."""
    if not run.notes:
        return ""

    def rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
        return [(moment(one["at"]), _level(whole_or(one["level"])), text(one["text"])) for one in found]

    grave = [one for one in run.notes if one["level"] >= 30]
    made = table(("when", "level", ""), rows(grave)) if grave else element("p", "No warning and no error.")
    made += fold(f"All {len(run.notes)}", table(("when", "level", ""), rows(run.notes)))
    if run.num_notes_left_out:
        made += element("p", f"{run.num_notes_left_out} in the middle are not shown.")
    return made


def _level(level: int) -> str:
    return next((name for least, name in _LEVELS if level >= least), "debug")


def about(run: Run) -> str:
    """What the page was made of, and what is missing."""
    made = "".join(element("p", escaped(one), class_="warn") for one in run.problems)
    return made + element("p", f"Made of {', '.join(escaped(one) for one in run.sources)}.", class_="soft")
