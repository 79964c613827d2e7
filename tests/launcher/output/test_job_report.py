"""The report of a job: its last attempt at the top, and all attempts below."""

from __future__ import annotations

import json
import os
import resource
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.job.verdict import HostFailure, Verdict
from dslaunch.launcher.output import job_report
from dslaunch.launcher.output.job_report import (
    BegunAttempt,
    EndedAttempt,
    check_place,
    report_of,
    write_report,
)
from tests.launcher.local_job import WORKER, Job

LOST = HostFailure(host="b", message="lost", at_s=9.0)
FAILED = Verdict(culprit=LOST, others=(), interrupted_by=None, phases_s=(("connected", 0.5),), ran_s=60.0)
WELL = Verdict(culprit=None, others=(), interrupted_by=None, phases_s=(), ran_s=5.0)
FIRST = EndedAttempt(
    number=0,
    hosts=("a", "b"),
    began_at=1.0e9,
    duration_s=61.5,
    verdict=FAILED,
    decision="starting again (1 of 1 restarts); c instead of b (lost)",
)
SECOND = EndedAttempt(number=1, hosts=("a", "c"), began_at=1.0e9 + 62, duration_s=5.0, verdict=WELL)


def test_the_keys_of_the_last_attempt_are_at_the_top() -> None:
    for last in (FIRST, SECOND):
        job_report = report_of((FIRST, last))
        assert {key: job_report[key] for key in job_report if key != "attempts"} == last.verdict.to_dict()


def test_every_attempt_has_its_hosts_its_time_how_it_ended_and_what_was_said_of_the_next() -> None:
    first, second = report_of((FIRST, SECOND))["attempts"]
    began_at = first.pop("began_at")
    assert datetime.fromisoformat(began_at).timestamp() == FIRST.began_at
    assert datetime.fromisoformat(began_at).utcoffset() is not None
    assert first == {
        "number": 0,
        "hosts": ["a", "b"],
        "duration_s": 61.5,
        "exit_code": 3,
        "text": "b: lost",
        "culprit": {
            "kind": "host",
            "text": "b: lost",
            "host": "b",
            "message": "lost",
            "at_s": 9.0,
            "exit_code": 3,
            "is_way_lost": False,
        },
        "others": [],
        "interrupted_by": None,
        "phases_s": {"connected": 0.5},
        "end_s": {},
        "change": None,
        "decision": "starting again (1 of 1 restarts); c instead of b (lost)",
    }
    assert (second["number"], second["hosts"], second["decision"]) == (1, ["a", "c"], "")


def test_an_attempt_that_begins_now_ends_later() -> None:
    begun = BegunAttempt(number=2, hosts=("a",))
    ended = begun.end(WELL, "why")
    assert (ended.number, ended.hosts, ended.verdict, ended.decision) == (2, ("a",), WELL, "why")
    assert ended.began_at == begun.began_at
    assert 0 < ended.duration_s < 60


def test_the_report_is_written_as_json(tmp_path: Path) -> None:
    write_report(tmp_path / "report.json", (FIRST, SECOND), option="--report")
    assert json.loads((tmp_path / "report.json").read_text()) == report_of((FIRST, SECOND))


def test_a_report_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "report.json"
    with pytest.raises(LaunchError) as refused:
        write_report(path, (FIRST,), option="--report")
    assert str(refused.value) == f"--report={path}: cannot be written: No such file or directory"


@pytest.mark.slow
def test_an_attempt_that_cannot_be_made_loses_no_report_of_the_others(tmp_path: Path) -> None:
    worker = """
        for folder in os.listdir('logs'):
            if folder != 'latest': open(f'logs/{folder}/attempt_1', 'w').close()
        sys.exit(3)
    """
    (tmp_path / "train.py").write_text(WORKER + textwrap.dedent(worker))
    words = ["--max_restarts=1", "--min_uptime=0", "--log_dir=logs", "--report=end.json", "train.py"]
    job = Job(tmp_path, words)
    try:
        assert job.wait() == 2, job.err
    finally:
        job.end()
    assert "attempt_1" in job.err
    job_report = json.loads((tmp_path / "end.json").read_text())
    assert [one["exit_code"] for one in job_report["attempts"]] == [3]
    assert json.loads((tmp_path / "logs" / "latest" / "report.json").read_text()) == job_report


