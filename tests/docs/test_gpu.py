"""The page about GPUs names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/design/gpu.md"
NUM_FAULTS = 24


def test_every_fault_has_a_test_that_exists() -> None:
    rows = [
        line.split("|") for line in PAGE.read_text().splitlines() if re.search(r"`\S+/?test_\w+\.py`", line)
    ]
    assert len(rows) == NUM_FAULTS
    for row in rows:
        named = re.findall(r"`((?:\w+/)?test_\w+)(\.py)?`", row[-2])
        source = ""
        for name, is_file in named:
            if is_file:
                source = (ROOT / f"tests/runtime/{name}.py").read_text()
            else:
                assert f"def {name}(" in source, name
        assert source, row
