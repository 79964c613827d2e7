"""A login on a server of this process: what is tried, what is never asked,
and what is said when it does not work.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paramiko
import pytest

from dslaunch.launcher.backends.openssh_words import Dropped
from dslaunch.launcher.backends.ssh_config import Target
from dslaunch.launcher.backends.ssh_login import SshFiles, log_in
from dslaunch.launcher.errors import EXIT_HOST, LaunchError
from tests.launcher.backends.test_ssh_files import make_key

HOST_KEY = paramiko.ECDSAKey.generate()
TIMEOUT_S = 20.0


class Server(paramiko.ServerInterface):
    """Accepts these public keys; afterwards it wants `further`, if that is not empty."""

    def __init__(
        self, accepted: tuple[Path, ...] = (), *, further: str = "", allowed: str = "publickey"
    ) -> None:
        self._accepted = {path.with_suffix(".pub").read_text().split()[1] for path in accepted}
        self._further = further
        self._allowed = allowed
        self.tried: list[str] = []

    def get_allowed_auths(self, username: str) -> str:
        return self._further or self._allowed

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        self.tried.append(key.get_base64())
        if "publickey" not in self._allowed or key.get_base64() not in self._accepted:
            return paramiko.AUTH_FAILED
        return paramiko.AUTH_PARTIALLY_SUCCESSFUL if self._further else paramiko.AUTH_SUCCESSFUL


Log = Callable[..., paramiko.Transport]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    """Logs in on such a server, whose host key is known."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    known = tmp_path / "known_hosts"
    known.write_text(f"w0 {HOST_KEY.get_name()} {HOST_KEY.get_base64()}\n")
    open_ones: list[paramiko.Transport] = []

    def log_in_on(
        server: Server, *keys: Path, ciphers: tuple[str, ...] = (), **changes: Any
    ) -> paramiko.Transport:
        ours, theirs = socket.socketpair()
        there = paramiko.Transport(theirs)
        there.add_server_key(HOST_KEY)
        if ciphers:
            there.get_security_options().ciphers = ciphers
        threading.Thread(target=_serve, args=(there, server), daemon=True).start()
        open_ones.append(there)
        target = Target(
            address="w0", port=22, user="ada", identities=tuple(map(str, keys)),
            has_only_these_identities=False,
            host_key_name="w0", known_hosts=(str(known),), unknown_host_keys="refuse", proxy_command=None,
            jumps=(),
            connect_timeout_s=TIMEOUT_S,
        )  # fmt: skip
        open_ones.append(log_in(target._replace(**changes), ours, SshFiles()))
        return open_ones[-1]

    yield log_in_on
    for one in open_ones:
        one.close()


def _serve(there: paramiko.Transport, server: Server) -> None:
    try:
        there.start_server(server=server)
    except (paramiko.SSHException, EOFError, OSError):
        there.close()


def refusal(log: Log, *given: Any, **more: Any) -> LaunchError:
    with pytest.raises(LaunchError) as refused:
        log(*given, **more)
    assert refused.value.exit_code == EXIT_HOST
    assert not isinstance(refused.value, Dropped), "nothing would change at a second attempt"
    return refused.value


def test_the_key_that_is_accepted_may_be_any_of_several(log: Log, tmp_path: Path) -> None:
    keys = [make_key(tmp_path / f"key{number}") for number in range(3)]
    server = Server((keys[1],))
    assert log(server, tmp_path / "missing", *keys).is_authenticated()
    assert len(server.tried) == 2


def test_a_second_factor_is_never_asked_for(
    log: Log, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    key = make_key(tmp_path / "key")
    refused = refusal(log, Server((key,), further="keyboard-interactive"), key)
    assert str(refused) == (
        "ada@w0: the key was accepted, and keyboard-interactive is asked for besides, which dslaunch never "
        "answers; allow the key alone there (AuthenticationMethods in sshd_config), or open a "
        "connection that OpenSSH shares (ssh -fNM HOST, with ControlPath in the ssh configuration)"
    )
    assert capfd.readouterr() == ("", "")


def test_a_second_key_may_be_the_second_factor(log: Log, tmp_path: Path) -> None:
    keys = (make_key(tmp_path / "key0"), make_key(tmp_path / "key1"))
    server = Server(keys, further="publickey")
    refused = refusal(log, server, *keys)  # this server never has enough
    assert len(server.tried) == 2
    assert "was refused" in str(refused)


def test_a_server_that_takes_passwords_only_is_said_to(log: Log, tmp_path: Path) -> None:
    refused = refusal(log, Server(allowed="password"), make_key(tmp_path / "key"))
    assert str(refused).startswith("ada@w0: it takes no key, only password, which dslaunch never answers; ")


def test_two_sides_without_a_common_cipher_are_told_so_at_once(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = ("aes128-gcm@openssh.com", "aes128-ctr")
    monkeypatch.setattr(paramiko.Transport, "_preferred_ciphers", ours)
    began = time.monotonic()
    refused = str(refusal(log, Server(), ciphers=("3des-cbc",)))
    assert time.monotonic() - began < TIMEOUT_S / 2
    assert (
        "w0 port 22 and dslaunch have no cipher in common: it offers 3des-cbc; allow one of these" in refused
    )
    assert refused.endswith("of these in its sshd_config (Ciphers): aes128-gcm@openssh.com, aes128-ctr")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "missing", "was refused (tried no key: there is no {path})"),
        (
            lambda folder: make_key(folder / "key", "secret"),
            "the private key is encrypted; load it with ssh-add first",
        ),
        (
            lambda folder: opened(make_key(folder / "key")),
            "{path} has mode 0644, which lets others use it: chmod 600",
        ),
    ],
)
def test_a_key_that_cannot_be_used_is_named_at_once(
    make: Callable[[Path], Path], words: str, log: Log, tmp_path: Path
) -> None:
    path = make(tmp_path)
    server = Server((path,) if path.exists() else ())
    refused = refusal(log, server, path, has_only_these_identities=True)
    assert words.format(path=path) in str(refused)
    assert server.tried == []


