"""Fixtures for whole jobs on the hosts of the lab."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import pytest

from tests.lab import Lab
from tests.launcher.command import Command


@pytest.fixture
def folder(lab: Lab, request: pytest.FixtureRequest) -> Path:
    """A new folder of this test that all hosts share, with a hostfile `hosts` that gives each
    of them two slots.
    """
    name = request.node.name.replace("/", "_").replace("[", "-").replace("]", "")
    path = lab.shared / (name if len(name) <= 80 else f"{name[:70]}-{zlib.crc32(name.encode()):x}")
    path.mkdir()
    (path / "hosts").write_text("".join(f"{node.name} slots=2\n" for node in lab.nodes))
    return path


@pytest.fixture
def quick_python(folder: Path) -> str:
    """A Python on all hosts whose torch is imported at once, for tests in which a check asks of it."""
    quick = folder / "quick"
    quick.mkdir()
    (quick / "torch.py").write_text("__version__ = '2.6.0'\nclass version: cuda = hip = None\n")
    python = quick / "python3"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={quick} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.fixture(params=["ssh", pytest.param("openssh", marks=pytest.mark.exhaustive)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By our own SSH, and by the system's ssh: the launcher of every command of a test that uses this."""
    name = str(request.param)
    monkeypatch.setattr(Command, "way", ("--launcher=openssh",) if name == "openssh" else ())
    return name
