"""Hosts on which a key and an algorithm of our own SSH are not enough: jobs start there by the system's ssh,
and one line says so and why.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.lab import Host, Lab
from tests.launcher.command import Command

pytestmark = pytest.mark.slow

CLEAN_WITHIN_S = 15.0
NEW_ONLY = ("KexAlgorithms=sntrup761x25519-sha512@openssh.com", "Ciphers=chacha20-poly1305@openssh.com")
ASKS_ONLY = ("PubkeyAuthentication=no", "KbdInteractiveAuthentication=yes")
Serve = Callable[..., None]


@pytest.fixture
def folder(folder: Path) -> Path:
    (folder / "show.py").write_text('import os; print("rank", os.environ["RANK"], flush=True)')
    return folder


@pytest.fixture
def serve(lab: Lab) -> Iterator[Serve]:
    """`serve(host, "Keyword=value", ...)`: its sshd takes new logins so, and as before after the test."""
    changed: list[Host] = []

    def start(host: Host, *settings: str, env: Mapping[str, str] | None = None) -> None:
        host.sshd_kill()
        changed.append(host)
        words = [word for one in settings for word in ("-o", one)]
        host.run(["/usr/sbin/sshd", "-E", "/var/log/sshd.log", *words], check=True, env=env)
        host.wait_for_sshd()

    yield start
    for host in changed:
        host.sshd_kill()
        host.sshd_start()


def config(lab: Lab, text: str) -> None:
    (lab.head.home / ".ssh" / "config").write_text(text)


def assert_runs(command: Command, *, on: str, num_ranks: int) -> None:
    assert command.wait() == 0, command.err
    assert {line.partition(":")[0] for line in command.out.splitlines()} == set(on.split())
    assert command.out.count("rank ") == num_ranks


def test_an_sshd_without_a_common_algorithm_is_reached_and_others_as_ever(
    lab: Lab, folder: Path, serve: Serve
) -> None:
    serve(lab.host("node1"), *NEW_ONLY)
    serve(lab.host("node2"), *NEW_ONLY)
    command = Command(lab.head, folder, "-H", "hosts", "-i", "node1:0@node2:0@node3:0", "show.py")
    assert_runs(command, on="node1 node2 node3", num_ranks=3)
    (line,) = [one for one in command.err.splitlines() if "ssh" in one]
    assert line == (
        "dslaunch: node[1-2]: reached by the system's ssh, because no key exchange is common with dslaunch's "
        "own SSH; --launcher=openssh begins with that"
    )
    assert lab.wait_until_clean(CLEAN_WITHIN_S) == []


def test_a_later_start_begins_with_what_got_in(lab: Lab, folder: Path, serve: Serve) -> None:
    """A site may count the logins that it refuses."""
    serve(lab.host("node1"), *NEW_ONLY)
    log = lab.host("node1").run(["cat", "/var/log/sshd.log"]).stdout
    (folder / "fail.py").write_text("raise SystemExit(5)")
    words = ("--max_restarts=1", "--min_uptime=0", "-H", "hosts", "-i", "node1:0", "fail.py")
    command = Command(lab.head, folder, *words)
    assert command.wait() == 5
    assert command.err.count("starting again (") == 1
    assert command.err.count("node1: reached by the system's ssh") == 1
    seen = lab.host("node1").run(["cat", "/var/log/sshd.log"]).stdout
    assert seen.count("Unable to negotiate") - log.count("Unable to negotiate") == 1


def test_a_shared_connection_that_serves_no_more_is_named(lab: Lab, folder: Path, serve: Serve) -> None:
    config(lab, "Host node1\n  ControlPath ~/.ssh/shared-%C\n")
    serve(lab.host("node1"), "MaxSessions=0")
    lab.head.run(["ssh", "-fNM", "node1"], check=True)
    serve(lab.host("node1"), *ASKS_ONLY)
    command = Command(lab.head, folder, "-H", "hosts", "-i", "node1", "show.py")
    assert command.wait() == 3
    because = "a connection is open and shared (ControlPath)"
    assert f"node1: by the system's ssh, because {because}: root@node1 was refused" in command.err
    lab.head.run(["ssh", "-O", "exit", "node1"], check=True)


def test_a_connection_that_is_open_already_serves_where_a_person_would_be_asked(
    lab: Lab, folder: Path, serve: Serve
) -> None:
    """The job uses the one that was opened beforehand, and leaves it open."""
    config(lab, "Host node1\n  ControlPath ~/.ssh/shared-%C\n")
    lab.head.run(["ssh", "-fNM", "node1"], check=True)
    serve(lab.host("node1"), *ASKS_ONLY)
    before = lab.head.processes()
    command = Command(lab.head, folder, "-H", "hosts", "-i", "node1:0@node2:0", "show.py")
    assert_runs(command, on="node1 node2", num_ranks=2)
    said = "node1: reached by the system's ssh, because a connection is open and shared (ControlPath)"
    assert said in command.err
    assert lab.head.processes() == before
    lab.head.run(["ssh", "-O", "exit", "node1"], check=True)
    command = Command(lab.head, folder, "-H", "hosts", "-i", "node1", "show.py")
    assert command.wait() == 3
    (line,) = command.err.splitlines()
    assert line.startswith("dslaunch: node1: root@node1: it takes no key, only keyboard-interactive, which ")
    assert "; by the system's ssh: root@node1 was refused (OpenSSH's ssh; that host takes keyboard-" in line
    assert lab.wait_until_clean(CLEAN_WITHIN_S) == []


def test_a_jump_host_that_asks_is_passed_by_its_open_connection(lab: Lab, folder: Path, serve: Serve) -> None:
    """As on most clusters: the login host wants a code, and the nodes behind it a key."""
    jump = lab.host("node1").address
    config(
        lab,
        f"Host {jump}\n  ControlPath ~/.ssh/shared-%C\n  StrictHostKeyChecking no\n"
        f"Host node2 node3\n  ProxyJump {jump}\n",
    )
    lab.head.run(["ssh", "-fNM", jump], check=True)
    serve(lab.host("node1"), *ASKS_ONLY)
    command = Command(lab.head, folder, "exec", "-H", "hosts", "-i", "node2@node3", "--", "hostname")
    assert command.wait() == 0, command.err
    assert sorted(command.out.split()) == ["node2", "node2:", "node3", "node3:"]
    assert "node[2-3]: reached by the system's ssh, because a connection is open and shared" in command.err
    lab.head.run(["ssh", "-O", "exit", jump], check=True)
    assert lab.wait_until_clean(CLEAN_WITHIN_S) == []


def test_one_that_needs_openssh_is_told_so_where_there_is_none(lab: Lab, folder: Path, serve: Serve) -> None:
    serve(lab.host("node1"), *NEW_ONLY)
    command = Command(lab.head, folder, "-H", "hosts", "-i", "node1", "show.py", env={"PATH": "/nowhere"})
    assert command.wait() == 3
    assert "have no key exchange in common" in command.err
    assert "; the system's ssh might do, but there is no program ssh on PATH; install " in command.err
    words = ("-H", "hosts", "--launcher=openssh", "show.py")
    command = Command(lab.head, folder, *words, env={"PATH": "/nowhere"})
    assert command.wait() == 3
    assert command.err.startswith("dslaunch: --launcher=openssh: there is no program ssh on PATH; install ")
    assert len(command.err.splitlines()) == 1
    config(lab, "Host node2\n  Ciphers chacha20-poly1305@openssh.com\n")
    command = Command(lab.head, folder, "-H", "hosts", "-i", "node2", "show.py", env={"PATH": "/nowhere"})
    assert command.wait() == 3
    assert command.err.startswith(
        "dslaunch: node2: Ciphers in the ssh configuration names nothing else, which needs the system's "
    )


def test_a_certificate_is_enough(lab: Lab, folder: Path, serve: Serve) -> None:
    """Of the host, by an authority that the user trusts; and of the user, in a file that is named."""
    node, home = lab.host("node1"), lab.head.home
    ca = lab.shared / "ca"
    lab.head.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ca)], check=True)
    sign = ["ssh-keygen", "-q", "-s", str(ca), "-I", "test"]
    lab.head.run([*sign, "-n", "root", "/root/.ssh/id_ed25519.pub"], check=True)
    node.run([*sign, "-h", "-n", "node1", "/etc/ssh/ssh_host_ed25519_key.pub"], check=True)
    serve(
        node,
        f"TrustedUserCAKeys={ca}.pub",
        "AuthorizedKeysFile=none",
        "HostCertificate=/etc/ssh/ssh_host_ed25519_key-cert.pub",
    )
    known = home / ".ssh" / "known_hosts"
    known.write_text(f"@cert-authority node1 {ca.with_suffix('.pub').read_text()}")
    command = Command(lab.head, folder, "-H", "hosts", "-i", "node1", "show.py")
    assert_runs(command, on="node1", num_ranks=2)
    assert "because the host key may be known to OpenSSH only" in command.err
    known.write_text(f"node1 {lab.host('node1').run(['cat', '/etc/ssh/ssh_host_ed25519_key.pub']).stdout}")
    lab.head.run(["mv", "/root/.ssh/id_ed25519-cert.pub", "/root/certificate"], check=True)
    config(lab, "Host node1\n  CertificateFile /root/certificate\n")
    command = Command(lab.head, folder, "-H", "hosts", "-i", "node1", "show.py")
    assert_runs(command, on="node1", num_ranks=2)
    assert (
        "because no key was accepted, and OpenSSH has others, on a token or with a certificate" in command.err
    )


def test_a_host_vouches_for_its_user(lab: Lab, folder: Path, serve: Serve) -> None:
    """HostbasedAuthentication: the head's own key, in the hands of ssh-keysign."""
    node = lab.host("node1")
    (node.home / ".shosts").write_text("head root\n")
    serve(
        node,
        "HostbasedAuthentication=yes",
        "HostbasedUsesNameFromPacketOnly=yes",
        "IgnoreRhosts=no",
        "PubkeyAuthentication=no",
    )
    config(lab, "Host *\n  HostbasedAuthentication yes\n  EnableSSHKeysign yes\n")
    add = "cp /etc/ssh/ssh_config /root/before; cat /root/.ssh/config >> /etc/ssh/ssh_config"
    lab.head.run(["sh", "-c", add], check=True)
    try:
        command = Command(lab.head, folder, "-H", "hosts", "-i", "node1", "show.py")
        assert_runs(command, on="node1", num_ranks=2)
    finally:
        lab.head.run(["cp", "/root/before", "/etc/ssh/ssh_config"], check=True)
    assert "because no key is taken, only hostbased;" in command.err


