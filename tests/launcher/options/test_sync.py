"""`--sync` and `--collect`: what is refused, and what a job is told to do with them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.options.sync import SyncOptions
from tests.launcher.command_line.test_cli import Fail, Parse, fail, parse

__all__ = ["fail", "parse"]


def test_what_was_asked_for(parse: Parse) -> None:
    words = (
        "--sync",
        ".",
        "--sync_force",
        "--collect",
        "*.log",
        "--collect=out/**",
        "--collect_to=back",
        "t.py",
    )
    assert parse(*words).sync == SyncOptions(".", True, ("*.log", "out/**"), "back")
    assert parse("t.py").sync == SyncOptions()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--sync_force", "--sync_force has no effect without --sync; add --sync=DIR, or leave it out"),
        (
            "--collect_to=x",
            "--collect_to has no effect without --collect; add --collect=GLOB, or leave it out",
        ),
        ("--collect=../x", "--collect=../x has .. in it; name what is in the job's folder, or begin with /"),
        ("--collect=", "--collect is empty; give it a value (GLOB), or leave it out"),
        ("--sync=. --no_ssh", "--sync has no effect with --no_ssh, where no connection leads from here"),
        ("--sync=. --launcher=openmpi", "--sync has no effect with --launcher=openmpi, where no connection"),
        (
            "--collect=x --launcher=slurm",
            "--collect has no effect with --launcher=slurm, where no connection",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(words: str, said: str, fail: Fail) -> None:
    assert fail(*words.split(), "t.py").startswith(said)


def dry_run(folder: Path, *words: str, home: str = "/nowhere") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dslaunch", "-H", "hosts", "--dry_run", *words, "train.py"],
        cwd=folder,
        env={**os.environ, "HOME": home},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_dry_run_says_what_would_go_where(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("x" * 100)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/a.log").write_text("x" * 100)
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1 cwd=/scratch/job\n")
    done = dry_run(tmp_path, "--sync", ".")
    assert f"\nsync: 3 files, 151 bytes, to node1:{tmp_path}, node2:/scratch/job\n" in done.stdout, (
        done.stderr
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("/", "--sync=/ is the root of all folders, which is not sent to other hosts; give the folder"),
        ("none", "--sync=none is no folder; give the folder that the job runs in, e.g. --sync ."),
        (".", "--sync=. is your home, which is not sent to other hosts; give the folder that the job needs"),
    ],
)
def test_a_folder_that_cannot_be_meant_is_refused(tmp_path: Path, given: str, said: str) -> None:
    (tmp_path / "hosts").write_text("node1 slots=1\n")
    done = dry_run(tmp_path, f"--sync={given}", home=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"dslaunch: {said}")


@pytest.mark.parametrize("place", ["a.txt", "a.txt/back", "gone/back"])
def test_a_place_that_takes_no_files_is_refused_before_the_job(tmp_path: Path, place: str) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "gone").symlink_to("nowhere")
    (tmp_path / "train.py").write_text("print('ran')")
    words = ("--num_gpus=1", "--collect=*", f"--collect_to={place}", "train.py")
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    found = tmp_path / place.partition("/")[0]
    assert done.stderr == (
        f"dslaunch: --collect_to={place}: {found} is no folder, so no file could come back; name another "
        "folder\n"
    )
    assert (done.returncode, done.stdout) == (2, "")


def test_on_this_machine_alone_nothing_is_sent(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("open('out.txt', 'w').write('result')\n")
    words = ["--num_gpus=1", "--sync", ".", "--collect", "*.txt", "train.py"]
    done = subprocess.run(
        [sys.executable, "-m", "dslaunch", *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "warning: --sync has no effect, for all ranks run on this machine" in done.stderr
    assert (tmp_path / "collected/localhost/out.txt").read_text() == "result"
    assert not (tmp_path / ".dslaunch").exists()


def test_the_options_are_one_subject() -> None:
    assert {"sync", "sync_force", "collect", "collect_to"} <= {one.name for one in cli.dslaunch.params}
