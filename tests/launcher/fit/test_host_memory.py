"""Memory that a job may use on this machine."""

from __future__ import annotations

from pathlib import Path

from dslaunch.launcher.fit.host_memory import memory_here


def test_a_limit_of_a_cgroup_counts_where_it_is_below_the_kernel_s_total(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    group.mkdir()
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    (tmp_path / "self" / "mountinfo").write_text(f"1 2 0:3 / {group} rw - cgroup2 cgroup2 rw\n")
    assert memory_here(str(tmp_path)) is None
    (tmp_path / "meminfo").write_text("MemTotal:       2048 kB\nMemFree: 1 kB\n")
    (group / "memory.max").write_text("max\n")
    assert memory_here(str(tmp_path)) == 2 << 20
    (group / "memory.max").write_text("1048576\n")
    assert memory_here(str(tmp_path)) == 1 << 20
