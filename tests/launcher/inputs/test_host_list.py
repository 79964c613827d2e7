from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.inputs.host_list import folded
from dslaunch.launcher.inputs.host_range import expand


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["node1"], "node1"),
        (["node1", "node2"], "node[1-2]"),
        (["node3", "node1", "node2", "node7"], "node[1-3,7]"),
        (["node1", "node1"], "node1"),
        (["n08", "n09", "n10"], "n[08-10]"),
        (["n8", "n9", "n10"], "n[8-10]"),
        (["n1", "n01"], "n1, n01"),
        (["head", "node1", "node2"], "head, node[1-2]"),
        (["node1.example", "node2.example", "node1.other"], "node[1-2].example, node1.other"),
        (["r1n1", "r1n2", "r2n1"], "r1n[1-2], r2n1"),
        (["10.0.0.1", "10.0.0.2", "10.0.1.1"], "10.0.0.[1-2], 10.0.1.1"),
        (["fd00::1", "fd00::2"], "fd00::1, fd00::2"),
    ],
)
def test_names_that_differ_in_one_number_are_one_word(names: list[str], text: str) -> None:
    assert folded(names) == text


@given(numbers=st.lists(st.integers(0, 300), min_size=1, unique=True), width=st.integers(1, 3))
def test_a_hostfile_reads_the_word_as_the_same_hosts(numbers: list[int], width: int) -> None:
    names = {f"node{str(number).zfill(width)}" for number in numbers}
    words = folded(sorted(names)).split(", ")
    assert {name for word in words for name in expand(word)} == names
