"""How the ranks of a job lie along the axes of its parallelism, and on its hosts."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.inputs.selection import Selected
from dslaunch.launcher.job.mesh import (
    ORDER,
    HostSlots,
    JobMesh,
    check_hosts,
    describe,
    fit,
    make_mesh,
    warnings_of,
)
from dslaunch.launcher.job.restart import Attempt, Decision
from dslaunch.launcher.options.mesh import MeshOptions
from dslaunch.launcher.options.restart import RestartOptions
from dslaunch.runtime.experts.placed import expert_lines
from dslaunch.shared.axes import Axes

SIZES = st.integers(1, 3)


def asked(**sizes: int) -> MeshOptions:
    return MeshOptions(sizes=tuple(sizes.items()))


def slots(*numbers: int) -> list[HostSlots]:
    return [HostSlots(f"h{place}", number) for place, number in enumerate(numbers, start=1)]


@given(st.builds(JobMesh, SIZES, SIZES, SIZES, SIZES, ep=st.just(1), order=st.permutations(ORDER).map(tuple)))
def test_lines_and_places_are_those_of_the_runtime(mesh: JobMesh) -> None:
    axes = Axes(pp=mesh.pp, dp=mesh.dp, sp=mesh.sp, tp=mesh.tp, order=mesh.order)
    for name in ORDER:
        assert sorted(mesh.lines(name)) == sorted(axes.lines([name])), name
    assert tuple(map(mesh.place, range(mesh.num_ranks))) == axes.places


@given(st.permutations(ORDER).map(tuple))
def test_groups_of_experts_are_those_of_the_runtime(order: tuple[str, ...]) -> None:
    mesh = JobMesh(pp=2, dp=2, sp=2, tp=2, ep=4, order=order)
    together, _ = expert_lines(Axes(pp=2, dp=2, sp=2, tp=2, order=order), 4)
    assert sorted(mesh.lines("ep")) == sorted(together)
    for line in together:
        assert [mesh.place(rank)[-4:] for rank in line] == ["ep 0", "ep 1", "ep 2", "ep 3"]


def test_groups_of_experts_are_consecutive_among_the_ranks_that_share_the_rest() -> None:
    mesh = JobMesh(pp=2, dp=2, sp=2, tp=2, ep=2)
    assert mesh.lines("ep")[:4] == [(0, 2), (1, 3), (4, 6), (5, 7)]


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "text"),
    [
        ({"tp": 2}, 8, "dp=4,tp=2"),
        ({"pp": 2, "dp": 4, "tp": 2}, 16, "pp=2,dp=4,tp=2"),
        ({"sp": 2, "ep": 4, "tp": 1}, 8, "dp=4,sp=2,ep=4"),
    ],
)
def test_dp_is_what_remains(sizes: dict[str, int], num_ranks: int, text: str) -> None:
    mesh = make_mesh(asked(**sizes), num_ranks)
    assert mesh is not None
    assert mesh.text == text


def test_an_order_says_which_axis_is_inside_which() -> None:
    mesh = make_mesh(MeshOptions((("pp", 2), ("tp", 2)), ("dp", "tp", "pp")), 8)
    assert mesh is not None
    assert mesh.text == "pp=2,dp=2,tp=2,order=dp-tp-pp"
    assert [mesh.stride(name) for name in ("dp", "tp", "pp")] == [4, 2, 1]
    assert mesh.place(6) == "stage 0 of 2, dp 1, tp 1"
    assert describe(mesh, slots(2, 2, 2, 2)) == [
        "mesh: dp 2 x tp 2 x pp 2 on 4 hosts",
        "  axis  size  stride  inside a host",
        "  pp    2     1       yes",
        "  tp    2     2       no: h1-h2",
        "  dp    2     4       no: h1-h3",
    ]
    (line,) = warnings_of(mesh, slots(2, 2, 2, 2))
    assert line == (
        "--mesh=pp=2,dp=2,tp=2,order=dp-tp-pp: tp crosses hosts, first with ranks 0 to 2 on h1 and h2: what "
        "it sends in every layer goes over the network; an order in which tp stands further behind, or a "
        "smaller tp, keeps it in a host"
    )
    with pytest.raises(LaunchError, match="host h2 has 6 ranks, which is no multiple of 4"):
        check_hosts(mesh, slots(4, 6))


def test_an_order_that_makes_no_difference_is_none() -> None:
    for order in (("pp", "dp"), ("sp", "pp", "tp", "dp")):
        mesh = make_mesh(MeshOptions((("pp", 2),), order), 8)
        assert mesh is not None
        assert mesh.text == "pp=2,dp=4"
    with pytest.raises(
        LaunchError, match=r"--mesh=pp=2,order=pp: its order leaves out dp, which has 4 ranks"
    ):
        make_mesh(MeshOptions((("pp", 2),), ("pp",)), 8)


def test_without_the_option_there_is_no_mesh() -> None:
    assert make_mesh(MeshOptions(), 8) is None


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"pp": 3}, "--mesh=pp=3: pp=3 is 3 ranks, which does not divide the job's 8"),
        ({"dp": 2, "tp": 2}, "--mesh=dp=2,tp=2 is 4 ranks, and the job has 8, one for each slot"),
        ({"sp": 2, "tp": 2, "ep": 3}, "ep=3 does not divide dp x sp, which are 4"),
    ],
)
def test_axes_that_do_not_fit_the_ranks_are_refused(sizes: dict[str, int], text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        make_mesh(asked(**sizes), 8)
    assert text in str(caught.value)


def test_hosts_of_different_sizes_have_whole_groups_of_tp_and_sp() -> None:
    check_hosts(JobMesh(dp=5, tp=2), slots(4, 6))
    check_hosts(JobMesh(tp=8), slots(4, 4))  # the same on all
    with pytest.raises(LaunchError, match=r"host h2 has 6 ranks, which is no multiple of 4, .*: tp would"):
        check_hosts(JobMesh(dp=2, tp=4), slots(8, 6))
    with pytest.raises(LaunchError, match=r"host h2 has 6 ranks, which is no multiple of 4, .*: sp would"):
        check_hosts(JobMesh(dp=2, sp=2, tp=2), slots(8, 6))


def test_an_axis_that_sends_in_every_layer_across_hosts_is_warned_of() -> None:
    assert warnings_of(JobMesh(pp=2, dp=2, tp=2), slots(4, 4)) == []
    (line,) = warnings_of(JobMesh(dp=1, sp=4, tp=2), slots(4, 4))
    assert line.startswith("--mesh=dp=1,sp=4,tp=2: sp crosses hosts, first with ranks 0 to 6 on h1 and h2: ")


def test_the_table_says_which_axis_leaves_a_host() -> None:
    assert describe(JobMesh(pp=2, dp=4, tp=2, ep=4), slots(4, 4, 4, 4)) == [
        "mesh: pp 2 x dp 4 x tp 2 on 4 hosts",
        "  axis  size  stride  inside a host",
        "  tp    2     1       yes",
        "  dp    4     2       no: h1-h2",
        "  pp    2     8       no: h1-h3",
        "  ep    4     2       no: h1-h2",
    ]


def hosts(*numbers: int) -> tuple[Selected, ...]:
    return tuple(
        Selected(host=Host(name=one.name, slots=one.num_ranks), devices=("0",) * one.num_ranks)
        for one in slots(*numbers)
    )


def fitted(left: tuple[Selected, ...], *, min_nodes: int | None, **sizes: int) -> tuple[str, str, str]:
    decision = Decision(attempt=Attempt(run_id="r", hosts=left, number=1), why="starting again")
    restart = RestartOptions(max_restarts=1, min_nodes=min_nodes)
    attempt, why = fit(decision, asked(**sizes), restart)
    if attempt is None:
        return "", "", why
    return (*(" ".join(one.host.name for one in part) for part in (attempt.hosts, attempt.spares)), why)  # type: ignore[return-value]


def test_fewer_hosts_shrink_dp_only() -> None:
    assert fitted(hosts(2, 2), min_nodes=1, tp=2, dp=3) == (
        "h1 h2",
        "",
        "starting again; with dp=2,tp=2",
    )
    assert fitted(hosts(2, 2, 2), min_nodes=1, pp=2, tp=2) == (
        "h1 h2",
        "h3",
        "starting again; with pp=2,dp=1,tp=2; without h3, for pp=2 x tp=2 takes 4 ranks",
    )
    assert fitted(hosts(2, 2, 2), min_nodes=3, pp=2, tp=2) == (
        "",
        "",
        "not started again: 3 hosts with 6 ranks are left and --min_nodes is 3, and of --mesh=pp=2,tp=2 only "
        "dp can shrink: pp=2 x tp=2 takes 4 ranks",
    )
    assert fitted(hosts(2, 1), min_nodes=None, tp=2)[2].startswith("not started again: 2 hosts with 3 ranks")
    assert fitted(hosts(2, 1), min_nodes=None) == ("h1 h2", "", "starting again")