def test_a_place_that_cannot_take_a_report_is_refused_before_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "old.json").write_text("{}")
    check_place(tmp_path / "new.json", option="--report")
    check_place(tmp_path / "old.json", option="--report")
    with pytest.raises(LaunchError, match=r"--report=.* is a folder; give the name of a file"):
        check_place(tmp_path, option="--report")
    with pytest.raises(LaunchError, match=r"--report=.*: there is no folder .*nowhere; make it"):
        check_place(tmp_path / "nowhere" / "report.json", option="--report")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(LaunchError, match="you may not write there"):
        check_place(tmp_path / "new.json", option="--report")


def test_only_this_user_reads_the_report_unless_its_folder_was_made_for_others(tmp_path: Path) -> None:
    for mode, expected in ((0o755, 0o600), (0o777, 0o640), (0o1777, 0o600)):
        tmp_path.chmod(mode)
        path = tmp_path / f"{mode:o}.json"
        write_report(path, (SECOND,), option="--report")
        assert path.stat().st_mode & 0o777 == expected


def test_a_report_goes_through_no_link_and_waits_for_no_reader(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("years of work")
    link, pipe = tmp_path / "link.json", tmp_path / "pipe.json"
    link.symlink_to(tmp_path / "precious")
    os.mkfifo(pipe)
    with pytest.raises(LaunchError, match=r"link.json is a symbolic link; give the file itself"):
        check_place(link, option="--report")
    for path, why in ((link, "it is a symbolic link"), (pipe, "it is no regular file")):
        with pytest.raises(LaunchError, match=why):
            write_report(path, (SECOND,), option="--report")
    assert (tmp_path / "precious").read_text() == "years of work"


def test_a_report_may_go_to_what_the_shell_made_of_a_pipe(tmp_path: Path) -> None:
    read, write = os.pipe()
    path = Path(f"/dev/fd/{write}")
    check_place(path, option="--report")
    write_report(path, (SECOND,), option="--report")
    assert json.loads(os.read(read, 1 << 16))["exit_code"] == 0
    os.close(read)
    os.close(write)


@contextmanager
def full_disk() -> Iterator[None]:
    """Files of this process can have a hundred bytes: what is written behind them fails,
    as on a disk that is full.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("before", [[], ["report.json"]])
def test_a_report_that_does_not_fit_on_the_disk_leaves_what_was_there(
    before: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    for name in before:
        (tmp_path / name).write_text("of the last job")
    with full_disk(), pytest.raises(LaunchError) as refused:
        write_report(path, (FIRST,), option="--report")
    assert str(refused.value) == f"--report={path}: cannot be written: File too large"
    assert {one.name: one.read_text() for one in tmp_path.iterdir()} == dict.fromkeys(
        before, "of the last job"
    )


def test_a_report_keeps_the_owner_and_the_permissions_of_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}")
    path.chmod(0o604)
    if os.geteuid() == 0:
        os.chown(path, 1234, 1235)
        os.chown(tmp_path, 1234, -1)
    before = path.stat()
    write_report(path, (FIRST,), option="--report")
    found = path.stat()
    assert (found.st_mode, found.st_uid, found.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert json.loads(path.read_text()) == report_of((FIRST,))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_report_is_not_written_into_a_file_of_another_user(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}")
    os.chown(path, 1234, -1)
    why = f"--report={path}: .*it belongs to the user with number 1234; give another name"
    with pytest.raises(LaunchError, match=why):
        check_place(path, option="--report")
    with pytest.raises(LaunchError, match=why):
        write_report(path, (FIRST,), option="--report")
    os.chown(tmp_path, 1234, -1)
    tmp_path.chmod(0o1777)
    with pytest.raises(LaunchError, match=why):
        write_report(path, (FIRST,), option="--report")
    assert path.read_text() == "{}"


def test_a_report_may_replace_a_file_in_a_folder_that_takes_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}")

    def refuse(name: str, flags: int, mode: int = 0o600) -> int:
        if flags & os.O_CREAT:  # root may write everywhere
            raise PermissionError(13, "Permission denied", name)
        return os.open(name, flags, mode)

    monkeypatch.setattr(job_report, "open_plain", refuse)
    write_report(path, (FIRST,), option="--report")
    assert json.loads(path.read_text()) == report_of((FIRST,))


@pytest.mark.slow
def test_the_code_of_a_job_that_failed_is_its_own_also_without_a_report(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKER + "os.mkdir('end.json'); sys.exit(3)")
    job = Job(tmp_path, ["--report=end.json", "train.py"])
    try:
        assert job.wait() == 3, job.err
    finally:
        job.end()
    assert "--report=end.json: cannot be written: it is no regular file" in job.err
