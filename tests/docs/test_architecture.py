"""docs/design/architecture.md lists the folders that there are, in the order of the contracts, and the
stage table as it is.
"""

from __future__ import annotations

import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import grimp
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

from dslaunch.runtime.placement.stage_policy import Placement, policy_for_stage

CHECKOUT = Path(__file__).resolve().parents[2]
PAGE = (CHECKOUT / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")
SHOWN = {Placement.REPLICATED: "replicated", Placement.SHARDED: "sharded"}


def _listed(package: str) -> list[list[str]]:
    """The folders of each line of a package's list."""
    table = PAGE.partition(f"| {package}/ |")[2].partition("\n\n")[0]
    return [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines() if row.startswith("| `")]


def _layers(package: str) -> list[list[str]]:
    contracts: list[dict[str, Any]] = tomllib.loads(
        (CHECKOUT / "pyproject.toml").read_text(encoding="utf-8")
    )["tool"]["importlinter"]["contracts"]
    (found,) = (one for one in contracts if one.get("containers") == [f"dslaunch.{package}"])
    layers: list[str] = found["layers"]
    return [sorted(layer.replace(" ", "").split("|")) for layer in layers]


@pytest.mark.parametrize("package", ["launcher", "runtime"])
def test_the_lists_are_the_folders_in_the_order_of_the_contracts(package: str) -> None:
    folders = sorted(path.parent.name for path in (CHECKOUT / package).glob("*/__init__.py"))
    listed = _listed(package)
    assert sorted(name for line in listed for name in line) == folders
    assert [sorted(line) for line in listed] == _layers(package)[: len(listed)]


def test_the_stage_table_is_the_code_s() -> None:
    for stage in range(4):
        row = policy_for_stage(stage)
        cells = [SHOWN[row.parameters], SHOWN[row.gradients], SHOWN[row.optimizer]]
        reshards = "yes " if row.reshard_after_forward else ""
        assert f"| {stage} | {' | '.join(cells)} | {reshards}|\n" in PAGE


@pytest.mark.parametrize("package", ["launcher", "runtime"])
def test_a_package_has_folders_and_few_files(package: str) -> None:
    files = [path.name for path in (CHECKOUT / package).glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= 7, files


def test_no_file_stands_in_a_circle_of_imports() -> None:
    graph = grimp.build_graph("dslaunch", exclude_type_checking_imports=False, cache_dir=None)
    modules = [name for name in graph.modules if name.startswith(("dslaunch.launcher.", "dslaunch.runtime."))]
    order = TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in modules})
    order.prepare()  # it names a circle
