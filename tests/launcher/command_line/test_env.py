"""`dslaunch env`: the whole output is compared with golden files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.inputs import env_file
from dslaunch.launcher.run import host_pool

GOLDEN = Path(__file__).parents[1] / "golden"
Env = Callable[..., str]

CASES = {
    "env-all-ranks": ["-H", "hosts", "train.py"],
    "env-one-rank":
        ["-H", "hosts", "--rank=2", "--show_secrets", "--master_addr=10.1.1.1", "--master_port=4000",
         "train.py"],
    "env-this-machine": ["--launcher=local", "--venv_script=my env.sh", "train.py"],
}  # fmt: skip


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Env:
    """What `dslaunch env` prints in a folder with a hostfile and environment files of its own."""
    (tmp_path / "hosts").write_text("node1 slots=2 env.TMPDIR=/scratch\nnode2 slots=1\n")
    (tmp_path / ".deepspeed_env").write_text(
        "NCCL_DEBUG=INFO\nPATH=/opt/bin:$PATH\nPATH=/more:$PATH\nMY_TOKEN=secret\nCOPY=$MY_TOKEN\nRANK=9\n"
    )
    for variable in [*os.environ]:
        if variable.startswith(env_file.EXPORTED_PREFIXES) or variable == "DS_ENV_FILE":
            monkeypatch.delenv(variable)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5 0")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(host_pool, "count_accelerators", lambda: 0)
    monkeypatch.chdir(tmp_path)

    def shown(*words: str, exit_code: int = 0) -> str:
        with pytest.raises(SystemExit) as ended:
            cli.main(["env", *words])
        printed = capsys.readouterr()
        assert ended.value.code == exit_code, printed.err
        return (printed.err if exit_code else printed.out).replace(str(tmp_path), "/home/ada/job")

    return shown


@pytest.mark.parametrize("name", CASES)
def test_every_variable_is_shown_with_its_source(name: str, env: Env) -> None:
    text = env(*CASES[name])
    assert text == (GOLDEN / f"{name}.txt").read_text(), f"\n{text}"
    assert ("secret" in text) == ("--show_secrets" in CASES[name])


def test_a_rank_that_the_job_does_not_have_is_a_mistake(env: Env) -> None:
    text = env("-H", "hosts", "--rank=3", "train.py", exit_code=2)
    assert text == "dslaunch: --rank=3: the job has 3 ranks; give 0 to 2\n"


def test_a_host_that_would_have_to_be_asked_is_a_mistake(env: Env) -> None:
    Path("hosts").write_text("node1 slots=auto\n")
    text = env("-H", "hosts", "train.py", exit_code=2)
    assert text == (
        "dslaunch: hosts: slots=auto (node1) needs a look at the host, and this command contacts "
        "none; write slots=N\n"
    )


def test_without_a_script_it_says_what_to_write(env: Env) -> None:
    text = env(exit_code=2)
    assert text == "dslaunch: which script? Write: dslaunch env [options] script.py [its arguments]\n"
