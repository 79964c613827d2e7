"""The tables of `dslaunch plan`, whole."""

from __future__ import annotations

from pathlib import Path

from dslaunch.launcher.fit.answer import crosses
from dslaunch.launcher.fit.finding import finding_of
from dslaunch.launcher.job.mesh import HostSlots

from .answers import answer, memory, rehearsed

GOLDEN = Path(__file__).parents[1] / "golden"


def test_the_answer_is_a_line_notes_and_tables() -> None:
    mesh = {"pp": 2, "dp": 2, "ep": 1, "sp": 1, "tp": 1, "order": ["pp", "dp", "sp", "tp"]}
    found = finding_of(
        [
            rehearsed(answer(mesh=mesh), num_alike=2),
            rehearsed(answer(activations=9, pinned=4), rank=2, place="stage 1 of 2", num_alike=2),
        ],
        memory(hosts=(503, None)),
        device="A10",
        device_from="as torch reports it",
    )
    text = "\n".join(found.lines()) + "\n"
    assert text == (GOLDEN / "plan-job.txt").read_text(), f"\n{text}"


def test_more_kinds_of_rank_than_a_table_takes_are_named() -> None:
    kinds = [rehearsed(answer(activations=number), rank=number, num_alike=1) for number in range(8)]
    found = finding_of(kinds, memory(num_ranks=4), device="A10", device_from="--gpu_memory")
    assert found.lines()[-1] == "not shown, because they need less: rank 0, rank 1"


def test_an_axis_leaves_a_host_if_its_ranks_are_on_several() -> None:
    hosts = [HostSlots("node1", 2), HostSlots("node2", 2)]
    assert [crosses(ranks, hosts) for ranks in [(0, 1), (2, 3), (1, 2), ()]] == [False, False, True, True]
    assert not crosses((), hosts[:1])
