"""The look at all hosts before a job: how long each has, and of faults between two which host goes."""

from __future__ import annotations

import io

import pytest

from dslaunch.launcher.backends.refused_before import RefusedBefore
from dslaunch.launcher.fleet.check import CheckSettings
from dslaunch.launcher.fleet.check_facts import Finding
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.inputs.selection import select
from dslaunch.launcher.job.restart import Attempt
from dslaunch.launcher.options import Options
from dslaunch.launcher.options.start import StartOptions
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.run import check_first
from dslaunch.launcher.run.check_first import _blamed, _first_reasons


def slow(*hosts: str) -> Finding:
    return Finding(hosts=hosts, text="slow", is_problem=True)


@pytest.mark.parametrize(
    ("faults", "blamed"),
    [
        ([], {}),
        ([slow("a")], {"a": "slow"}),
        ([slow("a", "b")], {"b": "with a: slow"}),
        ([slow("a", "b"), slow("a", "c")], {"a": "with b: slow"}),
        ([slow("b", "c"), slow("a", "c")], {"c": "with b: slow"}),
        ([slow("a", "b"), slow("c", "d")], {"b": "with a: slow", "d": "with c: slow"}),
        ([slow("a", "b"), slow("b")], {"b": "with a: slow"}),
    ],
)
def test_the_host_with_most_faults_goes_and_of_two_the_later_one(
    faults: list[Finding], blamed: dict[str, str]
) -> None:
    assert _first_reasons(_blamed(faults)) == blamed


class _Asked(Exception):
    pass


@pytest.mark.parametrize(("prepare_timeout_s", "expected"), [(60.0, 60.0), (3000.0, 300.0)])
def test_a_host_that_may_prepare_for_longer_has_longer_to_answer(
    prepare_timeout_s: float, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(nodes: object, num_slots: object, settings: CheckSettings, **kept: object) -> None:
        raise _Asked(settings.timeout_s, settings.timeout_option)

    monkeypatch.setattr(check_first, "Check", asked)
    options = Options(program="train.py", start=StartOptions(prepare_timeout_s=prepare_timeout_s))
    attempt = Attempt(hosts=select((Host(name="a", slots=1),)), run_id="")
    console = Console(log_level="info", err=io.BytesIO())
    with pytest.raises(_Asked) as found:
        check_first._look(options, attempt, console, RefusedBefore())
    assert found.value.args == (expected, "--prepare_timeout")
