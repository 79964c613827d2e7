from __future__ import annotations

import getpass
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.backends import ssh_config
from dslaunch.launcher.backends.ssh_config import Configuration, Target
from dslaunch.launcher.errors import EXIT_MISTAKE, LaunchError
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.options import SshOptions


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home, and no configuration of the system."""
    (tmp_path / ".ssh").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ssh_config, "SYSTEM_CONFIG", tmp_path / "system_config")
    return tmp_path


def reached(
    home: Path, text: str, *, name: str = "w0", host: dict[str, Any] | None = None, **options: Any
) -> Target:
    """How the host is reached with this text in ~/.ssh/config."""
    (home / ".ssh" / "config").write_text(text)
    return Configuration(SshOptions(**options)).resolve(Host(name=name, slots=1, **(host or {})))


def test_without_any_configuration_the_defaults_of_ssh_hold(home: Path) -> None:
    assert Configuration(SshOptions()).resolve(Host(name="w0", slots=1)) == Target(
        address="w0",
        port=22,
        user=getpass.getuser(),
        identities=tuple(f"{home}/.ssh/id_{kind}" for kind in ("rsa", "ecdsa", "ed25519")),
        has_only_these_identities=False,
        host_key_name="w0",
        known_hosts=(
            f"{home}/.ssh/known_hosts",
            f"{home}/.ssh/known_hosts2",
            "/etc/ssh/ssh_known_hosts",
            "/etc/ssh/ssh_known_hosts2",
        ),
        unknown_host_keys="refuse",
        proxy_command=None,
        jumps=(),
        connect_timeout_s=10.0,
    )


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        ("Host w0\n HostName 10.0.0.7", "address", "10.0.0.7"),
        ("Host w*\n HostName %h.cluster.lan", "address", "w0.cluster.lan"),
        ("Host other\n HostName 10.0.0.7", "address", "w0"),
        ("Host * !w0\n HostName 10.0.0.7", "address", "w0"),
        ("hostname=10.0.0.7", "address", "10.0.0.7"),
        ("Host w0\n HostName first\nHost *\n HostName second", "address", "first"),
        ("Host w0\n User ada", "user", "ada"),
        ("Host w0\n Port 2222", "port", 2222),
        ("Host w0\n ConnectTimeout 3", "connect_timeout_s", 3),
        ("Host w0\n IdentityFile /keys/a\n IdentityFile /keys/b", "identities", ("/keys/a", "/keys/b")),
        ("Host w0\n IdentityFile /keys/a\nHost *\n IdentityFile /keys/b", "identities",
         ("/keys/a", "/keys/b")),
        ("Host w0\n IdentitiesOnly yes", "has_only_these_identities", True),
        ("Host w0\n IdentitiesOnly no", "has_only_these_identities", False),
        # The name in known_hosts.
        ("Host w0\n HostName 10.0.0.7", "host_key_name", "10.0.0.7"),
        ("Host w0\n HostName W0.Lan", "host_key_name", "w0.lan"),
        ("Host w0\n Port 2222", "host_key_name", "[w0]:2222"),
        ("Host w0\n Port 22", "host_key_name", "w0"),
        ("Host w0\n HostKeyAlias front", "host_key_name", "front"),
        ("Host w0\n HostKeyAlias front\n Port 2222\n HostName 10.0.0.7", "host_key_name", "front"),
        ("Host w0\n StrictHostKeyChecking yes", "unknown_host_keys", "refuse"),
        ("Host w0\n StrictHostKeyChecking ask", "unknown_host_keys", "refuse"),
        ("Host w0\n StrictHostKeyChecking accept-new", "unknown_host_keys", "add"),
        ("Host w0\n StrictHostKeyChecking no", "unknown_host_keys", "add"),
        ("Host w0\n StrictHostKeyChecking off", "unknown_host_keys", "add"),
        ("Host w0\n StrictHostKeyChecking NO", "unknown_host_keys", "add"),
        ("Host w0\n ProxyCommand nc %h %p", "proxy_command", "nc w0 22"),
        ("Host w0\n HostName 10.0.0.7\n Port 2222\n ProxyCommand nc %h %p", "proxy_command",
         "nc 10.0.0.7 2222"),
        ("Host w0\n ProxyCommand none", "proxy_command", None),
        ("Host w0\n ProxyCommand NONE", "proxy_command", None),
        ("Host w0\n ProxyJump none", "jumps", ()),
        ("Host w0\n ProxyJump gate\n ProxyCommand nc %h %p", "proxy_command", None),
        ("# only a comment\n\n", "address", "w0"),
        ("Match host w0\n HostName 10.0.0.7", "address", "10.0.0.7"),
    ],
)  # fmt: skip
def test_the_configuration_of_openssh_holds(config: str, field: str, value: object, home: Path) -> None:
    assert getattr(reached(home, config), field) == value


def test_known_hosts_files_may_be_chosen(home: Path) -> None:
    target = reached(home, "Host w0\n UserKnownHostsFile ~/known /other/known")
    assert target.known_hosts[:2] == (f"{home}/known", "/other/known")


def test_paths_are_those_of_the_home(home: Path) -> None:
    assert reached(home, "Host w0\n IdentityFile ~/.ssh/job").identities == (f"{home}/.ssh/job",)


CONFIG = "Host w0\n User config\n Port 1\n IdentityFile /config\n ConnectTimeout 1"


@pytest.mark.parametrize(
    ("host", "options", "user", "port"),
    [
        ({}, {}, "config", 1),
        ({}, {"user": "option", "port": 2}, "option", 2),
        ({"user": "file"}, {"user": "option", "port": 2}, "file", 2),
        ({"port": 3}, {"user": "option", "port": 2}, "option", 3),
        ({"user": "file", "port": 3}, {"user": "option", "port": 2}, "file", 3),
        ({"user": "file", "port": 3}, {}, "file", 3),
    ],
)
def test_the_hostfile_wins_then_the_option_then_the_configuration(
    host: dict[str, Any], options: dict[str, Any], user: str, port: int, home: Path
) -> None:
    target = reached(home, CONFIG, host=host, **options)
    assert (target.user, target.port) == (user, port)


@pytest.mark.parametrize("timeout_s", [0.5, 2.5, 10.0])
def test_the_connect_timeout_may_be_a_fraction(timeout_s: float, home: Path) -> None:
    assert reached(home, "", connect_timeout_s=timeout_s).connect_timeout_s == timeout_s


def test_the_connect_timeout_option_wins_over_the_configuration(home: Path) -> None:
    assert reached(home, CONFIG, connect_timeout_s=5.0).connect_timeout_s == 5.0


def test_the_identity_option_is_tried_first(home: Path) -> None:
    (home / "key").write_text("")
    assert reached(home, CONFIG, identity="~/key").identities == (str(home / "key"), "/config")


def test_an_identity_that_is_not_there_is_refused_though_other_keys_might_do(home: Path) -> None:
    with pytest.raises(LaunchError, match="--ssh_identity=/option: there is no such file"):
        reached(home, CONFIG, identity="/option")


def test_the_port_of_a_host_is_that_of_its_proxy_command(home: Path) -> None:
    """What %p stands for is where we go, whichever line said it."""
    target = reached(home, "Host w0\n ProxyCommand nc %h %p", host={"port": 3})
    assert target.proxy_command == "nc w0 3"


def test_the_user_of_a_host_is_that_of_its_proxy_command(home: Path) -> None:
    target = reached(home, "Host w0\n ProxyCommand gate %r@%h", user="ada")
    assert target.proxy_command == "gate ada@w0"


def test_the_user_s_file_wins_over_the_system_s(home: Path) -> None:
    (home / "system_config").write_text("Host w0\n User system\n Port 7")
    target = reached(home, "Host w0\n User mine")
    assert (target.user, target.port) == ("mine", 7)


def test_a_given_configuration_is_the_only_one(home: Path) -> None:
    (home / "system_config").write_text("Host w0\n Port 7")
    (home / "given").write_text("Host w0\n User given")
    target = reached(home, "Host w0\n HostName 10.0.0.7", config=str(home / "given"))
    assert (target.user, target.port, target.address) == ("given", 22, "w0")


def hops(target: Target) -> list[tuple[str, str, int]]:
    return [(hop.user, hop.address, hop.port) for hop in target.jumps]


@pytest.mark.parametrize(
    ("config", "way"),
    [
        ("Host w0\n ProxyJump gate", [("me", "gate", 22)]),
        ("Host w0\n ProxyJump ada@gate:2222", [("ada", "gate", 2222)]),
        ("Host w0\n ProxyJump ssh://ada@gate:2222", [("ada", "gate", 2222)]),
        ("Host w0\n ProxyJump [fd00::1]:2222", [("me", "fd00::1", 2222)]),
        ("Host w0\n ProxyJump ada@[fd00::1]", [("ada", "fd00::1", 22)]),
        ("Host w0\n ProxyJump a,b:2,ada@c", [("me", "a", 22), ("me", "b", 2), ("ada", "c", 22)]),
        (
            "Host w0\n ProxyJump gate\nHost gate\n HostName 10.0.0.1\n User ada\n Port 2222",
            [("ada", "10.0.0.1", 2222)],
        ),
        # The jump's own jumps come before it.
        (
            "Host w0\n ProxyJump inner\nHost inner\n ProxyJump outer",
            [("me", "outer", 22), ("me", "inner", 22)],
        ),
        (
            "Host w0\n ProxyJump c\nHost c\n ProxyJump b\nHost b\n ProxyJump a",
            [("me", "a", 22), ("me", "b", 22), ("me", "c", 22)],
        ),
        # All others are reached through the one before, whatever their own entries say.
        ("Host w0\n ProxyJump a,b\nHost b\n ProxyJump other", [("me", "a", 22), ("me", "b", 22)]),
        # The usual way to write it: everything through the gate, which itself is reached directly.
        ("Host gate\n ProxyJump none\nHost *\n ProxyJump gate", [("me", "gate", 22)]),
    ],
)
def test_jumps_are_gone_through_in_order(
    config: str, way: list[tuple[str, str, int]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "me")
    assert hops(reached(home, config)) == way


def test_a_jump_does_not_take_the_hosts_options(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--ssh_port and --ssh_user say how to reach the hosts of the job, not the way there."""
    monkeypatch.setattr(getpass, "getuser", lambda: "me")
    target = reached(home, "Host w0\n ProxyJump gate", user="ada", port=2222)
    assert (target.user, target.port) == ("ada", 2222)
    assert hops(target) == [("me", "gate", 22)]


