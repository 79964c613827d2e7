"""Hosts in one word, as --hostfile takes them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings, strategies as st

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.host_list import folded
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.inputs.hostfile_list import is_host_list, parse_host_list, split_list


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu7:4", (Host(name="gpu7", slots=4),)),
        ("n[1-2,5]:8", tuple(Host(name=f"n{one}", slots=8) for one in (1, 2, 5))),
        ("r[1-2]n[01-02]:1", tuple(Host(name=one, slots=1) for one in ["r1n01", "r1n02", "r2n01", "r2n02"])),
        ("n[8-10/2]:1", (Host(name="n8", slots=1), Host(name="n10", slots=1))),
        ("b:4, a:auto", (Host(name="b", slots=4), Host(name="a", slots=None))),
        ("ada@h:2", (Host(name="h", slots=2, user="ada"),)),
        ("[fd00::7]:2,10.0.0.1:1", (Host(name="fd00::7", slots=2), Host(name="10.0.0.1", slots=1))),
    ],
)
def test_a_list_names_hosts_with_their_slots(text: str, hosts: tuple[Host, ...]) -> None:
    assert is_host_list(text)
    assert parse_host_list(text) == hosts


@pytest.mark.parametrize("text", ["hosts", "jobs/a:8", "./n[1-2]", "/data/a,b"])
def test_a_name_without_slots_and_a_path_are_no_list(text: str) -> None:
    assert not is_host_list(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n[1-2]", "'n[1-2]': slots is missing"),
        ("a:1,b", "'b': slots is missing"),
        ("a:0", "'a:0': slots must be a whole number"),
        ("a:x", "'a:x': slots must be a whole number"),
        ("a:29500", "'a:29500': a number behind ':' is that of the slots, 4096 at most; a port is given as"),
        ("a:2,b:1,a:1", "'a:1': host 'a' is named twice"),
        ("n[1-3]:2,n2:1", "'n2:1': host 'n2' is named twice"),
        ("[fd00::7]:1,[fd00:0::7]:1", "host 'fd00:0::7' is named twice"),
        ("fd00::7:1", "'fd00::7:1': one ':' stands between a host and its slots, and an IPv6"),
        ("a:1:2", "'a:1:2': one ':' stands between a host and its slots"),
        ("a:1,,b:1", "an item of the list is empty"),
        (",", "an item of the list is empty"),
        ("n[1-2,b:1", "'n[1-2,b:1': a bracket has no partner"),
        ("n1-2]:1", "a bracket has no partner"),
        ("n[3-1]:1", "the range 3-1 runs backwards"),
        ("n[1-1000000]:1", "1000000 hosts are more than the 10000"),
        ("a[1-6000]:1,b[1-6000]:1", "more hosts than the 10000 that a list may have"),
        ("n\udcff:1", "a host's name is made of letters"),
        ("-o:1", "a host's name is made of letters"),
        ("[" * 20_000, "a bracket has no partner"),
        ("a:" + "9" * 20_000, "a number behind ':' is that of the slots"),
    ],
)  # fmt: skip
def test_what_is_no_list_is_refused_with_an_example(text: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_host_list(text)
    assert message in str(caught.value)
    assert "write e.g. --hostfile '" in str(caught.value)
    assert len(str(caught.value)) < 700


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from(["n", "gpu-", "r1x"]), st.integers(0, 120), st.sampled_from([0, 3])),
        min_size=1,
        max_size=20,
    )
)
def test_names_that_are_folded_come_back(parts: list[tuple[str, int, int]]) -> None:
    names = sorted({f"{before}{number:0{width}d}" for before, number, width in parts})
    words = split_list(folded(names).replace(", ", ","))
    hosts = parse_host_list(",".join(f"{word}:3" for word in words))
    assert sorted(host.name for host in hosts) == names
