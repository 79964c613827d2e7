from __future__ import annotations

from collections.abc import Callable

import pytest

from dslaunch.launcher.errors import EXIT_HOST, LaunchError
from dslaunch.launcher.fleet.auto_slots import with_known_slots
from dslaunch.launcher.inputs.host import Host
from dslaunch.launcher.wire.frames import Hello

KNOWN = Host(name="known", slots=2)
AUTO = Host(name="auto", slots=None, user="ada", cwd="/data")
OTHER = Host(name="other", slots=None)


def looking(found: dict[str, int | str]) -> Callable[[tuple[Host, ...]], tuple[Hello | str, ...]]:
    """A look at the hosts with so many accelerators, or what went wrong there."""

    def answer(host: Host) -> Hello | str:
        value = found[host.name]
        if isinstance(value, str):
            return value
        return Hello(hostname=host.name, python="3.11.2", reached_at="", num_devices=value, pid=1)

    return lambda hosts: tuple(answer(host) for host in hosts)


def test_auto_is_the_number_of_accelerators_found() -> None:
    found = with_known_slots(
        (KNOWN, AUTO, OTHER),
        in_question=(KNOWN, AUTO, OTHER),
        look=looking({"auto": 8, "other": 3}),
        num_cpu_workers=1,
    )
    assert found == (KNOWN, Host(name="auto", slots=8, user="ada", cwd="/data"), Host(name="other", slots=3))


@pytest.mark.parametrize("num_cpu_workers", [1, 4])
def test_a_host_without_accelerators_takes_cpu_workers(num_cpu_workers: int) -> None:
    (host,) = with_known_slots(
        (OTHER,), in_question=(OTHER,), look=looking({"other": 0}), num_cpu_workers=num_cpu_workers
    )
    assert host.slots == num_cpu_workers


def test_nobody_looks_at_hosts_that_do_not_take_part() -> None:
    hosts = (KNOWN, AUTO, OTHER)
    found = with_known_slots(hosts, in_question=(KNOWN, OTHER), look=looking({"other": 3}), num_cpu_workers=1)
    assert found == (KNOWN, AUTO, Host(name="other", slots=3))


def test_nobody_looks_if_all_is_known() -> None:
    found = with_known_slots((KNOWN, AUTO), in_question=(KNOWN,), look=looking({}), num_cpu_workers=1)
    assert found == (KNOWN, AUTO)


def test_hosts_that_cannot_be_looked_at_are_named_with_their_reasons() -> None:
    with pytest.raises(LaunchError) as caught:
        with_known_slots(
            (KNOWN, AUTO, OTHER),
            in_question=(KNOWN, AUTO, OTHER),
            look=looking({"auto": "refused the connection", "other": 3}),
            num_cpu_workers=1,
        )
    assert str(caught.value) == (
        "slots=auto needs a look at each host: auto: refused the connection; "
        "repair that, or write slots=N in the hostfile"
    )
    assert caught.value.exit_code == EXIT_HOST


def test_a_long_list_of_silent_hosts_is_shortened() -> None:
    hosts = tuple(Host(name=f"n{number}", slots=None) for number in range(9))
    with pytest.raises(LaunchError, match=r"each host: n0: no; .*n4: no; and 4 more; repair"):
        with_known_slots(
            hosts, in_question=hosts, look=looking({host.name: "no" for host in hosts}), num_cpu_workers=1
        )


def test_a_host_that_the_job_can_do_without_counts_as_most_others_until_it_is_tried() -> None:
    warnings: list[str] = []
    more = Host(name="more", slots=None)
    found = with_known_slots(
        (KNOWN, AUTO, OTHER, more),
        in_question=(KNOWN, AUTO, OTHER, more),
        look=looking({"auto": "refused the connection", "other": 3, "more": 3}),
        num_cpu_workers=1,
        warn=warnings.append,
    )
    assert {host.name: host.slots for host in found} == {"known": 2, "auto": 3, "other": 3, "more": 3}
    assert warnings == [
        "slots=auto: auto: refused the connection; it counts as a host with slots=3 until it is tried again"
    ]


def test_if_no_host_can_be_looked_at_the_job_cannot_do_without_them() -> None:
    with pytest.raises(LaunchError, match="each host: auto: no; other: no; repair that"):
        with_known_slots(
            (KNOWN, AUTO, OTHER),
            in_question=(KNOWN, AUTO, OTHER),
            look=looking({"auto": "no", "other": "no"}),
            num_cpu_workers=1,
            warn=print,
        )