def test_the_first_jump_may_need_a_proxy_command(home: Path) -> None:
    target = reached(home, "Host w0\n ProxyJump gate\nHost gate\n ProxyCommand nc %h %p")
    assert [hop.proxy_command for hop in target.jumps] == ["nc gate 22"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("Host w0\n Port many", "ssh configuration: port 'many' is not a whole number"),
        ("Host w0\n ConnectTimeout 1.5", "ssh configuration: connecttimeout '1.5' is not a whole number"),
        ("Port 0", "ssh configuration: port '0' is not a whole number from 1 to 65535"),
        ("AddressFamily ipv4", "ssh configuration: addressfamily 'ipv4' is none of any, inet, inet6"),
        ("User a b",
         "config:1: cannot be used as an ssh configuration: user takes one value, and 2 are given: 'a b'"),
        ("Match localnetwork 10.0.0.0/8",
         "Match localnetwork is not supported; allowed are all, final, canonical, "),
        ("Match host", "Match host has no value"),
        ("ProxyCommand nc %x",
         "ssh configuration: 'nc %x': %x has no meaning there; allowed are %% %h %n %p %r"),
        ("IdentityFile ${NO_SUCH}/a",
         "ssh configuration: '${NO_SUCH}/a': there is no variable NO_SUCH; set it"),
        ("CanonicalizeHostname yes\nCanonicalizePermittedCNAMEs *:*",
         "CanonicalizePermittedCNAMEs is not supported"),
        ("Host w0\n ProxyJump a\nHost a\n ProxyJump w0", "leads through more than 8 hosts; is it a circle?"),
        ("Host *\n ProxyJump gate", "leads through more than 8 hosts; is it a circle?"),
        ("Host w0\n ProxyJump a:b", "ProxyJump 'a:b' is not [user@]host[:port]"),
        ("CanonicalizeHostname yes\nCanonicalDomains invalid\nCanonicalizeFallbackLocal no",
         "ssh configuration: what it says of w0 cannot be used: "),
        ("Host \"w0\n User x", "cannot be used as an ssh configuration"),
        ("singleword", "cannot be used as an ssh configuration"),
    ],
)  # fmt: skip
def test_a_configuration_that_is_broken_is_refused(config: str, message: str, home: Path) -> None:
    with pytest.raises(LaunchError) as refused:
        reached(home, config)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == EXIT_MISTAKE


