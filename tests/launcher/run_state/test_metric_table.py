"""What measures numbers, what shows them, and the design page have the same names."""

from __future__ import annotations

import re
from pathlib import Path

from dslaunch.launcher.node.observe.metrics import add_own_time, is_sum
from dslaunch.launcher.run_state.metric_table import GPU, HOST, PAUSE, PHASES, RANK, WAITING, names_of
from dslaunch.runtime.comm import phases
from dslaunch.runtime.metrics.report import _AMOUNTS

DESIGN = Path(__file__).parents[3] / "docs" / "design" / "events.md"
OF_NOBODY = {"own_s"}  # made of others


def test_the_runtime_has_the_phases_of_the_table() -> None:
    assert {*phases._PARTS, phases.PAUSED} == set(PHASES)
    sums = {name for name in RANK if is_sum(name) and not name.endswith("_per_s")}
    assert sums - OF_NOBODY == _AMOUNTS


def test_a_node_knows_what_is_not_a_rank_s_own_time() -> None:
    row: dict[str, int | float | str] = {"step_s": 100.0}
    row |= {f"{name}_s": 2.0**place for place, name in enumerate(PHASES)}
    add_own_time({0: row})
    assert row["own_s"] == 100.0 - sum(float(row[name]) for name in names_of(WAITING, PAUSE))


def test_the_design_page_names_what_is_told() -> None:
    text = DESIGN.read_text()
    of_ranks, of_hosts = (
        text.partition(f"## Names of a {who}'s numbers")[2].partition("\n## ")[0] for who in ("rank", "host")
    )
    first_cells = " ".join(re.findall(r"^\| ([a-z_, ]+) \|", of_ranks, re.MULTILINE))
    named = set(re.findall(r"\w+", first_cells)) - {"name", "state", "anything", "else"}
    assert named == {name for name in RANK if not name.endswith("_per_s")} - OF_NOBODY
    assert (set(HOST) | set(GPU)) <= set(re.findall(r"\w+", of_hosts))
