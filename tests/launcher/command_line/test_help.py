"""`dslaunch --help`, `dslaunch help TOPIC`, and the manual page that is made of the same text."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import click
import pytest

from dslaunch.launcher.command_line import cli, help_topics, man
from dslaunch.launcher.command_line.absent_options import ABSENT
from dslaunch.launcher.command_line.job_help import deepspeed_names, topic_names, topic_options


def _inner(group: str) -> list[str]:
    found: click.Group = import_module(cli.COMMANDS[group], "dslaunch.launcher.command_line").command
    return list(found.commands)


GOLDEN = Path(__file__).parents[1] / "golden"
INNER = [f"help {group} {name}" for group in ("checkpoint", "drop-in") for name in _inner(group)]
DEEPSPEED_NAMES = deepspeed_names(cli.dslaunch)
OPTIONS = [one for one in cli.dslaunch.params if isinstance(one, click.Option)]


def shown(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    told = capsys.readouterr()
    assert (ended.value.code, told.err) == (0, "")
    return told.out


def refused(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(words.split())
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("words", ["-h", "--help", "--hel", "--help t.py", "help"])
def test_the_first_page_fits_on_a_screen(
    words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = shown(words, capsys)
    assert text == (GOLDEN / "help.txt").read_text(), f"\n{text}"
    lines = text.splitlines()
    assert len(lines) <= 46
    assert all(line.isascii() and len(line) <= 80 for line in lines)


HELP = ["help", "help all", *(f"help {name}" for name in cli.COMMANDS), *INNER]


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("words", HELP)
def test_help_is_no_wider_than_the_terminal(
    words: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = shown(words, capsys).splitlines()
    wide = [line for line in lines if len(line) > columns and len(line.split()) > 1]  # a word is not broken
    assert wide == []
    assert all(line == line.rstrip() for line in lines)


def test_on_a_narrow_terminal_an_example_can_be_copied_and_a_list_stays_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = shown("help checkpoint ls", capsys)
    assert "    dslaunch checkpoint ls \\\n        s3://bucket/run1 --json\n" in text
    assert "    damaged  a file is missing or cut\n             off; the line below the\n" in text


def test_the_first_page_names_every_command_and_every_topic(capsys: pytest.CaptureFixture[str]) -> None:
    assert [*cli.COMMANDS] == [*help_topics.COMMANDS, "help"]
    text = shown("--help", capsys)
    assert all(f"\n  {name} " in text for name in help_topics.COMMANDS)
    assert all(name in text.partition("`dslaunch help TOPIC`")[2] for name in topic_names())


def test_every_option_belongs_to_one_topic() -> None:
    named = [name for topic in help_topics.TOPICS for name in topic_options(topic, cli.dslaunch)]
    assert sorted(named) == sorted({one.name or "" for one in OPTIONS} | {"help"})
    assert all(name in named for names in help_topics.FIRST_PAGE.values() for name in names)


def test_help_all_has_every_option_with_a_sentence_below_its_title(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = shown("help all", capsys)
    lines = text.splitlines()
    places = [lines.index(f"{topic.title}:") for topic in help_topics.TOPICS]
    assert places == sorted(places)
    for topic, start, end in zip(help_topics.TOPICS, places, [*places[1:], len(lines)], strict=True):
        section = "\n".join(lines[start:end])
        for option in (one for one in OPTIONS if one.name in topic_options(topic, cli.dslaunch)):
            names = [name for name in option.opts if name not in DEEPSPEED_NAMES]
            does = (option.help or "").split()[0]
            assert re.search(rf"^  {', '.join(names)}( \S+)?\s+{re.escape(does)}", section, re.MULTILINE), (
                names
            )
    for name, ours in DEEPSPEED_NAMES.items():
        assert f"  {name} N " in text
        assert f"The same as {ours}." in text
        assert any(name in one.opts and ours in one.opts for one in OPTIONS)
    assert all(name in text for name in ABSENT)
    assert all(line.isascii() and len(line) <= 120 for line in lines)


@pytest.mark.parametrize("topic", help_topics.TOPICS, ids=lambda topic: topic.name)
def test_a_topic_shows_its_options_and_no_others(
    topic: help_topics.Topic, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(f"help {topic.name}", capsys)
    found = set(re.findall(r"^  (?:-\w, )?(--\w+)", text.partition("that are not here")[0], re.MULTILINE))
    wanted = {one.opts[-1] for one in OPTIONS if one.name in topic_options(topic, cli.dslaunch)} | {"--help"}
    if topic.name == "deepspeed":
        wanted |= set(DEEPSPEED_NAMES)
    wanted = {DEEPSPEED_NAMES.get(name, name) if topic.name != "deepspeed" else name for name in wanted}
    assert found | {"--help"} == {"--tee" if name == "--ranks" else name for name in wanted}


@pytest.mark.parametrize("name", ["check", "checkpoint", "checkpoint verify"])
def test_help_shows_what_a_command_says_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(f"help {name}", capsys) == shown(f"{name} --help", capsys)


def test_env_shows_its_own_options_and_where_the_others_are(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown("env --help", capsys)
    assert len(text.splitlines()) <= 30
    assert "`dslaunch help all`" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("help hosst", "there is no topic 'hosst'; topics are hosts, start,"),
        ("help hosst", "did you mean `dslaunch help hosts`?"),
        ("help chekc", "did you mean `dslaunch help check`?"),
        ("help zzzz", "write one of these, or a command"),
        ("help hosts output", "one topic at a time; write: dslaunch help hosts"),
        ("help check verify", "dslaunch check has no commands of its own; write: dslaunch help check"),
        ("help checkpoint verfy", "dslaunch checkpoint has no command 'verfy'; did you mean verify?"),
        ("hlep", "did you mean `dslaunch help`?"),
        ("report-evn", "did you mean `dslaunch report-env`?"),
    ],
)
def test_what_there_is_no_help_for_is_a_mistake_with_a_hint(
    words: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(words, capsys)


@pytest.mark.slow
def test_the_manual_page_is_what_groff_reads_without_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    groff = shutil.which("groff")
    if groff is None:
        pytest.skip("no groff here")
    page = shown("man", capsys)
    done = subprocess.run(
        [groff, "-man", "-Tascii", "-ww", "-P-cbou", "-rLL=100n"],
        input=page,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[0] == f"DSLAUNCH(1){'User Commands':^78}DSLAUNCH(1)".strip() or "User Commands" in lines[0]
    for option in OPTIONS:
        assert any(line.startswith(option.opts[0]) for line in lines), option.opts
        assert " ".join((option.help or "").split()[:4]) in done.stdout
    for name, module in cli.COMMANDS.items():
        found: click.Command = import_module(module, "dslaunch.launcher.command_line").command
        assert f"DSLAUNCH {name.upper()}" in lines
        assert any(line.startswith(f"dslaunch {name} ") for line in lines)
        assert not isinstance(found, click.Group) or all(
            f"DSLAUNCH {name.upper()} {one.upper()}" in lines for one in found.commands
        )
    # A line that is kept as it is: its signs and spaces, too.
    assert '~/.bashrc                    eval "$(dslaunch completion bash)"' in lines
    assert any(line.startswith("{host}:{rank} |'") or "'{host}:{rank} |'" in line for line in lines)


def test_the_manual_page_has_only_requests_that_it_means(capsys: pytest.CaptureFixture[str]) -> None:
    """Also where there is no groff: a line of text that begins like a request would vanish."""
    lines = shown("man", capsys).splitlines()
    requests = {line.split()[0] for line in lines if line.startswith((".", "'"))}
    assert requests == {".TH", ".SH", ".SS", ".TP", ".PP", ".B", ".BR", ".br", ".nf", ".fi", ".nh", ".ad"}
    assert lines.count(".nf") == lines.count(".fi")
    escapes = {found for line in lines for found in re.findall(r"\\(?:\(..|.)", line)}
    assert escapes <= {r"\-", r"\e", r"\&", r"\(aq", r"\(ga", r"\(ha", r"\(ti"}


@pytest.mark.parametrize(
    ("line", "written"),
    [
        (".deepspeed_env is read", r"\&.deepspeed_env is read"),
        ("'a' or \\b", r"\(aqa\(aq or \eb"),
        ("a --b `c` ~/d^e", r"a \-\-b \(gac\(ga \(ti/d\(hae"),
    ],
)
def test_a_line_of_text_is_no_request_and_keeps_its_signs(line: str, written: str) -> None:
    assert man._roff(line) == written
