"""From what the ranks measured to the link or the host that is slow."""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

import pytest

from dslaunch.launcher.fleet.network import (
    MAX_PAIRS_SHOWN,
    Network,
    faults_of,
    network_as_text,
    read_network,
)

FAST, SLOW = 1.2e9, 2.5e6
TOGETHER = {"all_reduce": {"bytes": 64 << 20, "seconds": 0.15, "bytes_per_s": 5.9e8}}
TIMEOUT_S = 20.0


def told(
    num_hosts: int, changed: dict[tuple[int, int], Any] | None = None, *, silent: tuple[int, ...] = ()
) -> dict[str, Any]:
    """What rank 0 prints. What is changed of a pair: its speeds, its latency, or its error."""
    together = {"ranks": list(range(num_hosts)), "found": [TOGETHER for _ in range(num_hosts)]}
    groups: list[dict[str, Any]] = []
    for pair in combinations(range(num_hosts), 2):
        change = (changed or {}).get(pair)
        speeds = change if isinstance(change, tuple) else (FAST, FAST)
        latency_s = change if isinstance(change, float) else 0.0001
        found = [{"latency_s": latency_s, "bytes_per_s": speed} for speed in speeds]
        if isinstance(change, str):
            found = [{"error": change}, {"error": change}]
        groups.append({"ranks": list(pair), "found": found})
    return {"backend": "gloo", "together": together, "pairs": groups, "silent": list(silent)}


def network(*given: Any, **more: Any) -> Network:
    answer = told(*given, **more)
    names = [f"node{rank + 1}" for rank in range(given[0])]
    return read_network(json.dumps(answer), names, timeout_s=TIMEOUT_S)


@pytest.mark.parametrize(
    ("given", "faults"),
    [
        ((3,), []),
        ((3, {(0, 1): (FAST / 2, FAST / 2)}), []),  # noise
        ((2, {(0, 1): (SLOW, FAST)}), []),  # nothing to compare it with
        ((3, {(0, 2): (SLOW, FAST)}),
         [("node1 node3", "the link between them carries 2.50 MB/s, where most carry 1.20 GB/s: 480 times")]),
        ((3, {(0, 1): (FAST, SLOW), (1, 2): (SLOW, FAST)}),
         [("node2", "even its fastest link carries 2.50 MB/s, where most carry 1.20 GB/s: 480 times")]),
        ((4, {(0, 1): (SLOW, SLOW), (2, 3): (FAST, 0.2e9)}),
         [("node1 node2", "the link between them carries 2.50 MB/s"),
          ("node3 node4", "the link between them carries 200.00 MB/s, where most carry 1.20 GB/s: 6.0")]),
        ((4, {(0, 1): (SLOW, FAST), (0, 2): (SLOW, FAST), (0, 3): (SLOW, FAST), (2, 3): (FAST, SLOW)}),
         [("node1", "even its fastest link carries 2.50 MB/s"),
          ("node3 node4", "the link between them carries 2.50 MB/s")]),
        ((4, {(1, 2): 0.04}),
         [("node2 node3", "a message between them takes 40.0 ms, where most take 0.1 ms: 400")]),
        ((3, {(0, 1): 0.04, (1, 2): 0.05}),
         [("node2", "even its quickest link takes 40.0 ms, where most take 0.1")]),
        ((3, {(0, 1): 0.0009}), []),  # too short to matter
        ((3, {(1, 2): "timed out"}), [("node2 node3", "cannot exchange data: timed out (on node2);")]),
        ((3, {(0, 1): "timed out", (1, 2): "refused"}),
         [("node2", "no other host can exchange data with it: timed out (on node1); look at firewalls")]),
        ((2, {(0, 1): "timed out"}), [("node1 node2", "cannot exchange data: timed out (on node1)")]),
    ],
)  # fmt: skip
def test_what_is_named(given: tuple[Any, ...], faults: list[tuple[str, str]]) -> None:
    found = faults_of(network(*given))
    assert len(found) == len(faults), found
    for one, (hosts, text) in zip(found, faults, strict=True):
        assert (" ".join(one.hosts), one.text[: len(text)]) == (hosts, text)


def test_a_host_that_fell_silent_is_named() -> None:
    answer = told(3, silent=(2,))
    answer["pairs"] = [answer["pairs"][0], {"ranks": [1, 2], "found": [{"error": "timed out"}, {}]}]
    answer["together"] = {"ranks": [], "found": []}
    found = faults_of(read_network(json.dumps(answer), ["a", "b", "c"], timeout_s=TIMEOUT_S))
    assert [(one.hosts, one.text) for one in found] == [
        (("c",), "did not answer within 40 s; look at the host and its network")
    ]


def test_two_hosts_that_fell_silent_as_a_pair_have_a_broken_link() -> None:
    answer = told(3, silent=(1, 2))
    answer["pairs"][2]["found"] = [{}, {}]
    (fault,) = faults_of(read_network(json.dumps(answer), ["a", "b", "c"], timeout_s=TIMEOUT_S))
    assert fault.hosts == ("b", "c")
    assert fault.text.startswith("cannot exchange data: both did not answer within 40 s; look at firewalls")


def test_all_together_may_fail_where_every_pair_works() -> None:
    answer = told(3)
    answer["together"]["found"] = [{}, {"error": "no memory"}, {}]
    (fault,) = faults_of(read_network(json.dumps(answer), ["a", "b", "c"], timeout_s=TIMEOUT_S))
    assert fault.text == "all hosts together: no memory (on b); read what the ranks wrote above"


def test_the_network_as_people_see_it() -> None:
    text = network_as_text(network(3, {(0, 2): (SLOW, FAST)}))
    assert text == (
        "\n"
        "Network, with one rank on each host (gloo):\n"
        "  collective    size      time  on each link\n"
        "  all_reduce  64 MiB  150.0 ms   590.00 MB/s\n"
        "\n"
        "  hosts          latency      there       back\n"
        "  node1 - node2   0.1 ms  1.20 GB/s  1.20 GB/s\n"
        "  node1 - node3   0.1 ms  2.50 MB/s  1.20 GB/s\n"
        "  node2 - node3   0.1 ms  1.20 GB/s  1.20 GB/s\n"
        "\n"
        "Problems of the network:\n"
        "  node1 and node3: the link between them carries 2.50 MB/s, where most carry 1.20 GB/s: "
        "480 times as slow; look at the switches and routes between them\n"
    )


def test_of_two_hosts_none_is_said_to_be_fast() -> None:
    """Nothing was compared."""
    for given in ({}, {(0, 1): (SLOW, SLOW)}):
        text = network_as_text(network(2, given))
        assert "There is no other link to compare with" in text
        assert "is slow" not in text
    assert "No link and no host is slow." in network_as_text(network(3, {}))


def test_of_many_pairs_the_slowest_are_shown() -> None:
    text = network_as_text(network(10, {(8, 9): (SLOW, SLOW)}))
    assert f"  the slowest {MAX_PAIRS_SHOWN} of 45 pairs of hosts:\n  hosts  " in text
    assert text.index("  node9 - node10 ") < text.index("  node1 - node2 ")


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"groups": []}', json.dumps({**told(3), "silent": [7]}), json.dumps(told(5))]
)
def test_an_answer_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_network(text, ["a", "b", "c"], timeout_s=TIMEOUT_S)
