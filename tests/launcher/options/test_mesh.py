"""What --mesh takes."""

from __future__ import annotations

import pytest

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.errors import EXIT_MISTAKE


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("tp=2,order=dp-gp", "'gp' in its order is not allowed: the order has some of pp, dp, sp and tp"),
        ("tp=2,order=dp-tp-dp", "'dp' in its order is not allowed: "),
        ("ep=2,order=dp-ep", "'ep' in its order lies along dp and sp, and has no place of its own: "),
        ("order=dp-tp", "an order without sizes; write e.g. pp=2,order=dp-pp"),
        ("tp=2,order=dp-tp,order=tp-dp", "'order=tp-dp' is not allowed: sizes of"),
    ],
)
def test_what_is_no_order_is_refused(given: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([f"--mesh={given}", "train.py"])
    assert ended.value.code == EXIT_MISTAKE
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("given", ["tp", "tp=0", "tp=-2", "tp=two", "gp=2", "tp=2,tp=2", "tp=2,"])
def test_what_is_no_list_of_sizes_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([f"--mesh={given}", "train.py"])
    assert ended.value.code == EXIT_MISTAKE
    said = capsys.readouterr().err
    assert said.startswith(f"dslaunch: --mesh: {given!r}: ")
    assert said.endswith("write e.g. pp=2,tp=2\n")


@pytest.mark.parametrize(
    "given",
    [
        *("model=m", "seq=8", "model=,seq=8", "model=m,seq=0", "model=m,seq=x", "model=m,seq=8,seq=8"),
        *("model=m,seq=8,stage=4", "model=m,seq=8,bytes=3", "model=m,seq=8,heads=2"),
    ],
)
def test_what_is_no_estimate_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--mesh=pp=2", "--dry_run", f"--mesh_estimate={given}", "train.py"])
    assert ended.value.code == EXIT_MISTAKE
    assert capsys.readouterr().err.endswith("write e.g. model=config.json,seq=4096,micro_batches=8,stage=1\n")


@pytest.mark.parametrize("options", [["--mesh=pp=2"], ["--dry_run"], []])
def test_an_estimate_without_a_table_is_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*options, "--mesh_estimate=model=m,seq=8", "train.py"])
    assert ended.value.code == EXIT_MISTAKE
    assert "adds to the table that --mesh and --dry_run print" in capsys.readouterr().err
