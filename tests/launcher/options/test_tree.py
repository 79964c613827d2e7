"""Which hosts are gateways, and which are behind them."""

from __future__ import annotations

import pytest

from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.job.gateways import gateways_of, group_sizes, plan_groups
from dslaunch.launcher.job.plan import NodePlan
from dslaunch.launcher.options.tree import TreeOptions


def nodes_of(*names: str) -> list[NodePlan]:
    """Hosts without ranks; `here` is this machine."""
    return [
        NodePlan(
            node_rank=place, host=Host(name=name, slots=1), is_local=name == "here", devices=(), ranks=()
        )
        for place, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("num_hosts", "radix", "sizes"),
    [
        (1, 32, [1]),
        (33, 32, [33]),
        (34, 32, [17, 17]),
        (9, 3, [3, 3, 3]),
        (13, 3, [4, 3, 3, 3]),
        (2, 1, [2]),
        (3, 1, [2, 1]),
        (4000, 32, [33] * 96 + [32] * 26),
        (10000, 32, [79] * 16 + [78] * 112),
        (1000, 1, [8] * 104 + [7] * 24),
    ],
)
def test_groups_are_as_large_as_the_radix_allows_and_nearly_equal(
    num_hosts: int, radix: int, sizes: list[int]
) -> None:
    assert list(group_sizes(num_hosts, radix=radix)) == sizes
    assert sum(sizes) == num_hosts


def test_the_first_host_of_each_group_is_the_gateway_and_the_order_stays() -> None:
    groups = plan_groups(nodes_of(*"abcdefg"), TreeOptions(above=2, radix=2))
    shown = [(one.gateway.host.name, "".join(child.host.name for child in one.children)) for one in groups]
    assert shown == [("a", "bc"), ("d", "e"), ("f", "g")]
    assert gateways_of(groups) == {1: "a", 2: "a", 4: "d", 6: "f"}


@pytest.mark.parametrize("options", [TreeOptions(), TreeOptions(above=3), TreeOptions(above=4)])
def test_there_is_no_tree_unless_more_hosts_than_that_need_ssh(options: TreeOptions) -> None:
    assert plan_groups(nodes_of("here", "a", "b", "c"), options) == ()


@pytest.mark.parametrize("name", ["here", "localhost", "LOCALHOST", "127.0.0.2", "::1"])
def test_a_name_that_means_another_host_elsewhere_has_no_part_in_it(name: str) -> None:
    (group,) = plan_groups(nodes_of("a", name, "b"), TreeOptions(above=1))
    assert [group.gateway.host.name, *(one.host.name for one in group.children)] == ["a", "b"]
