"""The messages that the guide explains are those that the program says."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from dslaunch.launcher.job.verdict import (
    HostFailure,
    LauncherFailure,
    OutputFailure,
    RankFailure,
    Verdict,
    verdict_of,
)
from dslaunch.launcher.output.job_report import BegunAttempt, report_of

CHECKOUT = Path(__file__).resolve().parents[2]
GUIDE = "".join((CHECKOUT / "docs" / "launch" / name).read_text() for name in ("failures.md", "messages.md"))
GAP = "\0"  # in a message, where a value stands


def spoken(source: str) -> list[str]:
    """Every text in a program, as it is spoken: parts in a row together, values left out."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(_part(one) for one in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, bytes):
            found.append(re.sub("%[sd]", GAP, node.value.decode("latin-1")))
    return found


def _part(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else GAP


SAID_WITH = ("LaunchError", "Unprepared", "UsageError", "BadParameter", "refusal", "warn")  # to people


def raised(source: str) -> list[str]:
    """The texts of errors and warnings, each as a whole."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        texts = [text for one in node.args[:1] for text in _texts(one)]
        if name in SAID_WITH:  # code that refuses a line of a hostfile adds an example to it
            found += [f"{text}; write e.g. {GAP}" if name == "refusal" else text for text in texts]
    return found


def _texts(node: ast.expr) -> list[str]:
    if isinstance(node, ast.JoinedStr):
        return ["".join(_part(one) for one in node.values)]
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body), *_texts(node.orelse)]
    if isinstance(node, ast.BinOp):
        return ["".join("".join(_texts(side)) or GAP for side in (node.left, node.right))]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


DROP_IN = CHECKOUT / "package" / "dslaunch" / "drop_in"
FILES = [*sorted((CHECKOUT / "launcher").rglob("*.py")), DROP_IN / "installation.py", DROP_IN / "seen.py"]


@cache
def spoken_anywhere() -> list[str]:
    return [text for path in FILES for text in spoken(path.read_text())]


def explained() -> list[str]:
    """The first cell of every row of the tables of messages; `...` stands for a value."""
    rows = []
    for table in re.findall(r"\| message \| cause .*?(?=\n\n|\Z)", GUIDE, re.DOTALL):
        rows += [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    return [message for row in rows for message in re.findall("`([^`]+)`", row)]


def pattern_of(message: str) -> re.Pattern[str]:
    parts = [part.strip() for part in message.split("...") if part.strip()]
    assert parts
    return re.compile(".*".join(map(re.escape, parts)), re.DOTALL)


def test_a_text_is_read_with_its_values_left_out() -> None:
    assert "a \0 b" in spoken('x = f"a {y} " f"b"')
    assert "cannot run \0: \0" in spoken('x = b"cannot run %s: %s"')


def test_there_are_many_messages() -> None:
    assert len(explained()) > 50
    assert len(set(explained())) == len(explained())


@pytest.mark.slow
@pytest.mark.parametrize("message", explained())
def test_an_explained_message_is_one_that_the_program_says(message: str) -> None:
    pattern = pattern_of(message)
    assert any(pattern.search(text) for text in spoken_anywhere()), f"no command says {message!r}"


@pytest.mark.parametrize("name", sorted(str(path.relative_to(CHECKOUT)) for path in FILES))
def test_every_error_and_warning_is_explained(name: str) -> None:
    rows = [pattern_of(message) for message in explained()]
    missing = [
        text
        for text in raised((CHECKOUT / name).read_text())
        if not any(row.search(text) for row in rows)
        and text.strip(GAP + ": ;")  # only values: said elsewhere
    ]
    assert missing == []


def test_every_key_of_the_report_is_explained() -> None:
    verdict = verdict_of([], stopped_at=None, interrupted_by=None, phases_s={})
    report = report_of((BegunAttempt(hosts=("w",)).end(verdict),))
    assert {f"`{key}`" for key in report} <= set(re.findall(r"^\| (`\w+`) \|", GUIDE, re.MULTILINE))
    assert all(f"`{key}`" in GUIDE for key in report["attempts"][0])
    for kind in (RankFailure, HostFailure, OutputFailure):
        for field in kind._fields:
            assert f"`{field}`" in GUIDE, f"{kind.__name__}.{field}"


def test_the_report_names_its_kinds() -> None:
    failures = (
        RankFailure(rank=0, local_rank=0, host="w", pid=1, code=139, signal=11, at_s=1.0),
        HostFailure(host="w", message="m", at_s=1.0),
        OutputFailure(message="m", at_s=1.0, exit_code=2),
        LauncherFailure(message="m", at_s=1.0),
    )
    report = Verdict(culprit=None, others=failures, interrupted_by=None, phases_s=()).to_dict()
    assert [one["kind"] for one in report["others"]] == ["rank", "host", "output", "launcher"]
    assert report["others"][0]["signal_name"] == "SIGSEGV (11)"
    assert all(f'`"{one["kind"]}"`' in GUIDE for one in report["others"])
