"""Every block of code in the documents runs, is read, or says why it is not; see tests/docs/pages.py."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from dslaunch.launcher.inputs.env_file import parse_env_file
from dslaunch.launcher.inputs.hostfile import parse_hostfile
from tests.docs.pages import Block, blocks_in, blocks_of, fault_of
from tests.docs.test_links import CHECKOUT, DOCUMENTS, name_of
from tests.exhaustive import few

PAGES = {page: blocks_of(page) for page in DOCUMENTS if "news" not in page.parts}
RUN_PAGES = [page for page, blocks in PAGES.items() if any(block.kind == "run" for block in blocks)]
IN_MAKE_TEST = "report.md"  # its program needs no torch
PAGE_TIMEOUT_S = 200


def test_each_block_of_code_is_run_or_says_why_not() -> None:
    faults = [
        f"{name_of(block.page)}:{block.line}: {fault}"
        for blocks in PAGES.values()
        for block in blocks
        if (fault := fault_of(block)) is not None
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("```python\nx\n```", "no comment before it"),
        ("<!-- a remark -->\n```sh\nx\n```", "no comment before it"),
        ("<!-- printed -->\n```sh\nx\n```", "no comment before it"),
        ("<!-- not run: -->\n```sh\nx\n```", "'not run' says nothing more"),
        ("<!-- file: -->\n```python\nx\n```", "'file' says nothing more"),
        ("<!-- run by: tests/none.py -->\n```sh\nx\n```", "there is no test 'tests/none.py'"),
        ("<!-- run -->\n```python\nx\n```", "commands to run are `sh`"),
        ("<!-- not run: needs 4 GPUs -->\n```sh\nx\n```", None),
        ("- a list\n\n  <!-- not run: needs 4 GPUs -->\n  ```python\n  x\n  ```", None),
        ("<!-- run -->\n```sh\nx\n```", None),
        ("```text\nx\n```", None),
        ('```json\n{"a": 1}\n```', None),
    ],
)
def test_a_block_without_a_mark_or_with_half_a_mark_is_found(source: str, fault: str | None) -> None:
    (block,) = blocks_in(source, Path("page.md"))
    assert block.text == "x\n" or block.language == "json"
    found = fault_of(block)
    assert (found is None) if fault is None else (found is not None and fault in found)


def test_pieces_of_python_are_python_and_import_what_is_there() -> None:
    """Also those that are not run."""
    pieces = [block for blocks in PAGES.values() for block in blocks if block.language == "python"]
    imports = [
        (name_of(block.page), node.module, alias.name)
        for block in pieces
        for node in ast.walk(ast.parse(block.text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "dslaunch"
        for alias in node.names
    ]
    assert len(imports) > 10
    missing = [one for one in imports if not hasattr(import_module(one[1] or ""), one[2])]
    assert missing == []


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=f"{name_of(block.page)}:{block.line}")
        for blocks in PAGES.values()
        for block in blocks
        if block.language in ("hostfile", "env")
    ],
)
def test_hostfiles_and_environment_files_are_read_as_they_stand(block: Block) -> None:
    if block.language == "hostfile":
        assert parse_hostfile(block.text, source="hosts")
    else:
        assert parse_env_file(block.text.encode(), source=".deepspeed_env")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", few(RUN_PAGES, lambda page: page.name == IN_MAKE_TEST), ids=lambda page: name_of(page)
)
def test_the_commands_of_a_page_run_in_its_order_and_print_what_it_shows(page: Path, tmp_path: Path) -> None:
    (tmp_path / "docs").symlink_to(CHECKOUT / "docs")
    printed = ""
    for block in PAGES[page]:
        if block.kind == "file":
            (tmp_path / block.detail).write_text(block.text)
        elif block.kind == "run":
            printed = run(block, tmp_path)
        elif block.kind == "printed":
            missing = [line for line in block.text.splitlines() if line not in printed.splitlines()]
            assert missing == [], f"{name_of(page)}:{block.line}: printed was\n{printed}"


def run(block: Block, folder: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    state = str(folder.with_name(f"{folder.name}-state"))  # without the jobs of other tests
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.text],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "XDG_STATE_HOME": state},
        capture_output=True,
        text=True,
        timeout=PAGE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{name_of(block.page)}:{block.line}:\n{done.stdout}{done.stderr}"
    return done.stdout
