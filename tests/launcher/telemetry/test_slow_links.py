"""Whose link is named, by how long data wait in the sockets of all hosts; the numbers are of real jobs."""

from __future__ import annotations

from typing import Any

import pytest

from dslaunch.launcher.telemetry.slow_links import Look, Pair, SlowLink, find_slow_link

from .job_numbers import FakeJob, Step, hosts, named

Waits = dict[str, tuple[float, float]]  # by the letters of sender and receiver: part of the time, MB a second

# Three ranks on three hosts that average 16 MB over gloo, in a ring a > c > b > a: seen in labs.
RING_EVEN: Waits = {
    **{"ab": (0.10, 0.01), "ac": (0.17, 139), "ba": (0.21, 139), "bc": (0.10, 0.01)},
    **{"ca": (0.11, 0.01), "cb": (0.18, 139)},
}
RING_B_SENDS_SLOWLY: Waits = {
    **{"ab": (0.19, 0.01), "ac": (0.02, 16), "ba": (0.82, 16), "bc": (0.23, 0.01)},
    **{"ca": (0.16, 0.01), "cb": (0.49, 16)},
}
RING_B_RECEIVES_SLOWLY: Waits = {
    **{"ab": (0.29, 0.01), "ac": (0.05, 16), "ba": (0.14, 16), "bc": (0.12, 0.01)},
    **{"ca": (0.015, 0.01), "cb": (0.68, 16)},
}
# The same three, each to each.
ALL_EVEN: Waits = {
    **{"ab": (0.08, 30), "ac": (0.05, 32), "ba": (0.18, 34), "bc": (0.07, 34)},
    **{"ca": (0.06, 32), "cb": (0.17, 32)},
}
ALL_B_SENDS_SLOWLY: Waits = {
    **{"ab": (0.3, 9.4), "ac": (0.006, 9.4), "ba": (0.77, 9.5), "bc": (0.72, 8.3)},
    **{"ca": (0.01, 9.5), "cb": (0.42, 9.5)},
}
ALL_B_RECEIVES_SLOWLY: Waits = {
    **{"ab": (0.72, 9.4), "ac": (0.019, 9.5), "ba": (0.4, 9.0), "bc": (0.2, 9.0)},
    **{"ca": (0.022, 9.5), "cb": (0.74, 9.4)},
}
TWO_EVEN: Waits = {"ab": (0.2, 100), "ba": (0.25, 100)}
TWO_SLOW: Waits = {"ab": (0.1, 20), "ba": (0.7, 20)}
# Eight hosts in a ring, where each has connections to its neighbours alone.
LETTERS = "abcdefgh"
LONG_RING: Waits = {
    f"{one}{other}": (0.05, 50) for one, other in zip(LETTERS, LETTERS[1:] + "a", strict=True)
}
NUM_LOOKS = 20


def find(waits: Waits, *, waiting: float | None = 0.5, since: int = 0) -> SlowLink | None:
    """What is found if that was so for the whole window, or began at this second of it."""
    looks: dict[Pair, list[Look]] = {}
    for second in range(NUM_LOOKS):
        for (source, peer), (wait, out) in waits.items():
            is_so = second >= since
            one = Look(second + 1.0, 1.0, wait if is_so else 0.05, out * 1e6)
            looks.setdefault((source, peer), []).append(one)
    return find_slow_link(looks, newest=float(NUM_LOOKS), length=float(NUM_LOOKS), waiting=waiting)


@pytest.mark.parametrize("waits", [RING_EVEN, ALL_EVEN, TWO_EVEN, LONG_RING, {}, {"ab": (0.9, 10)}])
def test_links_that_are_alike_have_no_slow_one(waits: Waits) -> None:
    found = find(waits)
    assert found is None or not found.is_clear


@pytest.mark.parametrize(
    ("waits", "host", "is_outgoing"),
    [
        (RING_B_SENDS_SLOWLY, "b", True),
        (RING_B_RECEIVES_SLOWLY, "b", False),
        (ALL_B_SENDS_SLOWLY, "b", True),
        (ALL_B_RECEIVES_SLOWLY, "b", False),
        ({**LONG_RING, "cd": (0.8, 50), "bc": (0.4, 50)}, "c", True),
        ({**LONG_RING, "cd": (0.8, 50), "de": (0.3, 50)}, "d", False),
    ],
)
def test_the_host_whose_other_connections_wait_as_well_is_named(
    waits: Waits, host: str, is_outgoing: bool
) -> None:
    found = find(waits)
    assert found is not None
    assert (found.host, found.is_outgoing, found.is_path, found.is_clear) == (host, is_outgoing, False, True)
    assert found.rate < found.others_rate / 5


