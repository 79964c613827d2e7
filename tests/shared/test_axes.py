"""The ranks along the axes: arithmetic, beside torch's own mesh."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from dslaunch.shared.axes import ORDER, SAMPLES, Axes, axes_of_job

SIZES = st.fixed_dictionaries({name: st.integers(1, 4) for name in ORDER})
ORDERS = st.permutations(ORDER).map(tuple)


@given(SIZES, ORDERS)
def test_coordinates_are_those_of_a_mesh_whose_last_axis_is_innermost(
    sizes: dict[str, int], order: tuple[str, ...]
) -> None:
    axes = Axes(**sizes, order=order)
    mesh = torch.arange(axes.world_size).view(*(sizes[name] for name in order))
    for rank in range(axes.world_size):
        coordinates = axes.coordinates(rank)
        assert int(mesh[tuple(coordinates[name] for name in order)]) == rank
        assert axes.rank_at(**coordinates) == rank


@given(SIZES, ORDERS, st.sets(st.sampled_from(ORDER)))
def test_lines_part_the_ranks_and_differ_along_their_axes_only(
    sizes: dict[str, int], order: tuple[str, ...], names: set[str]
) -> None:
    axes = Axes(**sizes, order=order)
    lines = axes.lines(names)
    fixed = [tuple(i for k, i in axes.coordinates(line[0]).items() if k not in names) for line in lines]
    assert fixed == sorted(fixed), "the order of the lines does not depend on that of the ranks"
    assert sorted(rank for line in lines for rank in line) == list(range(axes.world_size))
    for line in lines:
        assert list(line) == sorted(line)
        rest = [{k: v for k, v in axes.coordinates(rank).items() if k not in names} for rank in line]
        assert rest == [rest[0]] * len(line)
    assert len({len(line) for line in lines}) == 1


def test_the_leader_is_the_first_rank_with_the_same_parameters() -> None:
    axes = Axes(pp=2, dp=2, tp=2)
    assert axes.leaders == (0, 1, 0, 1, 4, 5, 4, 5)
    assert axes.lines(SAMPLES) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert axes.line_of(7, ("tp",)) == (6, 7)
    assert Axes(dp=2, sp=2, tp=2).leaders == (0, 1, 0, 1, 0, 1, 0, 1)  # parts of samples are other data
    assert axes_of_job(3).leaders == (0, 0, 0)
    assert axes_of_job(16, pp=2, sp=2, tp=2) == Axes(pp=2, dp=2, sp=2, tp=2)
    with pytest.raises(ValueError, match=r"pp=2 \* tp=2 does not divide the 6 ranks"):
        axes_of_job(6, pp=2, tp=2)


def test_axes_of_one_rank_have_no_place_in_the_order() -> None:
    assert Axes(pp=2, order=("tp", "sp", "pp", "dp")) == Axes(pp=2)
    assert axes_of_job(4, tp=2, order=("tp", "dp")).order == ("pp", "tp", "dp", "sp")
    assert axes_of_job(4, tp=4, order=("tp",)) == Axes(tp=4)
    with pytest.raises(ValueError, match="the order tp leaves out dp, which has 2 ranks; name all axes"):
        axes_of_job(4, tp=2, order=("tp",))


def test_a_rank_is_told_by_its_place_along_the_axes_of_several_ranks() -> None:
    assert Axes(pp=2, dp=2).places == (
        "stage 0 of 2, dp 0",
        "stage 0 of 2, dp 1",
        "stage 1 of 2, dp 0",
        "stage 1 of 2, dp 1",
    )
    assert Axes(pp=2, dp=2, order=("dp", "pp", "sp", "tp")).place(1) == "stage 1 of 2, dp 0"
    assert Axes(sp=2, tp=2).place(3) == "sp 1, tp 1"
    assert Axes(dp=4).place(2) == ""


def test_what_does_not_exist_is_named() -> None:
    with pytest.raises(ValueError, match="order pp, dp: must have each of pp, dp, sp, tp once"):
        Axes(order=("pp", "dp"))
    with pytest.raises(ValueError, match="tp=0: an axis has at least one rank"):
        Axes(tp=0)
    with pytest.raises(ValueError, match="rank 4 is not one of 4"):
        Axes(dp=4).coordinates(4)
    with pytest.raises(ValueError, match="there is no axis 'ep'; there are pp, dp, sp, tp"):
        Axes(dp=4).rank_at(ep=1)
    with pytest.raises(ValueError, match="dp=4: the axis has 4 ranks, from 0"):
        Axes(dp=4).rank_at(dp=4)
