"""The ssh side of a lab, as files: one key pair that opens every host,
one host key per host, who knows whom.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from .place import Place, address_of

HOST_KEY = "ssh_host_ed25519_key"
SSHD_CONFIG = """\
HostKey /etc/ssh/ssh_host_ed25519_key
PidFile /run/sshd.pid
UsePAM no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UseDNS no
PrintMotd no
PrintLastLog no
AcceptEnv LANG LC_*
Subsystem sftp /usr/lib/openssh/sftp-server
"""
SSH_CONFIG = """\
Host *
    SendEnv LANG LC_*
"""


def make_user_key(place: Place) -> None:
    _make_key(_user_key(place), comment="root@lab")


def make_host_key(place: Place, host: str) -> None:
    """Make the key of the host's sshd; one that is there is kept aside for `restore_host_key`."""
    key, first = _host_key(place, host), _first_host_key(place, host)
    if key.exists():
        if not first.exists():
            shutil.move(key, first)
        key.unlink(missing_ok=True)
    _make_key(key, comment=host)


def restore_host_key(place: Place, host: str) -> bool:
    """Put the host's first key back; True if it had another one."""
    key, first = _host_key(place, host), _first_host_key(place, host)
    if not first.exists():
        return False
    shutil.move(first, key)
    _write_public_half(key)
    return True


def write_etc_ssh(place: Place, host: str) -> None:
    """Write the host's /etc/ssh, host key included."""
    folder = place.host_folder(host) / "ssh"
    (folder / "sshd_config").write_text(SSHD_CONFIG)
    (folder / "ssh_config").write_text(SSH_CONFIG)
    make_host_key(place, host)


def note_known_hosts(place: Place, hosts: tuple[str, ...]) -> None:
    """Collect what every ~/.ssh/known_hosts says: each host by name and by address."""
    lines = []
    for index, host in enumerate(hosts):
        public = _host_key(place, host).with_suffix(".pub").read_text().split()
        lines.append(f"{host},{address_of(index)} {public[0]} {public[1]}\n")
    (place.root / "known_hosts").write_text("".join(lines))


def write_home_ssh(place: Place, home: Path) -> None:
    """Write ~/.ssh afresh: nothing else stays in it."""
    folder = home / ".ssh"
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    key = _user_key(place)
    for source, name in (
        (key, key.name),
        (key.with_suffix(".pub"), f"{key.name}.pub"),
        (key.with_suffix(".pub"), "authorized_keys"),
        (place.root / "known_hosts", "known_hosts"),
    ):
        target = folder / name
        target.touch(mode=0o600)
        target.write_bytes(source.read_bytes())


def _user_key(place: Place) -> Path:
    return place.root / "id_ed25519"


def _host_key(place: Place, host: str) -> Path:
    return place.host_folder(host) / "ssh" / HOST_KEY


def _first_host_key(place: Place, host: str) -> Path:
    return place.host_folder(host) / f"first_{HOST_KEY}"


def _make_key(path: Path, *, comment: str) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path], check=True)


def _write_public_half(key: Path) -> None:
    done = subprocess.run(["ssh-keygen", "-y", "-f", key], check=True, capture_output=True)
    key.with_suffix(".pub").write_bytes(done.stdout)
