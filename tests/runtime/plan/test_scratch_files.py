"""A process whose changes of files end with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.runtime.plan.scratch_files import folders_to_cover, mount_points

PROGRAM = """
import os, sys
from dslaunch.runtime.plan.scratch_files import enter

kept = open(sys.argv[1] + "/kept", "w")
print(enter(sys.argv[1] + "/layers"))
open("old", "w").write("changed")
os.mkdir("new")
os.remove("gone")
open(sys.argv[1] + "/elsewhere", "w").write("x")
print(sorted(os.listdir(".")), open("old").read())
kept.write("answer")
"""


@pytest.mark.slow
def test_changes_are_seen_by_the_process_alone(tmp_path: Path) -> None:
    here, other = tmp_path / "here", tmp_path / "other"
    here.mkdir()
    other.mkdir()
    for name in ("old", "gone"):
        (here / name).write_text("as it was")
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(other)], cwd=here, capture_output=True, text=True, check=True
    )
    why_not, seen = ran.stdout.splitlines()
    if why_not:
        pytest.skip(why_not)
    assert seen == "['new', 'old'] changed"
    assert {one.name: one.read_text() for one in here.iterdir()} == {"old": "as it was", "gone": "as it was"}
    assert (other / "kept").read_text() == "answer"
    assert sorted(one.name for one in other.iterdir()) == ["kept", "layers"]
    assert not list((other / "layers").iterdir())


def test_folders_with_mounts_below_them_are_covered_in_parts(tmp_path: Path) -> None:
    for name in ("a/b/c", "a/d", "e"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("a")
    mounts = mount_points(f"1 2 0:3 / {tmp_path} rw - ext4\n1 2 0:3 / {tmp_path}/a/b rw - ext4\n")
    found = [Path(one).relative_to(tmp_path) for one in folders_to_cover(str(tmp_path), mounts)]
    assert found == [Path("a/b"), Path("a/d"), Path("e")]


def test_a_mount_point_may_have_a_blank() -> None:
    assert mount_points("1 2 0:3 / /my\\040disk rw - ext4 /dev/a rw\n") == ("/my disk",)
