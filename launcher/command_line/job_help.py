"""The help of `dslaunch` itself: a first page, and every option by topic."""

from __future__ import annotations

from collections.abc import Sequence

import click

from ..options.option import JobOption
from .absent_options import ABSENT
from .help_topics import COMMANDS, FIRST_PAGE, TOPICS, Topic
from .prefix_command import option_records, write_groups

EXAMPLES = """
\b
Examples:
  dslaunch train.py --deepspeed --deepspeed_config ds_config.json
  dslaunch -H hosts --num_nodes 2 train.py --epochs 3
"""


def topic_names() -> tuple[str, ...]:
    """Words that `dslaunch help` takes, beside the commands."""
    return (*(one.name for one in TOPICS), "all")


def write_first_page(formatter: click.HelpFormatter, ctx: click.Context, job: click.Command) -> None:
    """Write at most 40 lines at 80 columns: common options, the commands, and where the rest is."""
    formatter.write_usage("dslaunch", "[OPTIONS] SCRIPT [ARGS]...")
    formatter.write_usage("dslaunch", "COMMAND ...", prefix="       ")
    job.format_help_text(ctx, formatter)
    write_groups(formatter, job_records(ctx, job), FIRST_PAGE)
    _write_text(formatter, EXAMPLES)
    with formatter.section("Commands, each with a --help of its own"):
        formatter.write_dl(list(COMMANDS.items()))
    topics = ", ".join(topic_names()[:-1])
    _write_text(formatter, f"All options: `dslaunch help TOPIC` for {topics}, or all.")


def write_topics(
    formatter: click.HelpFormatter, ctx: click.Context, job: click.Command, topics: Sequence[Topic]
) -> None:
    """Write every option of these topics, and their texts."""
    records = job_records(ctx, job)
    for topic in topics:
        with formatter.section(topic.title):
            formatter.write_dl(topic_records(topic, job, records))
        if topic.name == "deepspeed":
            with formatter.section("Options of other launchers that are not here"):
                formatter.write_dl(absent_records())
        if topic.text:
            _write_text(formatter, topic.text)


def job_records(ctx: click.Context, job: click.Command) -> dict[str, tuple[str, str]]:
    """Return option_records() without the names that only DeepSpeed's scripts use."""
    records = option_records(ctx, job)
    for name, (written, does) in records.items():
        for other in deepspeed_names(job):
            written = written.replace(f", {other}", "")
        records[name] = (written, does)
    return records


def deepspeed_names(job: click.Command) -> dict[str, str]:
    """DeepSpeed's names of options, each with our name of the same option; the topic of DeepSpeed lists
    them.
    """
    return {one.deepspeed: one.opts[0] for one in job.params if isinstance(one, JobOption) and one.deepspeed}


def topic_options(topic: Topic, job: click.Command) -> tuple[str, ...]:
    """Parameter names of the topic's options, in the order in which the command declares them."""
    named = [one.name or "" for one in job.params if isinstance(one, JobOption) and one.topic == topic.name]
    return (*named, "help") if topic.name == "information" else tuple(named)


def topic_records(
    topic: Topic, job: click.Command, records: dict[str, tuple[str, str]]
) -> list[tuple[str, str]]:
    """Return each option of the topic as it is written, with its help."""
    found = [records[name] for name in topic_options(topic, job)]
    if topic.name == "deepspeed":
        found += [(f"{name} N", f"The same as {ours}.") for name, ours in deepspeed_names(job).items()]
    return found


def absent_records() -> list[tuple[str, str]]:
    """Return other launchers' options, grouped by advice: the names of a group, and its advice."""
    names_of: dict[str, list[str]] = {}
    for name, advice in ABSENT.items():
        names_of.setdefault(advice, []).append(name)
    return [(", ".join(names), advice) for advice, names in names_of.items()]


def _write_text(formatter: click.HelpFormatter, text: str) -> None:
    formatter.write_paragraph()
    with formatter.indentation():
        formatter.write_text(text.strip("\n"))
