"""Which settings of an ssh configuration lead to the system's ssh at once, and which after a refusal only."""

from __future__ import annotations

import socket
import subprocess
from pathlib import Path

import pytest

from dslaunch.launcher.backends import openssh_only
from dslaunch.launcher.backends.openssh_only import OpenSshHints, kept
from dslaunch.launcher.backends.ssh_config import Configuration
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.options.hosts import SshOptions

# Of Debian, Fedora and macOS, and what people have who never thought of this page.
USUAL = """
    SendEnv LANG LC_*
    HashKnownHosts yes
    GSSAPIAuthentication yes
    HostbasedAuthentication yes
    ForwardX11Trusted yes
    Ciphers aes256-gcm@openssh.com,chacha20-poly1305@openssh.com,aes256-ctr,aes128-gcm@openssh.com,aes128-ctr
    MACs hmac-sha2-256-etm@openssh.com,hmac-sha1-etm@openssh.com,umac-128-etm@openssh.com
    KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org,ecdh-sha2-nistp256
    HostKeyAlgorithms +ssh-rsa
    ControlMaster auto
    ControlPath {folder}/cm-%C
    ControlPersist 10m
    CertificateFile none
    PKCS11Provider none
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    return tmp_path


def hints(home: Path, text: str) -> OpenSshHints:
    path = home / "config"
    path.write_text("Host w0\n" + text)
    host = Host(name="w0", slots=1)
    return Configuration(SshOptions(config=str(path))).resolve(host).openssh


def test_what_everybody_has_changes_nothing(home: Path) -> None:
    assert hints(home, USUAL.format(folder=home)) == OpenSshHints()


@pytest.mark.parametrize(
    ("text", "only"),
    [
        ("KexAlgorithms sntrup761x25519-sha512@openssh.com", "KexAlgorithms"),
        ("Ciphers chacha20-poly1305@openssh.com", "Ciphers"),
        ("MACs umac-128@openssh.com,umac-64*", "MACs"),
        ("HostKeyAlgorithms sk-ssh-ed25519*", "HostKeyAlgorithms"),
    ],
)
def test_a_list_of_which_our_own_knows_nothing_is_kept_to(home: Path, text: str, only: str) -> None:
    assert hints(home, text).only == f"{only} in the ssh configuration names nothing else"
    assert not hints(home, text).is_wish
    assert not hints(home, text.replace(" ", " +")).only


@pytest.mark.parametrize(
    ("wanted", "left"),
    [
        ("b1", "b1"),
        ("b?,c,a2,other", "b1 b2 a2"),
        ("-a*", "b1 b2"),
        ("-*", ""),
        ("^b2,a2", "b2 a2 a1 b1"),
        ("+c", "a1 a2 b1 b2"),
        ("other", ""),
    ],
)
def test_a_list_leaves_what_it_names_in_its_order(wanted: str, left: str) -> None:
    assert kept(("a1", "a2", "b1", "b2"), wanted) == tuple(left.split())


def test_a_list_from_which_all_that_our_own_knows_is_taken_leaves_openssh(home: Path) -> None:
    assert hints(home, "Ciphers -*-ctr,*-gcm@openssh.com,*-cbc").only.startswith("Ciphers in the ssh")


@pytest.mark.parametrize(
    "text", ["RevokedHostKeys /etc/ssh/revoked", "KnownHostsCommand /usr/bin/sss_ssh_knownhosts %H"]
)
def test_what_says_of_host_keys_that_they_are_revoked_is_openssh_s(home: Path, text: str) -> None:
    name = text.split()[0]
    assert hints(home, text).only == f"{name} is in the ssh configuration"
    assert not hints(home, text).is_wish
    assert not hints(home, f"{name} none").only


def test_a_connection_that_is_handed_over_is_openssh_s(home: Path) -> None:
    assert hints(home, "ProxyUseFdpass yes\nProxyCommand way %h").only == "ProxyUseFdpass is yes"
    assert not hints(home, "ProxyUseFdpass yes").only


@pytest.mark.parametrize("name", ["cm-%C", "cm-%r@%n:%p", "cm-%h-${USER}"])
def test_a_connection_that_is_open_is_used_and_an_old_file_is_not(
    home: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("USER", "ada")
    text = f"HostName w0.lab\nUser ada\nPort 2222\nControlPath {home}/{name}\n"
    assert not hints(home, text).only
    asked = subprocess.run(
        ["ssh", "-F", str(home / "config"), "-G", "w0"], capture_output=True, text=True, check=True
    ).stdout
    (path,) = (line.split()[1] for line in asked.splitlines() if line.startswith("controlpath "))
    Path(path).touch()
    assert not hints(home, text).only
    Path(path).unlink()
    monkeypatch.chdir(home)  # a whole path may be longer than the address of a socket
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(Path(path).name)
        listener.listen()
        found = hints(home, text)
    assert found.only == "a connection is open and shared (ControlPath)"
    assert found.is_wish


def test_what_a_killed_ssh_has_left_is_no_open_connection(home: Path) -> None:
    path = home / "c"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert hints(home, f"ControlPath {path}\n").only
    assert path.is_socket()
    assert not hints(home, f"ControlPath {path}\n").only


@pytest.mark.parametrize(
    ("text", "has_keys", "has_host_keys"),
    [
        ("PKCS11Provider /usr/lib/opensc.so", True, False),
        ("SecurityKeyProvider /usr/lib/sk.so", True, False),
        ("CertificateFile ~/.ssh/mine-cert.pub", True, False),
        ("IdentityFile ~/.ssh/token", True, False),
        ("IdentityFile ~/.ssh/other", False, False),
        ("VerifyHostKeyDNS yes", False, True),
        ("VerifyHostKeyDNS no", False, False),
    ],
)
def test_what_openssh_has_besides_counts_after_a_refusal(
    home: Path, text: str, has_keys: bool, has_host_keys: bool
) -> None:
    (home / ".ssh" / "token.pub").write_text("sk-ssh-ed25519@openssh.com AAAA")
    (home / ".ssh" / "other.pub").write_text("ssh-ed25519 AAAA")
    assert hints(home, text) == OpenSshHints(has_keys=has_keys, has_host_keys=has_host_keys)


def test_the_usual_files_of_a_token_are_looked_for(home: Path) -> None:
    assert not hints(home, "User ada").has_keys
    (home / ".ssh" / "id_ed25519_sk.pub").write_text("sk-ssh-ed25519@openssh.com AAAA")
    openssh_only._is_on_token.cache_clear()
    assert hints(home, "User ada").has_keys
    assert not hints(home, "IdentityFile ~/.ssh/id_rsa").has_keys
