"""What the documents show as a ds_config can be loaded as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dslaunch.runtime.config import load_config

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCKS = [
    (path.stem, number, text)
    for path in [*sorted(DOCS.rglob("*.md")), DOCS.parent / "README.md"]
    for number, text in enumerate(re.findall(r"```json\n(\{\n.*?)```", path.read_text(), re.DOTALL))
]


@pytest.mark.parametrize(
    ("page", "number", "text"), BLOCKS, ids=[f"{page}-{number}" for page, number, _ in BLOCKS]
)
def test_a_whole_config_is_one(page: str, number: int, text: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    load_config(path, world_size=2)