def test_a_given_configuration_that_is_missing_is_refused(home: Path) -> None:
    with pytest.raises(LaunchError, match="--ssh_config=/no/such/file: there is no such file"):
        reached(home, "", config="/no/such/file")


def test_a_configuration_that_is_not_text_is_refused(home: Path) -> None:
    (home / "given").write_bytes(b"Host \xff\xfe\n")
    with pytest.raises(LaunchError, match="cannot be used as an ssh configuration"):
        reached(home, "", config=str(home / "given"))


def test_a_configuration_that_is_a_folder_is_refused(home: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot be used as an ssh configuration: .* directory"):
        reached(home, "", config=str(home))


def test_an_included_file_holds_too(home: Path) -> None:
    (home / ".ssh" / "more").write_text("Host w0\n User included\n")
    assert reached(home, "Include more\nHost *\n User other").user == "included"


def test_a_file_is_read_once_for_all_hosts(home: Path) -> None:
    path = home / ".ssh" / "config"
    path.write_text("Host w0\n User ada\nHost w*\n User bob\n Port 2222\n")
    configuration = Configuration(SshOptions())
    path.unlink()
    hosts = (Host(name="w0", slots=1), Host(name="w1", slots=1), Host(name="w1", slots=1, port=22))
    found = [configuration.resolve(host) for host in hosts]
    assert [(one.user, one.port) for one in found] == [("ada", 2222), ("bob", 2222), ("bob", 22)]


@pytest.mark.parametrize(
    ("config", "user"),
    [
        ('Match exec "true"\n User from-exec\n', "from-exec"),
        ('Match host w0 exec "false"\n User from-exec\nHost *\n User other\n', "other"),
        ('Match host w1 exec "touch %d/was-run"\n User from-exec\nHost *\n User other\n', "other"),
        ('Match exec "exit $(test %h = w0 && echo 0 || echo 1)"\n User from-exec\n', "from-exec"),
    ],
)
def test_the_command_of_a_match_is_run_where_what_stands_before_it_holds(
    config: str, user: str, home: Path
) -> None:
    assert reached(home, config).user == user
    assert not (home / "was-run").exists()


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        ("CanonicalizeHostname yes", "address", "w0"),
        ("CanonicalizeHostname yes\nCanonicalDomains lan up\nHost w0.up\n User there", "user", "there"),
        ("CanonicalizeHostname yes\nCanonicalDomains up\nCanonicalizeMaxDots 0", "address", "w0.up"),
        ("CanonicalizeHostname yes\nCanonicalDomains none up", "address", "w0"),
        ("CanonicalizeHostname yes\nCanonicalDomains up\nProxyJump none\nProxyCommand nc", "address", "w0"),
        ("CanonicalizeHostname always\nCanonicalDomains up\nProxyCommand nc", "address", "w0.up"),
        ("CanonicalizeHostname yes\nCanonicalDomains up\nMatch canonical\n Port 7", "port", 7),
        ("Match final host w0.lan\n User last\nHost w0\n HostName %h.lan", "user", "last"),
        ("Tag blue\nMatch tagged blue\n User ada", "user", "ada"),
        ("IdentityFile none", "identities", ()),
        ("IdentityAgent none", "agent", ""),
        ("IdentityAgent ~/agent", "agent", "{home}/agent"),
        ("IdentityAgent SSH_AUTH_SOCK", "agent", None),
        ("Host w1\n Include {home}/.ssh/more", "user", getpass.getuser()),
        ("Host w0\n Include {home}/.ssh/more\n Port 7", "user", "included"),
        ("Match host w0\n Include {home}/.ssh/more\n Port 7", "port", 7),
    ],
)
def test_what_ssh_does_with_a_rarer_line_is_done(
    config: str, field: str, value: object, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".ssh" / "more").write_text("User included\nHost other\n User other\n")
    known = socket.getaddrinfo

    def domain_name_system(name: Any, *given: Any, **more: Any) -> Any:
        return known("127.0.0.1" if name == "w0.up." else name, *given, **more)

    monkeypatch.setattr(socket, "getaddrinfo", domain_name_system)
    found = getattr(reached(home, config.format(home=home)), field)
    assert found == (value.format(home=home) if isinstance(value, str) else value)


def test_a_configuration_does_not_load_paramiko(tmp_path: Path) -> None:
    """So that the connections are begun before that: it takes as long as several logins."""
    (tmp_path / "config").write_text('Host *\n User ada\nMatch exec "true"\n Port 7\n')
    program = f"""
import sys
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.options.hosts import SshOptions
from dslaunch.launcher.backends.ssh_config import Configuration
print(Configuration(SshOptions(config={str(tmp_path / "config")!r})).resolve(Host(name="w0", slots=1)).port)
print("paramiko" in sys.modules)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.stdout.split() == ["7", "False"], ran.stderr