KRB5 = """
[libdefaults]
    default_realm = LAB
    dns_lookup_kdc = false
    dns_canonicalize_hostname = false
    rdns = false
[realms]
    LAB = {{
        kdc = head:8888
        database_name = {folder}/principal
        key_stash_file = {folder}/stash
        kdc_listen = 8888
        kdc_tcp_listen = 8888
    }}
[domain_realm]
    node1 = LAB
"""


@pytest.fixture
def kerberos(lab: Lab, folder: Path) -> Iterator[dict[str, str]]:
    """A realm with its KDC on the head, for root there and sshd on node1; the variables that lead to it."""
    programs = ("krb5kdc", "kdb5_util", "kadmin.local", "kinit", "kdestroy")
    missing = [one for one in programs if shutil.which(one, path="/usr/sbin:/usr/bin:/sbin:/bin") is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: apt-get install krb5-kdc krb5-admin-server krb5-user")
    (folder / "krb5.conf").write_text(KRB5.format(folder=folder))
    env = {
        "KRB5_CONFIG": str(folder / "krb5.conf"),
        "KRB5_KDC_PROFILE": str(folder / "krb5.conf"),
        "KRB5_KTNAME": str(folder / "keytab"),
    }
    head = lab.head

    def run(*words: str) -> None:
        head.run(list(words), env=env, check=True)

    run("kdb5_util", "create", "-s", "-r", "LAB", "-P", "master")
    users = folder / "users"
    for query in (
        *("addprinc -randkey root", "addprinc -randkey host/node1"),
        *("ktadd host/node1", f"ktadd -k {users} root"),
    ):
        run("kadmin.local", "-q", query)
    kdc = head.popen(["/usr/sbin/krb5kdc", "-n"], env=env)
    try:
        yield env
    finally:
        kdc.kill()
        kdc.wait()
        head.run(["kdestroy"], env=env)


@pytest.mark.exhaustive
def test_a_kerberos_ticket_is_enough(lab: Lab, folder: Path, serve: Serve, kerberos: dict[str, str]) -> None:
    serve(lab.host("node1"), "GSSAPIAuthentication=yes", "PubkeyAuthentication=no", env=kerberos)
    config(lab, "Host *\n  GSSAPIAuthentication yes\n")
    words = ("-H", "hosts", "-i", "node1@node2", "show.py")
    without = Command(lab.head, folder, *words, env=kerberos)
    assert without.wait() == 3
    (line,) = without.err.splitlines()
    assert "node1: root@node1: it takes no key, only gssapi-keyex or gssapi-with-mic" in line
    assert "takes gssapi-keyex, gssapi-with-mic); renew the Kerberos ticket (kinit); " in line
    lab.head.run(["kinit", "-kt", str(folder / "users"), "root"], env=kerberos, check=True)
    command = Command(lab.head, folder, *words, env=kerberos)
    assert_runs(command, on="node1 node2", num_ranks=4)
    assert "node1: reached by the system's ssh, because no key is taken, only gssapi-" in command.err
    command = Command(lab.head, folder, "--launcher=openssh", *words, env=kerberos)
    assert_runs(command, on="node1 node2", num_ranks=4)
    assert "reached" not in command.err
