"""Fixtures for whole jobs on the hosts of the lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import Lab


@pytest.fixture
def folder(lab: Lab, request: pytest.FixtureRequest) -> Path:
    """A new folder of this test that all hosts share, with a hostfile `hosts` that gives each
    of them two slots.
    """
    path = lab.shared / request.node.name.replace("/", "_").replace("[", "-").replace("]", "")[:80]
    path.mkdir()
    (path / "hosts").write_text("".join(f"{node.name} slots=2\n" for node in lab.nodes))
    return path
