"""Which host has which role, and the options that say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.inputs import env_file
from dslaunch.launcher.run import host_pool, make_plan

GOLDEN = Path(__file__).parents[1] / "golden"
SERVE = "vllm serve model --port 8000"
HOSTS = "node1 slots=2\nnode2 slots=2\nnode5 slots=4\nnode6 slots=4\n"
WITH_ROLE = ["--role", "rollout=node5", SERVE]
KEYED = "node1 slots=2\nnode5 slots=4 role=rollout\nnode6 slots=4 role=judge\n"


@pytest.fixture(autouse=True)
def _same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts").write_text(HOSTS)
    (tmp_path / "keyed").write_text(KEYED)
    for variable in [*os.environ]:
        if variable.startswith((*env_file.EXPORTED_PREFIXES, "DS_ENV_FILE", "CUDA_VISIBLE")):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(host_pool.socket, "gethostname", lambda: "head.example.com")
    monkeypatch.setattr(make_plan.sys, "executable", "/opt/py/bin/python")
    monkeypatch.chdir(tmp_path)


def run(words: list[str], capsys: pytest.CaptureFixture[str], code: int) -> tuple[str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--dry_run", *words])
    printed = capsys.readouterr()
    assert ended.value.code == code, printed.err
    return printed.out, printed.err


def test_a_dry_run_shows_each_host_s_role_and_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["-H", "hosts", "--role", "trainer=node[1-2]", "--role", "rollout=node5:2-3@node6", SERVE]
    words += [
        "--role_health",
        "rollout=http://:8000/health",
        "--role_restarts=rollout=3",
        "train.py",
        "--lr=1",
    ]
    text, _ = run(words, capsys, 0)
    assert text.replace(str(tmp_path), "/home/ada/job") == (GOLDEN / "dry-run-roles.txt").read_text(), (
        f"\n{text}"
    )


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        # hosts that no role names are trainers
        (["-H", "hosts", "--role", "rollout=node[5-6]", SERVE],
         ["node1 (node 0", "node2 (node 1", "node5 (rollout", "node6 (rollout"]),
        # --num_nodes and --num_gpus count trainers; the order of hosts is that of the hostfile
        (["-H", "hosts", "--num_nodes=1", "--num_gpus=1", "--role", "rollout=node1", SERVE],
         ["node2 (node 0", "node1 (rollout"]),
        (["-H", "hosts", "--include=node1@node5:1,3", "--role", "rollout=node5", SERVE],
         ["node1 (node 0", "node5 (rollout, by ssh), devices 1,3"]),
        # where the trainers are named, the rest takes no part
        (["-H", "hosts", "--role", "trainer=node2", "--role", "rollout=node5", SERVE],
         ["node2 (node 0", "node5 (rollout"]),
        (["-H", "keyed", "--role", "rollout", SERVE, "--role", "judge", "./judge.sh"],
         ["node1 (node 0", "node5 (rollout", "node6 (judge"]),
    ],
)  # fmt: skip
def test_a_host_s_role(words: list[str], lines: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text, _ = run([*words, "train.py"], capsys, 0)
    hosts = [line.removeprefix("host ") for line in text.splitlines() if line.startswith("host ")]
    assert len(hosts) == len(lines)
    assert all(host.startswith(line) for host, line in zip(hosts, lines, strict=True)), hosts


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--role", "rollout=node7", SERVE],
         "--role rollout 'node7': no host is named 'node7'; the hosts are node1, node2, node5, node6"),
        ([*WITH_ROLE, "--role", "judge=node[5-6]", "x"],
         "host node5 has two roles, by --role rollout=node5 and by --role judge=node[5-6], and a host has"),
        (["--role", "rollout=node[1-2]@node[5-6]", SERVE],
         "every host (node1, node2, node5, node6) has the role of a server, and none is left for"),
        (["--role", "rollout=node5", "--role_timeout=3"], "role rollout has no command, which stands behind"),
        (["--role", "trainer=node1 x"], "trainer is the role of the job's own program and takes no command"),
        (["--role", "trainer=node1"], "--role trainer=node1 is the only role in front of the script, and"),
        (["--role", "rollout", SERVE], "--role rollout has no host: none has role=rollout in the hostfile"),
        ([*WITH_ROLE, "--role_restarts=rolout=1"],
         "--role_restarts=rolout: no --role gives rolout a command; the roles with one are rollout"),
        ([*WITH_ROLE, "--role_health=rollout=ftp://x"],
         "'ftp://x' is neither a port nor an http address with one"),
        ([*WITH_ROLE, "--role_health=rollout=http://:8000/\udcff"],
         "is neither a port nor an http address with one"),
        (["--role_may_end=rollout"], "--role_may_end has no effect without --role"),
        ([*WITH_ROLE, "--include=node1"],
         "--include 'node1' leaves out node5, which has the role rollout; choose it too"),
        ([*WITH_ROLE, "--no_ssh"], "--role has no effect with --no_ssh"),
        ([*WITH_ROLE, "--launcher=openmpi"], "--role has no effect with --launcher=openmpi"),
        ([*WITH_ROLE, "--max_nodes=2"], "--role exclude each other: servers do not move"),
        ([*WITH_ROLE, "--notice_file=/x"], "--notice_file and --role exclude each other"),
        (["-H", "keyed"], "host node5 has role=rollout in the hostfile, and no --role gives rollout"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_with_what_to_do(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words if "-H" in words else ["-H", "hosts", *words]
    _, err = run([*given, "train.py"], capsys, 2)
    assert message in err
