"""A start on 32 real hosts of which three cannot be used: all three are in one report, and nothing runs
anywhere; and one on four, that needs no program for SSH.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import LAB_NAME
from tests.lab import Lab
from tests.launcher.command import BUSY_S, Command

pytestmark = pytest.mark.slow

NUM_HOSTS = 32
WORK = "import os; open('ran-' + os.environ['RANK'], 'w').close()"
CONNECT_TIMEOUT_S = 15  # 32 logins at once take 3 s of both cores of a small machine, if it does nothing else


@pytest.fixture(scope="module")
def many(lab: Lab) -> Iterator[Lab]:
    """A lab of its own; `lab` is asked for because it says whether there can be one."""
    with Lab.up(NUM_HOSTS, name=f"{LAB_NAME}-many") as made:
        yield made


@pytest.fixture
def folder(many: Lab, request: pytest.FixtureRequest) -> Iterator[Path]:
    path = many.shared / request.node.name[:80]
    path.mkdir()
    (path / "work.py").write_text(WORK)
    (path / "hosts").write_text("".join(f"{node.name} slots=1\n" for node in many.nodes))
    yield path
    many.restore()


@pytest.mark.exhaustive
def test_three_hosts_that_cannot_be_used_are_one_report_soon_after_the_timeout(
    many: Lab, folder: Path
) -> None:
    many.host("node7").sshd_stop()
    (many.host("node9").home / ".ssh" / "authorized_keys").write_text("")
    many.host("node11").new_host_key()
    command = Command(many.head, folder, "-H", "hosts", f"--connect_timeout={CONNECT_TIMEOUT_S}", "work.py")
    assert command.wait() == 3, command.err
    assert time.monotonic() - command.began_at < CONNECT_TIMEOUT_S + 1 + BUSY_S
    lines = [line for line in command.err.splitlines() if "waiting for" not in line]
    found = {line.split(": ")[1]: line.split(": ", 2)[2] for line in lines}
    assert found.keys() == {"node7", "node9", "node11"}
    assert "accepted the connection but does not speak SSH" in found["node7"]
    assert "root@node9 was refused" in found["node9"]
    assert "its host key has CHANGED" in found["node11"]
    assert command.out == ""
    assert list(folder.glob("ran-*")) == []
    assert many.wait_until_clean() == []


def test_all_start_though_neither_ssh_nor_pdsh_is_installed(lab: Lab) -> None:
    folder = lab.shared / "neither"
    folder.mkdir()
    (folder / "work.py").write_text(WORK)
    words = ("-H", str(lab.hostfile), "work.py")
    command = Command(lab.head, folder, *words, env={"PATH": "/nowhere"})
    assert command.wait() == 0, command.err
    assert len(list(folder.glob("ran-*"))) == 2 * len(lab.nodes)
    assert lab.wait_until_clean() == []
