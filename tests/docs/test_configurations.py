"""The page of configurations has the rows that are planned, with what a plan says."""

from __future__ import annotations

import pytest

from tests.docs.configurations import PAGE, ROWS, STAGE_3, cells, plan


def test_the_page_shows_the_commands_that_were_planned() -> None:
    text = PAGE.read_text()
    assert [row.command for row in ROWS] == [
        line.strip() for line in text.splitlines() if line.startswith("    dslaunch plan -H")
    ]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_row_of_the_page_is_what_a_plan_says() -> None:
    row = next(one for one in ROWS if (one.model, one.ds_config, one.is_lora) == ("7B", STAGE_3, True))
    assert f"| {' | '.join(cells(row, plan(row)))} |" in PAGE.read_text()
