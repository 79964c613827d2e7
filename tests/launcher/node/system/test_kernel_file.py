from __future__ import annotations

from pathlib import Path

from dslaunch.launcher.node.system.kernel_file import read_text


def test_a_file_of_the_kernel_is_read_whatever_bytes_it_has(tmp_path: Path) -> None:
    (tmp_path / "comm").write_bytes(b"caf\xc3\xa9 \xff\n")
    assert read_text(str(tmp_path / "comm")) == "caf\u00e9 \udcff\n"
    assert read_text("/proc/self/stat").split()[1] != ""


def test_one_that_cannot_be_read_is_empty(tmp_path: Path) -> None:
    assert read_text(str(tmp_path / "gone")) == read_text(str(tmp_path)) == ""
