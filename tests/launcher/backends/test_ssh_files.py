"""Private keys are read once for all connections of a job, and so are the errors in them."""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import paramiko
import pytest

from dslaunch.launcher.backends.ssh import SshFiles


def make_key(path: Path, passphrase: str) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-f", path, "-N", passphrase], check=True)


def read(files: SshFiles, path: Path, kind: type[paramiko.PKey] = paramiko.Ed25519Key) -> paramiko.PKey:
    return files.private_key(str(path), kind, partial(kind.from_private_key_file, str(path)))


def test_a_key_is_read_once_for_all_connections(tmp_path: Path) -> None:
    path = tmp_path / "key"
    make_key(path, "")
    files = SshFiles()
    key = read(files, path)
    path.unlink()
    assert read(files, path) is key
    with pytest.raises(FileNotFoundError):
        read(SshFiles(), path)


def test_what_is_wrong_with_a_key_is_said_to_every_connection(tmp_path: Path) -> None:
    make_key(tmp_path / "encrypted", "secret")
    make_key(tmp_path / "plain", "")
    files = SshFiles()
    for _ in range(2):
        with pytest.raises(paramiko.PasswordRequiredException):
            read(files, tmp_path / "encrypted")
        with pytest.raises(paramiko.SSHException):
            read(files, tmp_path / "plain", paramiko.RSAKey)
    assert read(files, tmp_path / "plain").can_sign()


def test_paramiko_asks_for_keys_in_the_way_that_is_answered_once() -> None:
    """The name is private to paramiko: where it is another one, every connection reads its keys again."""
    assert hasattr(paramiko.SSHClient, "_key_from_filepath")
