"""The page of a run, and of two runs beside each other."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import figures, tell_run
from .chart import Chart
from .compare_runs import RunComparison
from .draw_run import RunCharts
from .markup import element, escaped, fold, table
from .run import Run

GENERATOR = "dslaunch report"  # marks a page of ours
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """A part of the page; without text and charts it is left out."""

    key: str
    title: str
    text: str = ""
    charts: list[Chart] = field(default_factory=list)
    is_wide: bool = False


def page_of(run: Run) -> str:
    """Return the page of one run."""
    charts = RunCharts(run)
    words, kind = tell_run.state_of(run)
    sections = [
        PageSection(
            key="summary",
            title="Summary",
            text=tell_run.facts(run) + tell_run.command(run),
            charts=charts.time_line(),
            is_wide=True,
        ),
        PageSection(key="training", title="Training", charts=charts.training()),
        PageSection(key="times", title="Where the time goes", charts=charts.times()),
        PageSection(key="spent", title="What the time was spent on", text=tell_run.spent(run)),
        PageSection(key="stragglers", title="Stragglers", text=tell_run.stragglers(run)),
        PageSection(key="memory", title="Memory", charts=charts.memory()),
        PageSection(key="starts", title="Starts", charts=charts.starts(), is_wide=True),
        PageSection(key="attempts", title="Attempts and failures", text=tell_run.attempts(run)),
        PageSection(key="hangs", title="Hangs and stacks", text=tell_run.hangs(run)),
        PageSection(
            key="hosts",
            title="Hosts",
            text=tell_run.servers(run) + tell_run.hosts(run),
            charts=charts.hosts(),
        ),
        PageSection(key="output", title="Output", charts=charts.output()),
        PageSection(key="config", title="Configuration", text=tell_run.configuration(run)),
        PageSection(key="notes", title="Notes of dslaunch", text=tell_run.notes(run)),
        PageSection(key="about", title="About this page", text=tell_run.about(run)),
    ]
    if not run.state.has_numbers:
        hint = (
            "This job told no numbers of its training. An engine of dslaunch does so by itself; another "
            "program calls dslaunch.report(step=..., loss=...)."
        )
        sections[1:1] = [PageSection(key="no-numbers", title="Training", text=element("p", escaped(hint)))]
    head = element("h1", escaped(run.name)) + element("span", escaped(words), class_=f"state {kind}")
    return document(f"{run.name}: {words}", head, sections)


def comparison_page(a: Run, b: Run) -> str:
    """Return a page of two runs beside each other."""
    both = RunComparison(a, b)
    sections = [
        PageSection(
            key="summary", title="Summary", text=table(("", *both.names), both.summary(), numbers=False)
        ),
        PageSection(key="differs", title="What differs", text=_differences(both)),
        PageSection(key="curves", title="Over steps", charts=both.over_steps()),
        PageSection(key="time", title="Over time", charts=both.over_time()),
        PageSection(key="equal-steps", title="At equal steps", text=_at_equal_steps(both)),
        PageSection(
            key="about",
            title="About this page",
            text="".join(
                element("h3", escaped(name)) + tell_run.about(run)
                for name, run in zip(both.names, (a, b), strict=True)
            ),
        ),
    ]
    title = f"{both.names[0]} and {both.names[1]}"
    return document(title, element("h1", escaped(title)), sections)


def _differences(both: RunComparison) -> str:
    rows = both.differences()
    if not rows:
        return element("p", "Nothing: command, versions, hosts and configuration are equal.")
    return table(("", *both.names), rows)


def _at_equal_steps(both: RunComparison) -> str:
    made = ""
    for name, rows in both.at_equal_steps():
        made += fold(
            name, table(("step", *both.names, "difference"), rows, numbers=True), is_open=name == "loss"
        )
    return made


def document(title: str, head: str, sections: Sequence[PageSection]) -> str:
    """Return everything in one file: no address in it is loaded, and no program runs but our own."""
    shown = [one for one in sections if one.text or one.charts]
    charts = [chart for one in shown for chart in one.charts]
    program, places = figures.drawn(charts)
    scripts = [figures.library(), program, _file("page.js")] if charts else [_file("page.js")]
    scripts = [one.replace("</", "<\\/") for one in scripts]
    allowed = " ".join(f"'sha256-{_digest(one)}'" for one in scripts)
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "font-src data:; base-uri 'none'; form-action 'none'"
    )
    links = "".join(
        element("a", escaped(one.title), href=f"#{one.key}") for one in shown if one.key != "no-numbers"
    )
    body = (
        element("header", head + '<button id="theme" type="button">Dark</button>')
        + element("nav", links, aria_label="Sections")
        + element("main", "".join(_section(one, places.__getitem__) for one in shown))
    )
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="generator" content="{GENERATOR}">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escaped(title, 300)}</title><style>{_file('page.css')}</style></head>\n"
        f"<body>{body}\n"
        f"{''.join(f'<script>{one}</script>' for one in scripts)}</body></html>\n"
    )


def _section(section: PageSection, place_of: Callable[[str], str]) -> str:
    charts = "".join(_chart(one, place_of(one.key)) for one in section.charts)
    if charts and not section.is_wide:
        charts = element("div", charts, class_="two")
    inner = element("h2", escaped(section.title)) + section.text + charts
    return element("section", inner, id=section.key)


def _chart(chart: Chart, place: str) -> str:
    caption = element("figcaption", escaped(chart.title))
    picture = element(
        "div", place, class_="chart", data_key=chart.key, role="group", aria_label=chart.summary
    )
    words = element("p", escaped(chart.summary), class_="soft")
    numbers = fold("The numbers", table(chart.head, chart.rows, caption=chart.title, numbers=True))
    return element("figure", caption + picture + words + numbers)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _file(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