def opened(path: Path) -> Path:
    path.chmod(0o644)
    return path


def test_with_identities_only_the_agent_signs_for_those_that_are_named(
    log: Log, tmp_path: Path, ssh_agent: Callable[..., str]
) -> None:
    named, other = make_key(tmp_path / "named"), make_key(tmp_path / "other")
    agent = ssh_agent(named, other)
    named.unlink()  # its public half is left
    server = Server((named,))
    assert log(server, named, has_only_these_identities=True, agent=agent).is_authenticated()
    server = Server((other,))
    refusal(log, server, named, has_only_these_identities=True, agent=agent)
    assert len(server.tried) == 1
    assert log(Server((other,)), named, agent=agent).is_authenticated()


def test_an_agent_that_refuses_to_sign_is_named_and_the_next_key_is_tried(
    log: Log, tmp_path: Path, ssh_agent: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does with a key that a person must allow (ssh-add -c), or whose token is not there."""
    monkeypatch.setenv("SSH_ASKPASS", "/bin/false")
    guarded, other = make_key(tmp_path / "guarded"), make_key(tmp_path / "other")
    agent = ssh_agent("-c", guarded)
    guarded.unlink()
    assert log(Server((other,)), guarded, other, agent=agent).is_authenticated()
    assert "(tried no key: ssh-agent refuses to sign with " in str(
        refusal(log, Server((guarded,)), guarded, agent=agent)
    )


@pytest.mark.slow
def test_an_agent_that_does_not_answer_is_named(log: Log, tmp_path: Path) -> None:
    path = str(tmp_path / "agent")
    key = make_key(tmp_path / "key")
    key.unlink()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        said = str(refusal(log, Server(()), key, agent=path, connect_timeout_s=1.0))
    assert f"(tried no key: ssh-agent at {path} does not answer)" in said


@pytest.fixture
def ssh_agent(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts an ssh-agent that holds these keys, words of ssh-add; returns its socket."""
    import subprocess

    path = str(tmp_path / "agent")
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)

    def hold(*keys: str | Path) -> str:
        deadline = time.monotonic() + TIMEOUT_S
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.01)
        subprocess.run(["ssh-add", "-q", *keys], env={**os.environ, "SSH_AUTH_SOCK": path}, check=True)
        return path

    yield hold
    agent.terminate()
    agent.wait()


def test_a_host_key_of_another_kind_than_the_known_one_counts_as_changed(log: Log, tmp_path: Path) -> None:
    other = paramiko.ECDSAKey.generate()
    known = tmp_path / "known_hosts"
    known.write_text(f"w0 {other.get_name()} {other.get_base64()}\n")
    assert "its host key has CHANGED: known SHA256:" in str(refusal(log, Server()))
    known.write_text("")
    assert "its host key is not known (ecdsa-sha2-nistp256 SHA256:" in str(refusal(log, Server()))
    key = make_key(tmp_path / "key")
    log(Server((key,)), key, unknown_host_keys="add")
    assert HOST_KEY.get_base64() in known.read_text()


def test_what_is_no_sshd_may_be_tried_again(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    theirs.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    theirs.close()
    target = Target(
        address="w0", port=22, user="ada", identities=(), has_only_these_identities=True, host_key_name="w0",
        known_hosts=(), unknown_host_keys="add", proxy_command=None, jumps=(), connect_timeout_s=TIMEOUT_S,
    )  # fmt: skip
    with pytest.raises(Dropped, match="w0 port 22 accepted the connection but does not speak SSH: "):
        log_in(target, ours, SshFiles())
