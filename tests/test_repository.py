"""The files for those who work on the project say what its other files say."""

from __future__ import annotations

import ast
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

import dslaunch

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
FOLDERS = {
    *(".ci", ".github", "benchmarks", "docs", "hostfiles"),
    *("kernels", "launcher", "package", "runtime", "tests"),
}
SHIPPED = ("kernels", "launcher", "package", "runtime")
MOST_LINES, MOST_LINES_OF_FUNCTION = 600, 80


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def test_the_top_level_has_the_folders_that_the_readers_know() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no clone")
    folders = {name.partition("/")[0] for name in listed.stdout.splitlines() if "/" in name}
    assert folders <= FOLDERS


def test_a_commit_is_checked_by_what_make_check_runs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    lines = re.search(r"^check: setup\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert lines is not None
    wanted = [line.strip().replace("$(BIN)", ".venv/bin") for line in lines[1].splitlines()]
    (local,) = read(ROOT / ".pre-commit-config.yaml")["repos"]
    assert [hook["entry"] for hook in local["hooks"]] == wanted
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in local["hooks"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_programs_that_are_there_and_ends(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    commands = []
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 120
        assert all(("uses" in step) != ("run" in step) for step in job["steps"])
        commands += [step["run"] for step in job["steps"] if "run" in step]
    for name in re.findall(r"\.ci/[\w-]+", " ".join(commands)):
        assert os.access(ROOT / name, os.X_OK), name


def test_pull_requests_run_what_the_guide_for_contributors_names() -> None:
    workflow = read(ROOT / ".github/workflows/ci.yml")
    assert "pull_request" in workflow[True]  # YAML reads the key `on` so
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1]["run"].endswith(" .ci/run")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_asks_for_report_env_unless_it_is_a_wish(path: Path) -> None:
    form = read(path)
    required = {one["id"]: one.get("validations", {}).get("required", False) for one in form["body"]}
    assert required.get("environment", False) == (path.stem != "feature")
    assert ("dslaunch report-env" in path.read_text()) == (path.stem != "feature")


def test_the_citation_is_of_the_version_in_the_source() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == dslaunch.__version__
    released = citation.get("date-released", "not released yet")
    first, _, _ = (ROOT / "CHANGELOG.md").read_text().partition("\n")
    assert first == f"# dslaunch {citation['version']} ({released})"


def test_every_capability_of_the_change_log_is_one_line_with_a_link_to_its_page() -> None:
    _, title, rest = (ROOT / "CHANGELOG.md").read_text().partition("\n## ")
    lines = [line for line in rest.splitlines()[1:] if line and not line.startswith("## ")]
    assert title
    link = r"\[[^\]]+\]\([^)\s]+\)"
    assert [line for line in lines if not re.fullmatch(rf"- .*: {link}(, {link})*\.", line)] == []


def sources(*folders: str) -> dict[str, ast.Module]:
    """Return the Python files of these folders, by path; package/dslaunch/runtime is a link to runtime."""
    found = {path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")}
    return {str(path.relative_to(ROOT)): parsed(path) for path in sorted(found)}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_no_shipped_file_is_long() -> None:
    lengths = {path: len((ROOT / path).read_text().splitlines()) for path in sources(*SHIPPED)}
    assert {path: length for path, length in lengths.items() if length > MOST_LINES} == {}


def test_no_function_is_long() -> None:
    long = [
        f"{path}:{node.lineno}: {node.name}"
        for path, module in sources(*SHIPPED, "benchmarks", "docs", "tests").items()
        for node in ast.walk(module)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or node.lineno) - node.lineno >= MOST_LINES_OF_FUNCTION
    ]
    assert long == []


# The names of DeepSpeed's classes, which programs see; ours of the same name is behind them.
SAME_NAME = {"Init"}


def test_no_two_public_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path, module in sources("launcher", "package", "runtime").items():
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    assert {name: at for name, at in places.items() if len(at) > 1 and name not in SAME_NAME} == {}


# Folders whose docstrings begin with a verb ("Return ...") or a noun ("Sizes of ...").
PLAIN_DOCSTRINGS = ("benchmarks/", "kernels/", "launcher/", "package/", "runtime/")


def test_no_docstring_begins_with_what_of_or_that() -> None:
    riddles = [
        f"{path}:{line.lineno}: {line.value.value}"
        for path, module in sources(*PLAIN_DOCSTRINGS).items()
        for node in ast.walk(module)
        if path.startswith(PLAIN_DOCSTRINGS)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        for line in node.body
        if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
        if isinstance(line.value.value, str) and re.match(r"\s*(What|Of|That|Which|Who)\b", line.value.value)
    ]
    assert riddles == []


# The reasons in launcher/node/__init__.py, which hold for all its files.
REASONS_OF_NODE = re.compile(r"# here\b.*|typing is slow|standard library only", re.IGNORECASE)


def test_no_file_for_the_nodes_repeats_the_reasons_of_its_folder() -> None:
    folder = ROOT / "launcher/node"
    assert "[Note: Imports at need]" in (folder / "__init__.py").read_text()
    repeated = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in sorted(folder.rglob("*.py"))
        if path != folder / "__init__.py"
        for match in REASONS_OF_NODE.finditer(path.read_text())
    ]
    assert repeated == []
