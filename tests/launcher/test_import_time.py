"""What each way to start loads. Times are not asserted, they are measured by the benchmarks."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from dslaunch.launcher.bootstrap import READ_LOADER, agent_source, relay_source
from dslaunch.launcher.frames import MAGIC

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


def sources_in(bootstrap: bytes) -> dict[str, str]:
    """The Python text of every module that is sent to a node."""
    loader = eval(bootstrap.partition(b"\n")[0])
    _, text_bytes = ast.literal_eval(loader.splitlines()[0].removeprefix("SIZES = "))
    return dict(json.loads(zlib.decompress(bootstrap[-text_bytes:])))


def run_agent(bootstrap: bytes, *options: str) -> subprocess.CompletedProcess[bytes]:
    """An agent whose launcher is gone at once; its first frame is on stdout all the same."""
    words = [sys.executable, *options, "-I", "-S", "-u", "-c", READ_LOADER]
    ran = subprocess.run(words, input=bootstrap, capture_output=True, check=False)
    assert ran.stdout.startswith(MAGIC), ran.stderr.decode()
    return ran


@pytest.mark.slow
def test_the_agent_of_a_job_loads_nothing_that_only_other_agents_need() -> None:
    lines = run_agent(agent_source(), "-X", "importtime").stderr.decode().splitlines()
    modules = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "ctypes" in modules
    slow = {
        "typing",
        "json",
        "re",
        "signal",
        "enum",
        "contextlib",
        "collections",
        "functools",
        "selectors",
        "socket",
    }
    assert not modules & {
        *slow,
        "subprocess",
        "tempfile",
        "shutil",
        "traceback",
        "ipaddress",
        "random",
        "hashlib",
    }


@pytest.mark.slow
def test_a_host_with_the_same_python_compiles_nothing_and_another_one_all() -> None:
    bootstrap = agent_source()
    loader, end, bundle = bootstrap.partition(b"\n")
    sizes, python, *_ = eval(loader).splitlines()
    num_compiled, num_text = ast.literal_eval(sizes.removeprefix("SIZES = "))
    assert num_compiled + num_text == len(bundle)
    run_agent(loader + end + bundle[:num_compiled] + bytes(num_text))  # no text
    other = repr(eval(loader).replace(python, "PYTHON = ('cpython-399', b'')")).encode()
    run_agent(other + end + bytes(num_compiled) + bundle[num_compiled:])  # no code
    with pytest.raises(AssertionError, match="zlib"):
        run_agent(loader + end + bytes(num_compiled) + bundle[num_compiled:])


@pytest.mark.parametrize(("name", "sent"), [("agent", agent_source()), ("relay", relay_source())])
def test_what_runs_on_a_node_needs_only_the_standard_library_of_python_3_8(name: str, sent: bytes) -> None:
    """It runs on whatever Python a node has, so what it imports is asked of the sources that are sent there."""
    sources = sources_in(sent)
    assert name in sources
    for source in sources.values():
        tree = ast.parse(source, feature_version=(3, 8))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert {one.name.partition(".")[0] for one in node.names} <= sys.stdlib_module_names
            elif isinstance(node, ast.ImportFrom):
                own, outer = sources.keys(), sys.stdlib_module_names
                named = [node.module.partition(".")[0]] if node.module else [one.name for one in node.names]
                assert set(named) <= set(own if node.level else outer)
