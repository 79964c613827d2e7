"""Of faults between two hosts: which host a job is started without."""

from __future__ import annotations

import pytest

from dslaunch.launcher.fleet.check_findings import Finding
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
