"""Files of a recording."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dslaunch.runtime.errors import RecordingError
from dslaunch.runtime.numerics.tensor_file import TensorWriter


def test_a_full_disk_is_said_in_one_line_and_is_no_difference(tmp_path: Path) -> None:
    (tmp_path / "step1.bin").symlink_to("/dev/full")
    writer = TensorWriter(tmp_path / "step1")
    writer.add("small", torch.zeros(2))  # it waits in a buffer
    with pytest.raises(
        RecordingError, match=r"step1\.bin: No space left on device; .* by --keep=DIR"
    ) as told:
        writer.add("large", torch.zeros(1 << 20))
    assert told.value.exit_code == 2
