"""dslaunch gives what is right for every report, or says by name why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exhaustive import few
from tests.field import judge, page, run
from tests.field.reports import CLUSTERS, REPORTS, Report
from tests.field.verdict import verdict


@pytest.mark.slow
@pytest.mark.parametrize("report", few(REPORTS, lambda report: report.is_fast), ids=lambda report: report.id)
def test_dslaunch_gives_what_is_right(report: Report, tmp_path: Path) -> None:
    done = run.run(report.program, report.launches, "dslaunch", tmp_path, limit_s=report.limit_s)
    status, given = verdict(report, done)
    assert status == report.dslaunch, f"{given}\n{done.output[-3000:]}"


def test_the_page_is_that_of_the_table_and_the_results() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.text(page.load())


def test_every_report_has_a_program_and_results_of_its_own() -> None:
    assert len({report.id for report in REPORTS}) == len(REPORTS)
    assert {report.cluster for report in REPORTS} <= set(CLUSTERS)
    programs = {path.stem for path in run.PROGRAMS.glob("*.py")}
    assert {report.program for report in REPORTS} == programs
    given = {id: tools["dslaunch"].status for id, tools in page.load().items()}
    assert given == {report.id: report.dslaunch for report in REPORTS}


def test_facts_are_found_behind_a_prefix() -> None:
    lines = 'localhost:1 | {"rank": 1, "losses": [0.5]}\n{"other": 1}\n{"rank": 0}\n'
    assert run.facts_in(lines) == [{"rank": 1, "losses": [0.5]}, {"rank": 0}]


@pytest.mark.parametrize(
    ("judged", "facts", "code", "fault"),
    [
        (judge.ends, [{"rank": 0}], 0, ""),
        (judge.ends, [{"rank": 0}], None, "no end within 5 s"),
        (judge.ends, [], 1, "exit code 1: ValueError: one.py: no"),
        (judge.ends, [], 0, "no rank printed anything"),
        (judge.agree("a", "b"), [{"a": [1.0, 2.0], "b": [1.0, 2.00001]}], 0, ""),
        (judge.agree("a", "b"), [{"a": [1.0], "b": [1.01]}], 0, "a 1 instead of 1.01"),
        (judge.agree("a", "b"), [{"a": [None], "b": [1.0]}], 0, "a None instead of 1"),
        (judge.agree("a", "b"), [{"a": [1.0, 1.0], "b": [1.0]}], 0, "a 1, 1 instead of 1"),
        (judge.is_equal("lost", []), [{"lost": []}, {"lost": ["x"]}], 0, "lost x instead of nothing"),
        (judge.at_most("a", "b"), [{"a": 2.0, "b": 1.0}], 0, "a 2, more than 1"),
        (judge.fails, [], 0, "exit code 0"),
        (judge.fails, [], 7, ""),
        (judge.refuses("hosts"), [{"rank": 0}], 0, "1 ranks were started on this machine"),
        (judge.refuses("one.py"), [], 1, ""),
    ],
)
def test_a_judge_says_what_is_not_right(
    judged: judge.Judge, facts: list[dict[str, object]], code: int | None, fault: str
) -> None:
    output = "[rank0]: Traceback\n[rank0]:     raise ValueError\n[rank0]: ValueError: /a/one.py: no\n"
    done = run.Run(tool="dslaunch", code=code, limit_s=5.0, output=output, facts=facts)
    assert judged(done) == fault
