"""What `python -m dslaunch.kernels.report` finds out: a broken kernel is named, a folder that cannot be
used has a reason.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dslaunch import kernels
from dslaunch.kernels import AdamShard, report
from dslaunch.kernels.compiled import _C


def test_the_build_names_what_the_processor_takes() -> None:
    build: dict[str, Any] = dict(_C.build_info())
    assert build["taken"] in build["instruction_sets"] or build["taken"] == "default"
    assert build["num_threads"] >= 1
    flags = next(
        line
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith(("flags", "Features"))
    )
    if "avx2" in build["instruction_sets"]:
        assert (build["taken"] != "default") == (" avx2" in flags)


@pytest.mark.slow
def test_every_step_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    found = report.kernels_that_work()
    steps = {name for name in kernels.__all__ if name.endswith("_step")}
    assert {one["name"] for one in found} == {*steps, "squared_norm"}
    assert [one for one in found if one["problem"]] == []


@pytest.mark.slow
def test_a_step_that_is_wrong_idle_or_breaks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.adamw_step

    def problem() -> str:
        return next(str(one["problem"]) for one in report.kernels_that_work() if one["name"] == "adamw_step")

    def wrong(shards: Iterable[AdamShard]) -> None:
        kept = list(shards)
        real(kept)
        kept[0].param[-1] += 0.5  # type: ignore[index]

    def breaks(shards: Iterable[AdamShard]) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(kernels, "adamw_step", wrong)
    assert problem() == "its result is not that of the plain loop"
    monkeypatch.setattr(kernels, "adamw_step", lambda shards: None)
    assert problem() == "it changes nothing"
    monkeypatch.setattr(kernels, "adamw_step", breaks)
    assert problem() == "RuntimeError: no such instruction"
    monkeypatch.setattr(report, "HYPER", {"lr": 0.1})
    assert re.match("not tried: nothing is known about .*beta1", problem())


def test_a_norm_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "squared_norm", lambda grads: 1.0)
    assert report._try_norm().startswith("it is 1.0, and should be ")


def test_the_cache_of_cuda_kernels_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Nvrtc:
        def version(self) -> str:
            raise RuntimeError("NVRTC is missing")

    fake: Any = ModuleType("dslaunch.kernels.cuda.compiler")
    fake.Nvrtc = Nvrtc
    fake.cache_folder = lambda environment: tmp_path
    (tmp_path / "a.cubin").write_bytes(bytes(100))
    (tmp_path / "b.cubin").write_bytes(bytes(20))
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "dslaunch.kernels.cuda", ModuleType("dslaunch.kernels.cuda"))
    monkeypatch.setitem(sys.modules, "dslaunch.kernels.cuda.compiler", fake)
    assert report.cuda_kernels() == {
        "problem": "NVRTC is missing",
        "compiler": "",
        "cache_folder": str(tmp_path),
        "num_cached": 2,
        "cached_bytes": 120,
    }


def test_a_folder_that_cannot_be_used_has_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert report.disk(str(tmp_path / "none"), 0)["problem"] == "No such file or directory"
    assert report.disk(str(tmp_path / "file"), 0)["problem"].startswith("nvme_path: not a folder")
    found = os.statvfs(tmp_path)
    assert "No space left" in report.disk(str(tmp_path), 2 * found.f_blocks * found.f_frsize)["problem"]
    assert os.listdir(tmp_path) == ["file"]


def test_without_a_test_the_speed_is_not_shown(tmp_path: Path) -> None:
    found = report.disk(str(tmp_path), 0)
    assert found["problem"] == ""
    assert not [name for name in found if name.endswith("_per_s")]
    assert os.listdir(tmp_path) == []
