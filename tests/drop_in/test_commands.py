"""The commands of DeepSpeed's and the ways to put them, and the package,
where programs find them: real processes.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dslaunch import drop_in
from dslaunch.drop_in.launch import read_world_info
from dslaunch.launcher.errors import LaunchError

SHOW = """
import json, os, subprocess, sys
from importlib.metadata import version
import deepspeed
child = [sys.executable, "-c", "import deepspeed; print(deepspeed.__version__)"]
print(json.dumps({
    "version": deepspeed.__version__,
    "metadata": version("deepspeed"),
    "rank": os.environ.get("RANK"),
    "arguments": sys.argv[1:],
    "child": subprocess.run(child, capture_output=True, text=True).stdout.strip(),
}))
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "show.py").write_text(SHOW)
    return tmp_path


def run(words: list[str], cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("DSLAUNCH_")}
    return subprocess.run(
        words, cwd=cwd, env=env | more, capture_output=True, text=True, timeout=60, check=False
    )


def shown(ended: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    """What each rank has printed."""
    assert ended.returncode == 0, ended.stderr
    lines = [line.partition("| ")[2] or line for line in ended.stdout.splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda one: str(one["rank"]))


def deepspeed_of_another(place: Path) -> str:
    """A folder with what looks like an installed DeepSpeed."""
    folder = place / "other"
    (folder / "deepspeed").mkdir(parents=True)
    (folder / "deepspeed" / "__init__.py").write_text("__version__ = '0.1'\n")
    info = folder / "deepspeed-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.1\n")
    return str(folder)


LAUNCH = [sys.executable, "-m", "dslaunch", "--launcher=local", "--num_gpus=1"]


@pytest.mark.slow
def test_the_workers_of_a_job_find_it(place: Path) -> None:
    (one,) = shown(run([*LAUNCH, "show.py", "--x"], place))
    assert one["version"] == one["metadata"] == one["child"] == drop_in.VERSION
    assert one["arguments"] == ["--local_rank=0", "--x"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "variable", "expected"),
    [
        ([], None, "0.1"),
        (["--drop_in=always"], None, drop_in.VERSION),
        ([], "always", drop_in.VERSION),
        (["--drop_in=auto"], "always", "0.1"),
    ],
)
def test_a_deepspeed_that_is_installed_wins_unless_told_otherwise(
    place: Path, option: list[str], variable: str | None, expected: str
) -> None:
    more = {} if variable is None else {drop_in.VARIABLE: variable}
    (one,) = shown(run([*LAUNCH, *option, "show.py"], place, PYTHONPATH=deepspeed_of_another(place), **more))
    assert one["version"] == one["metadata"] == one["child"] == expected


@pytest.mark.slow
def test_never_leaves_a_job_alone(place: Path) -> None:
    ended = run([*LAUNCH, "--drop_in=never", "show.py"], place)
    assert ended.returncode == 1
    assert "No module named 'deepspeed'" in ended.stderr


def test_a_mode_that_is_none_is_named(place: Path) -> None:
    ended = run([sys.executable, "-c", "pass"], place, DSLAUNCH_DROP_IN="maybe")
    assert ended.returncode == 0
    assert (
        ended.stderr == "DSLAUNCH_DROP_IN='maybe': must be one of auto, always, never; it counts as never\n"
    )


@pytest.mark.slow
def test_a_shell_that_has_sourced_the_lines_finds_package_and_commands(place: Path) -> None:
    lines = run([sys.executable, "-m", "dslaunch.drop_in", "--sh"], place).stdout
    script = f"{lines}\ndeepspeed --launcher=local --num_gpus=1 show.py -a 'b c'"
    other = deepspeed_of_another(place)
    (one,) = shown(run(["sh", "-c", script], place, PYTHONPATH=other))
    assert one["version"] == one["metadata"] == drop_in.VERSION
    assert one["arguments"] == ["--local_rank=0", "-a", "b c"]
    helps = [
        run(["sh", "-c", f"{lines}\n{name} {flag}"], place)
        for name, flag in (("ds", "--help"), ("ds_ssh", "-h"), ("ds_report", "--help"))
    ]
    assert [one.returncode for one in helps] == [0, 0, 0]
    assert "dslaunch report-env" in helps[-1].stdout
    assert (
        "usage: zero_to_fp32.py"
        in run(["sh", "-c", f"{shlex.quote(sys.executable)} {drop_in.BIN}/zero_to_fp32.py -h"], place).stdout
    )


@pytest.mark.slow
def test_the_program_for_one_node_runs_the_node_s_ranks(place: Path) -> None:
    world = base64.urlsafe_b64encode(json.dumps({socket.gethostname(): [0, 1]}).encode()).decode()
    words = ["--node_rank=0", "--master_addr=127.0.0.1", "--master_port=29561", f"--world_info={world}"]
    ended = run(
        [sys.executable, "-m", "deepspeed.launcher.launch", *words, "show.py", "--y"],
        place,
        PYTHONPATH=drop_in.FOLDER,
    )
    ranks = shown(ended)
    assert [one["rank"] for one in ranks] == ["0", "1"]
    assert [one["arguments"] for one in ranks] == [["--local_rank=0", "--y"], ["--local_rank=1", "--y"]]


@pytest.mark.slow
def test_a_program_that_calls_deepspeed_s_runner_goes_on_after_a_job_that_went_well(place: Path) -> None:
    call = "from deepspeed.launcher.runner import main; main(args={}); print('goes on')"
    words = ["--launcher=local", "--num_gpus=1", "show.py"]
    ended = run([sys.executable, "-c", call.format(words)], place, PYTHONPATH=drop_in.FOLDER)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("goes on\n")
    refused = run(
        [sys.executable, "-c", call.format(["--num_nodes=1", "-i=localhost", "show.py"])],
        place,
        PYTHONPATH=drop_in.FOLDER,
    )
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--num_nodes" in refused.stderr


@pytest.mark.parametrize(
    "given", ["None", "e30=", "bnVsbA==", base64.b64encode(b'{"a": [-1]}').decode(), "&"]
)
def test_a_world_that_is_none_is_refused(given: str) -> None:
    with pytest.raises(LaunchError, match="must be base64 of a JSON object"):
        read_world_info(given)
