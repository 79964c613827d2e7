"""What the process of a detached job says to the command in front of it."""

from __future__ import annotations

import os
from pathlib import Path

from dslaunch.launcher.registry.detached import Front, News


def test_one_word_is_said_and_no_other_file_is_written_to_later(tmp_path: Path) -> None:
    heard, told = os.pipe()
    front = Front(told)
    front.tell(News(None))
    other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    assert other == told  # the number is free again
    front.tell(News(1, "ended"))
    assert os.read(heard, 100) == b'{"code": null, "message": ""}\n'
    assert (tmp_path / "other").read_bytes() == b""
    os.close(other)  # it is still open
    os.close(heard)


def test_a_command_in_front_that_is_gone_is_not_missed() -> None:
    heard, told = os.pipe()
    os.close(heard)
    Front(told).tell(News(0))
