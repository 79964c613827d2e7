"""What each way to start loads. Times are not asserted, they are measured by the benchmarks."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.launcher.bootstrap import agent_source, relay_source

HEAVY = ("torch", "numpy", "paramiko", "cryptography", "pydantic", "hjson", "multiprocessing", "asyncio")
OURS = ("dslaunch.runtime", "dslaunch.kernels")


def loaded_by(program: str, folder: Path) -> set[str]:
    """The modules that a new interpreter has loaded when the program reaches its end."""
    path = folder / "modules"
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys\n{program}\nopen({str(path)!r}, 'w').write(' '.join(sys.modules))",
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return set(path.read_text().split())


def command(*words: str) -> str:
    """A program that gives these words to the command line."""
    return f"from dslaunch.launcher.cli import main\ntry: main({list(words)!r})\nexcept SystemExit as end: assert not end.code"


def test_importing_dslaunch_loads_nothing_but_the_facade(tmp_path: Path) -> None:
    modules = loaded_by("import dslaunch", tmp_path)
    assert not modules & {*HEAVY, *OURS, "click", "dslaunch.launcher"}


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_and_version_do_not_load_what_a_job_needs(word: str, tmp_path: Path) -> None:
    modules = loaded_by(command(word), tmp_path)
    assert not modules & {*HEAVY, *OURS, "dslaunch.launcher.run", "psutil", "json"}


@pytest.mark.slow
def test_a_dry_run_loads_no_back_end(tmp_path: Path) -> None:
    modules = loaded_by(command("--dry_run", "train.py"), tmp_path)
    assert not modules & {*HEAVY, *OURS, "psutil"}


@pytest.mark.slow
def test_a_local_job_loads_neither_torch_nor_ssh(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    modules = loaded_by(command("--quiet", "train.py"), tmp_path)
    assert "dslaunch.launcher.backends.local" in modules
    assert not modules & {*HEAVY, *OURS, "dslaunch.launcher.backends.ssh"}


@pytest.mark.parametrize(("name", "sent"), [("agent", agent_source()), ("relay", relay_source())])
def test_what_runs_on_a_node_needs_only_the_standard_library_of_python_3_8(name: str, sent: bytes) -> None:
    """It runs on whatever Python a node has, so what it imports is asked of the sources that are sent there."""
    _, _, bundle = sent.partition(b"\n")
    sources = dict(json.loads(bundle))
    assert name in sources
    for source in sources.values():
        tree = ast.parse(source, feature_version=(3, 8))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert {one.name.partition(".")[0] for one in node.names} <= sys.stdlib_module_names
            elif isinstance(node, ast.ImportFrom):
                own, outer = sources.keys(), sys.stdlib_module_names
                assert (node.module or "").partition(".")[0] in (own if node.level else outer)
