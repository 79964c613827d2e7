"""The hosts beside those of a job that runs: what the hostfile names now, and which were tried and how often.

Hosts answer as the test says; tests/launcher/jobs/test_ssh_elastic.py has real ones.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.fleet.trial import Trial
from dslaunch.launcher.job.verdict import HostFailure, Verdict
from dslaunch.launcher.options import Options
from dslaunch.launcher.options.elastic import ElasticOptions
from dslaunch.launcher.options.restart import RestartOptions
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.run import host_watch
from dslaunch.launcher.run.host_watch import Hosts
from dslaunch.launcher.run.make_plan import choose_attempt
from tests.launcher.memory_host import HELLO

WITHIN_S = 20.0


class Pool:
    """A hostfile, and hosts that answer or do not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.err = io.BytesIO()
        self.why_not: dict[str, str] = {}
        self.machine: dict[str, str] = {}
        self.tried: list[str] = []

    def write(self, *lines: str) -> None:
        self.path.write_text("".join(f"{line}\n" for line in lines))

    def watch(self, **fields: Any) -> Hosts:
        options = Options(
            program="train.py",
            hostfile=str(self.path),
            restart=RestartOptions(max_nodes=3, min_nodes=1),
            elastic=ElasticOptions(is_on=True),
        )._replace(**fields)
        console = Console(log_level="info", out=io.BytesIO(), err=self.err)
        first = choose_attempt(options, console)
        hosts = Hosts(options, first, console)
        hosts.begin(first)
        self.first = first
        self.console = console
        return hosts

    def answer(self, nodes: Any, *_: object, **__: object) -> dict[int, Trial]:
        self.tried += [node.host.name for node in nodes]
        found = {}
        for node in nodes:
            name = node.host.name
            why = self.why_not.get(name, "")
            hello = (
                None if why == "down" else HELLO._replace(machine=self.machine.get(name, ""), num_devices=3)
            )
            found[node.node_rank] = Trial(hello, why)
        return found


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pool:
    made = Pool(tmp_path / "hosts")
    monkeypatch.setattr(host_watch, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(host_watch, "TRY_AGAIN_S", 0.01)
    monkeypatch.setattr(host_watch, "try_hosts", made.answer)
    return made


def until(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lost(name: str) -> Verdict:
    return Verdict(HostFailure(name, "lost", 1.0), (), None, (), 100.0)


def test_a_line_that_is_added_and_one_that_is_removed(pool: Pool) -> None:
    pool.write("a slots=2", "b slots=2")
    hosts = pool.watch()
    assert hosts.why_change({}) == ""
    pool.write("a slots=2", "b slots=2", "c slots=1", "d slots=1")
    until(lambda: hosts.why_change({}) in ("c is new in the hostfile", "d is new in the hostfile"))
    pool.write("b slots=2")
    until(lambda: hosts.why_change({}) == "a is no longer in the hostfile")
    hosts.end(None)


def test_why_a_new_host_cannot_be_used_yet_is_said_once(pool: Pool) -> None:
    pool.write("a slots=2")
    pool.why_not["b"] = "down"
    hosts = pool.watch()
    pool.write("a slots=2", "b slots=2")
    until(lambda: pool.tried.count("b") > 2)
    pool.why_not.clear()
    until(lambda: hosts.why_change({}) == "b is new in the hostfile")
    hosts.end(None)
    pool.console.drain()
    said = b"warning: b is new in the hostfile, and cannot be used yet: down; it is tried again"
    assert pool.err.getvalue().count(said) == 1
    assert b"cannot be used" not in pool.err.getvalue().replace(said, b"")


def test_a_broken_hostfile_is_said_once_and_changes_nothing(pool: Pool) -> None:
    pool.write("a slots=2", "b slots=2")
    hosts = pool.watch()
    for text in ("a slots=oops\n", "a slots=oops\n\n", ""):
        pool.path.write_text(text)
        until(lambda: b"is not used as it is now" in pool.err.getvalue())
        time.sleep(0.1)
    pool.path.unlink()
    until(lambda: b"this hostfile cannot be read" in pool.err.getvalue())
    assert hosts.why_change({}) == ""
    hosts.end(None)
    pool.console.drain()
    assert pool.err.getvalue().count(b"slots=oops") == 1


def test_a_lost_host_is_tried_less_and_less_often_until_it_answers(pool: Pool) -> None:
    pool.write("a slots=1", "b slots=1", "c slots=1")
    hosts = pool.watch()
    time.sleep(0.1)
    assert pool.tried == [], "all that are wanted take part"
    hosts.end(lost("b"))
    pool.why_not["b"] = "down"
    hosts.begin(pool.first._replace(hosts=(pool.first.hosts[0], pool.first.hosts[2])))
    until(lambda: len(pool.tried) > 3)
    num = len(pool.tried)
    time.sleep(0.1)
    assert len(pool.tried) < num + 5, "and not every 0.01 s"
    assert hosts.why_change({}) == ""
    pool.why_not.clear()
    until(lambda: hosts.why_change({}) == "b is back")
    hosts.end(None)


def test_a_host_that_got_a_signal_counts_again_when_it_has_started_anew(pool: Pool) -> None:
    pool.write("a slots=1", "b slots=1")
    hosts = pool.watch()
    leaving = {"b": "its agent got SIGTERM"}
    assert hosts.why_change(leaving) == "b was told to go (its agent got SIGTERM)"
    pool.machine["b"] = "boot 1"
    hosts.end(Verdict(None, (), None, (), change="x", leaving=leaving))
    hosts.begin(pool.first._replace(hosts=pool.first.hosts[:1]))
    until(lambda: "b" in pool.tried)
    time.sleep(0.1)
    assert hosts.why_change({}) == ""
    pool.machine["b"] = "boot 2"
    until(lambda: hosts.why_change({}) == "b is back")
    hosts.end(None)


def test_a_host_that_a_look_found_unfit_joins_only_after_it_was_away(pool: Pool) -> None:
    """It answers, so without this it would join, be left out again, and the job would start over and over."""
    pool.write("a slots=1", "b slots=1")
    pool.machine["b"] = "boot 1"
    hosts = pool.watch()
    hosts.end(None)
    hosts.leave_out(["b"])
    hosts.begin(pool.first._replace(hosts=pool.first.hosts[:1]))
    until(lambda: pool.tried.count("b") > 2)
    assert hosts.why_change({}) == ""
    pool.machine["b"] = "boot 2"
    until(lambda: hosts.why_change({}) == "b is back")
    hosts.end(None)


def test_a_host_whose_notice_stands_does_not_join(pool: Pool) -> None:
    pool.write("a slots=1", "b slots=1")
    hosts = pool.watch()
    pool.why_not["c"] = "there is /run/going"
    pool.write("a slots=1", "b slots=1", "c slots=1")
    until(lambda: pool.tried.count("c") > 1)
    assert hosts.why_change({}) == ""
    pool.why_not.clear()
    until(lambda: hosts.why_change({}) == "c is new in the hostfile")
    hosts.end(None)


def test_a_new_host_that_counts_its_slots_has_as_many_as_it_says(pool: Pool) -> None:
    pool.write("a slots=1", "b slots=1", "d slots=1")
    hosts = pool.watch(exclude="d")
    pool.write("a slots=1", "b slots=1", "c slots=auto", "d slots=1")
    until(lambda: hosts.why_change({}) == "c is new in the hostfile")
    (new,) = hosts.known().coming
    assert new.devices == ("0", "1", "2")
    assert "d" not in pool.tried
    hosts.end(None)


def test_nothing_is_tried_after_the_end(pool: Pool) -> None:
    pool.write("a slots=1", "b slots=1")
    pool.why_not["c"] = "down"
    hosts = pool.watch()
    pool.write("a slots=1", "b slots=1", "c slots=1")
    until(lambda: pool.tried)
    hosts.end(None)
    num = len(pool.tried)
    time.sleep(0.1)
    assert len(pool.tried) == num
