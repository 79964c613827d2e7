"""What --mesh takes."""

from __future__ import annotations

import pytest

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.errors import EXIT_MISTAKE


@pytest.mark.parametrize("given", ["tp", "tp=0", "tp=-2", "tp=two", "gp=2", "tp=2,tp=2", "tp=2,"])
def test_what_is_no_list_of_sizes_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([f"--mesh={given}", "train.py"])
    assert ended.value.code == EXIT_MISTAKE
    said = capsys.readouterr().err
    assert said.startswith(f"dslaunch: --mesh: {given!r}: ")
    assert said.endswith("write e.g. pp=2,tp=2\n")
