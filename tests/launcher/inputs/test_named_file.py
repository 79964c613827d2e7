"""Files that a person names: a pipe of the shell is read to its end,
a named pipe or a device is refused at once.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dslaunch.launcher.backends.known_hosts import KnownHosts
from dslaunch.launcher.backends.openssh_config import read_file
from dslaunch.launcher.backends.ssh_login import SshFiles, UnusableKey
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs import named_file
from dslaunch.launcher.inputs.env_file import exported
from dslaunch.launcher.inputs.hostfile import read_hostfile
from dslaunch.launcher.inputs.named_file import read_named
from dslaunch.launcher.inputs.profile import read_profile
from dslaunch.launcher.output.job_report import check_place

AT_ONCE_S = 20.0  # a busy machine may take so long to start a program; a wait for a pipe has no end
PIPE = "it is a named pipe, which may be waited for without end"
pytestmark = pytest.mark.timeout(60)  # a pipe that is waited for must not hold up the other tests

READERS: dict[str, Callable[[Path], object]] = {
    "hostfile": read_hostfile,
    "profile": lambda path: read_profile(path, {}, typed=frozenset()),
    "environment": lambda path: exported({}, cwd="/", home=Path("/"), file_name=str(path)),
    "ssh configuration": lambda path: read_file(path, include_from=Path("/"), must_be_secure=False),
    "known hosts": lambda path: KnownHosts().known("worker-1", [str(path)]),
    "private key": lambda path: SshFiles().private_key(str(path)),
    "report": lambda path: check_place(path, option="--report"),
}


def dslaunch(
    folder: Path, words: list[str], *, stdin: int | None = subprocess.DEVNULL, given: bytes | None = None
) -> subprocess.CompletedProcess[bytes]:
    """One command with its output, which must end soon. `folder` is its home, too."""
    return subprocess.run(
        [sys.executable, "-m", "dslaunch", *words],
        cwd=folder,
        env={**os.environ, "HOME": str(folder)},
        stdin=stdin if given is None else None,
        input=given,
        capture_output=True,
        timeout=AT_ONCE_S,
        check=False,
    )


@pytest.mark.parametrize("what", READERS)
def test_a_named_pipe_is_refused_by_its_name_and_not_waited_for(what: str, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path, 0o600)
    with pytest.raises(
        (LaunchError, UnusableKey, OSError), match=r"is a named pipe|is no regular file"
    ) as caught:
        READERS[what](path)
    assert str(path) in str(caught.value)


def test_a_command_says_which_file_is_a_pipe(tmp_path: Path) -> None:
    path = tmp_path / ".deepspeed_env"
    os.mkfifo(path)
    (tmp_path / "train.py").touch()
    done = dslaunch(tmp_path, ["--num_gpus=1", "train.py"])
    assert done.returncode == 2
    assert done.stderr.decode() == (
        f"dslaunch: {path}: this environment file cannot be read ({PIPE}); make it a readable "
        "file, or remove it\n"
    )
    done = dslaunch(tmp_path, ["--hostfile=.deepspeed_env", "--dry_run", "train.py"])
    assert (done.returncode, PIPE in done.stderr.decode()) == (2, True)


def test_a_device_or_a_socket_is_refused_but_for_dev_null(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="it is a device"):
        read_named(Path("/dev/zero"))
    assert read_named(Path("/dev/null")) == b""
    (tmp_path / "none").symlink_to("/dev/null")  # how a person turns off a file that is always looked for
    assert read_named(tmp_path / "none") == b""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "sock"))
        with pytest.raises(OSError, match="it is a socket"):
            read_named(tmp_path / "sock")


def test_a_file_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_file, "MAX_BYTES", 1 << 20)
    path = tmp_path / "big"
    path.write_bytes(b"x" * (1 << 20))
    assert len(read_named(path)) == 1 << 20
    path.write_bytes(b"x" * ((1 << 20) + 1))
    with pytest.raises(OSError, match="it has more than 1 MiB"):
        read_named(path)


def test_what_the_shell_pipes_in_is_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = ["--launcher=ssh", "--dry_run", "train.py"]
    hosts = b"worker-1 slots=2\nworker-2 slots=2\n"
    (tmp_path / "hosts").write_bytes(hosts)
    expected = dslaunch(tmp_path, ["--hostfile=hosts", *words])
    assert expected.returncode == 0
    assert b"worker-2" in expected.stdout
    piped = dslaunch(tmp_path, ["--hostfile=/dev/stdin", *words], given=hosts)
    assert (piped.returncode, piped.stdout) == (0, expected.stdout)
    command = f"{sys.executable} -m dslaunch --hostfile <(sleep 0.1; cat hosts) {' '.join(words)}"
    by_shell = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, timeout=AT_ONCE_S, check=False
    )
    assert (by_shell.returncode, by_shell.stdout) == (0, expected.stdout), by_shell.stderr