@pytest.mark.parametrize("waits", [TWO_SLOW, {**LONG_RING, "ba": (0.7, 50)}])
def test_what_is_between_two_hosts_alone_is_no_fault_of_one(waits: Waits) -> None:
    found = find(waits)
    assert found is not None
    assert (found.source, found.peer, found.is_path, found.is_clear) == ("b", "a", True, True)


@pytest.mark.parametrize(
    ("waiting", "is_clear"), [(0.5, True), (0.16, True), (0.1, False), (0.05, None), (None, True)]
)
def test_data_may_wait_where_no_rank_does(waiting: float | None, is_clear: bool | None) -> None:
    found = find(RING_B_SENDS_SLOWLY, waiting=waiting)
    assert (None if found is None else found.is_clear) is is_clear


def test_where_no_rank_tells_how_long_it_waits_data_must_wait_longer() -> None:
    waits = {**LONG_RING, "cd": (0.3, 50), "bc": (0.2, 50)}
    for waiting, is_clear in ((0.3, True), (None, False)):
        found = find(waits, waiting=waiting)
        assert found is not None
        assert found.is_clear is is_clear


def test_a_moment_is_nothing() -> None:
    found = find(RING_B_SENDS_SLOWLY, since=NUM_LOOKS // 2)
    assert found is None or not found.is_clear


def test_data_that_wait_where_little_goes_hold_up_nobody() -> None:
    found = find({**RING_EVEN, "ab": (0.9, 0.01)})
    assert found is None or not found.is_clear


ADDRESS = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "fd00::3"}


def links(host: str, waits: Waits) -> dict[str, Any]:
    """As the agent of a host tells them."""
    to = {
        ADDRESS[pair[1]]: {"wait": wait, "out": out * 1e6, "resent": 0, "queued": 0, "rtt_ms": 1}
        for pair, (wait, out) in waits.items()
        if pair[0] == host
    }
    strangers = {"10.9.9.9": {"wait": 1.0, "out": 1e9}, "*": {"wait": 1.0, "out": 1e9}}
    return {"links": {"seconds": 1.0, "from": [ADDRESS[host], "172.17.0.1"], "to": {**to, **strangers}}}


def network_bound(rank: int, at: float) -> Step:
    return Step(forward_s=0.01, backward_s=0.004, optimizer_s=0.001, data_s=0.0005, other_s=0.0005)


@pytest.mark.slow
def test_a_slow_link_is_said_with_its_rate_beside_the_others() -> None:
    job = FakeJob(network_bound, hosts=hosts(3, 2), noise=0.02)
    (one,) = job.run(40.0, host_numbers=lambda host, at: links(host, RING_B_SENDS_SLOWLY))
    assert one[:3] == (2, "b", "link")
    assert one.share == pytest.approx(0.8, abs=0.02)
    assert one.text == (
        "the outgoing link of b holds up the job: data from b to a wait 82 % of the time, those of others "
        "2 %, and go at 19 MiB/s against 763 MiB/s of others; look at its network card, cable and switch port"
    )
    news = job.run(60.0, host_numbers=lambda host, at: links(host, RING_EVEN))
    assert [(item.rank, item.cause, item.is_over) for item in news] == [(2, "link", True)]


def test_links_that_are_alike_are_no_news() -> None:
    job = FakeJob(network_bound, hosts=hosts(3, 2), noise=0.02)
    assert job.run(40.0, host_numbers=lambda host, at: links(host, RING_EVEN)) == []


def test_a_rank_that_is_slow_itself_is_named_and_no_link() -> None:
    def work(rank: int, at: float) -> Step:
        return network_bound(rank, at)._replace(forward_s=0.03 if rank == 4 else 0.01)

    job = FakeJob(work, hosts=hosts(3, 2), noise=0.02)
    news = job.run(60.0, host_numbers=lambda host, at: links(host, RING_B_SENDS_SLOWLY))
    assert named(news) == [(4, "c", "compute")]


def test_where_hosts_have_the_same_addresses_nothing_is_said_of_it() -> None:
    job = FakeJob(network_bound, hosts=hosts(3, 1))

    def told(host: str, at: float) -> dict[str, Any]:
        numbers = links(host, RING_B_SENDS_SLOWLY)
        numbers["links"]["from"] = list(ADDRESS.values())
        return numbers

    assert job.run(60.0, host_numbers=told) == []
