"""What each way to start loads. Times are not asserted, they are measured by the benchmarks."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from dslaunch.launcher.backends import bootstrap
from dslaunch.launcher.backends.bootstrap import (
    READ_LOADER,
    WANTS_TEXT,
    AgentParts,
    agent_source,
    agent_text,
    relay_source,
    relay_text,
)
from dslaunch.launcher.wire import frames, mux

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
    return (
        "from dslaunch.launcher.command_line.cli import main\n"
        f"try: main({list(words)!r})\n"
        "except SystemExit as end: assert not end.code"
    )


def test_importing_dslaunch_loads_nothing_but_the_facade(tmp_path: Path) -> None:
    modules = loaded_by("import dslaunch", tmp_path)
    assert not modules & {*HEAVY, *OURS, "click", "dslaunch.launcher"}


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_and_version_do_not_load_what_a_job_needs(word: str, tmp_path: Path) -> None:
    modules = loaded_by(command(word), tmp_path)
    assert not modules & {*HEAVY, *OURS, "dslaunch.launcher.run.run_job", "psutil", "json"}


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


def sources_in(text: bytes) -> dict[str, str]:
    """The Python text of every module that is sent to a node."""
    _, modules, of_few = json.loads(zlib.decompress(text[10:]))
    return {**dict(modules), **of_few}


def of_another_python(source: bytes) -> bytes:
    """The same as it looks to a node with another Python."""
    first, end, rest = source.partition(b"\n")
    size = int(re.findall(r"read[(]([0-9]+)[)]", eval(first))[-1])
    python, lines = rest[:size].splitlines(keepends=True)[1], rest[:size]
    assert python.startswith(b"PYTHON = ")
    other = lines.replace(python, b"PYTHON = ('cpython-399', b'')\n")
    return first.replace(b"(%d)" % size, b"(%d)" % len(other)) + end + other + rest[size:]


def run_agent(bootstrap: bytes, *options: str) -> subprocess.CompletedProcess[bytes]:
    """An agent whose launcher is gone at once; what it writes first is on stdout all the same."""
    words = [sys.executable, *options, "-I", "-S", "-u", "-c", READ_LOADER]
    return subprocess.run(words, input=bootstrap, capture_output=True, check=False)


@pytest.mark.slow
def test_the_agent_of_a_job_loads_nothing_that_only_other_agents_need() -> None:
    lines = run_agent(agent_source(), "-X", "importtime").stderr.decode().splitlines()
    modules = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "_ctypes" in modules
    slow = {
        "ctypes",
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
@pytest.mark.parametrize(
    ("source", "text", "magic"),
    [
        pytest.param(agent_source(), agent_text(), frames.MAGIC, id="agent"),
        pytest.param(relay_source(), relay_text(), mux.MAGIC, id="relay"),
    ],
)
def test_a_host_with_the_same_python_compiles_nothing_and_another_one_asks_for_text(
    source: bytes, text: bytes, magic: bytes
) -> None:
    assert run_agent(source).stdout.startswith(magic)
    other = of_another_python(source)
    assert run_agent(other).stdout == WANTS_TEXT
    assert run_agent(other + text).stdout.startswith(WANTS_TEXT + magic)


@pytest.mark.parametrize("source", [agent_source(), relay_source()], ids=["agent", "relay"])
def test_a_python_that_is_too_old_says_so_and_which_it_is(source: bytes) -> None:
    old = "import sys; sys.version_info = (3, 7, 16); sys.version = '3.7.16 (default)'; "
    words = [sys.executable, "-I", "-S", "-u", "-c", old + READ_LOADER]
    ended = subprocess.run(words, input=source, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert ended.stderr.decode() == (
        f"no agent runs with {sys.executable}, which is Python 3.7.16: it needs 3.8 or newer"
    )


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("launcher.node.agent.agent", agent_text(AgentParts(moves_files=True, holds_memory=True))),
        ("launcher.node.agent.gateway_relay", relay_text()),
    ],
)
def test_what_runs_on_a_node_needs_only_the_standard_library_of_python_3_8(name: str, sent: bytes) -> None:
    """It runs on whatever Python a node has, so what it imports is asked of the sources
    that are sent there.
    """
    sources = sources_in(sent)
    assert name in sources
    for name_of, source in sources.items():
        tree = ast.parse(source, feature_version=(3, 8))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert {one.name.partition(".")[0] for one in node.names} <= sys.stdlib_module_names
            elif isinstance(node, ast.ImportFrom):
                if not node.level:
                    assert node.module
                    assert node.module.partition(".")[0] in sys.stdlib_module_names
                    continue
                folder = name_of.split(".")[: -node.level]
                base = ".".join([*folder, *([node.module] if node.module else [])])
                named = {base} if base in sources else {f"{base}.{one.name}" for one in node.names}
                assert named <= sources.keys()


def test_what_travels_is_two_folders_whole_and_the_names_of_variables() -> None:
    """A module that is put into one of the folders is on every node, and needs no entry anywhere."""
    travels = (
        sources_in(agent_text(AgentParts(moves_files=True, holds_memory=True))).keys()
        | sources_in(relay_text()).keys()
        | {"launcher.node.system.address", "launcher.node.workers.worker_shim"}
    )
    launcher = Path(bootstrap.__file__).parents[1]
    there = {
        ".".join(path.relative_to(launcher.parent).with_suffix("").parts)
        for folder in ("node", "wire")
        for path in (launcher / folder).rglob("*.py")
        if path.stem != "__init__"
    }
    assert travels == there | {"shared.variables", "shared.memory_messages"}


def test_what_moves_files_travels_only_to_where_files_are_moved() -> None:
    every, usual = (sources_in(agent_text(AgentParts(moves_files=moves))).keys() for moves in (True, False))
    assert usual < every
    assert every - usual >= {
        "launcher.node.files.sync_receiver",
        "launcher.node.files.collecting",
        "launcher.wire.manifest",
    }
    assert all("sync_" not in name for name in usual)


@pytest.mark.slow
def test_to_try_an_address_loads_neither_socket_nor_international_names(tmp_path: Path) -> None:
    tried = "reach.try_addresses(['127.0.0.1'], 1, '', 0.1)"
    program = f"from dslaunch.launcher.node.agent import reach; {tried}"
    assert not loaded_by(program, tmp_path) & {"socket", "encodings.idna", "stringprep"}
