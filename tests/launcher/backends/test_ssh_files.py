"""Private keys are read once for all connections of a job, and so are the errors in them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dslaunch.launcher.backends.ssh_login import SshFiles, UnusableKey


def make_key(path: Path, passphrase: str = "", kind: str = "ed25519") -> Path:
    size = ["-b", "1024"] if kind == "rsa" else []  # the usual one takes seconds to find
    subprocess.run(["ssh-keygen", "-q", "-t", kind, *size, "-f", path, "-N", passphrase], check=True)
    return path


def test_a_key_is_read_once_for_all_connections(tmp_path: Path) -> None:
    path = make_key(tmp_path / "key")
    files = SshFiles()
    key = files.private_key(str(path))
    path.unlink()
    assert files.private_key(str(path)) is key
    with pytest.raises(UnusableKey, match="there is no "):
        SshFiles().private_key(str(path))


@pytest.mark.parametrize("kind", ["ed25519", "rsa", "ecdsa"])
def test_every_usual_kind_of_key_is_read(kind: str, tmp_path: Path) -> None:
    assert SshFiles().private_key(str(make_key(tmp_path / "key", kind=kind))).can_sign()


def test_what_is_wrong_with_a_key_is_said_to_every_connection(tmp_path: Path) -> None:
    open_to_all = make_key(tmp_path / "open")
    open_to_all.chmod(0o644)
    (tmp_path / "text").write_text("no key")
    (tmp_path / "text").chmod(0o600)
    files = SshFiles()
    for path, why in (
        (make_key(tmp_path / "encrypted", "secret"), "is encrypted: ssh-add "),
        (open_to_all, f"has mode 0644, which lets others use it: chmod 600 {open_to_all}"),
        (tmp_path / "text", "is no private key that can be used: "),
        (tmp_path, "Is a directory"),
    ):
        for _ in range(2):
            with pytest.raises(UnusableKey, match=why):
                files.private_key(str(path))
