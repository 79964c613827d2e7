"""OpenSSH's configuration is read as `ssh -G` reads it: many generated files,
and the system's own ssh as the judge.
"""

from __future__ import annotations

import os
import pwd
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.backends.ssh_config import Configuration, Target
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.options import SshOptions

NUM_FILES = 100
NUM_QUICK = 15
NAMES = ("w0", "W1", "w1.lan", "gate", "node12", "10.0.0.7", "010.0.0.7", "::1")
PATTERNS = ("w0", "w*", "w?", "W1", "*.lan", "!w0", "gate", "node1?", "10.*", "*", "none-such", "::1", '"w0"')
SETTINGS = (
    *("HostName %h.lan", "HostName 10.0.0.9", "HostName W0.Up", "hostname=gate", 'HostName "%h"',
      "HostName 010.1.1.1"),
    *("User ada", "User=bob", 'User "a b"', "user  eve # comment", "User=root"),
    *("Port 2222", "Port ssh", "PORT = 77", "Port 22"),
    *("IdentityFile /keys/a", "IdentityFile /keys/%h-%r-%n-%p", "IdentityFile none",
      "IdentityFile '/keys/b c'"),
    *("IdentityFile %d/.ssh/own", "IdentityFile /keys/a", "IdentityFile ${SHELL}-key",
      "IdentityFile /k/%k-%u-%i"),
    *("IdentitiesOnly yes", "IdentitiesOnly true", "IdentitiesOnly no"),
    *("ProxyJump gate", "ProxyJump ada@gate:2222", "ProxyJump none", "ProxyJump gate # x",
      "ProxyJump a,b:2,c@[::2]:3"),
    *("ProxyCommand nc %h %p", "ProxyCommand none", "ProxyCommand=exec nc -x '%r' \"%n\" %% # no comment"),
    *("AddressFamily inet", "AddressFamily inet6", "AddressFamily any", "addressfamily INET"),
    *("ConnectTimeout 7", "ConnectTimeout 1m30s", "ConnectTimeout none"),
    *("HostKeyAlias front", "StrictHostKeyChecking no", "StrictHostKeyChecking accept-new",
      "StrictHostKeyChecking yes"),
    *("UserKnownHostsFile /k/%h /k/%n", "GlobalKnownHostsFile /k/all", "ServerAliveInterval 5",
      "SendEnv LANG LC_*"),
    *("CanonicalizeHostname yes", "CanonicalizeHostname always", "CanonicalizeHostname no",
      "CanonicalizeMaxDots 0"),
    *("CanonicalDomains localdomain invalid", "CanonicalDomains none", "CanonicalizeFallbackLocal yes"),
    *("ForwardAgent no", "# a comment", "", "Compression yes"),
)  # fmt: skip
CRITERIA = (
    *("all", "final", "canonical", "!final", "host w*", "host *.lan,!w0*", "originalhost w0,w1*",
      "!host gate"),
    *("user ada", "user !root,*", "localuser root", "!localuser root", "host=w0", 'host "w0,10.*"'),
    *('exec "test %h = w0"', 'exec "test %n:%p = gate:22"', '!exec "test %r = ada"', 'final host "*.lan"'),
    *("originalhost w0 user root", "all # comment", "canonical user ada"),
)  # fmt: skip


class Generated:
    """A configuration of blocks and settings in a random order, with files that it includes."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._random = random.Random(seed)
        self._folder = folder
        self._num_files = 0
        self.path = self._write(depth=0)

    def _write(self, *, depth: int) -> Path:
        self._num_files += 1
        path = self._folder / f"config{self._num_files}"
        lines: list[str] = []
        for _ in range(self._random.randint(1, 14 if depth == 0 else 5)):
            kind = self._random.random()
            if kind < 0.22:
                lines.append(f"Host {' '.join(self._random.choices(PATTERNS, k=self._random.randint(1, 3)))}")
            elif kind < 0.34:
                lines.append(f"Match {self._random.choice(CRITERIA)}")
            elif kind < 0.42 and depth < 2:
                lines.append(f"Include {self._write(depth=depth + 1)}")
            else:
                lines.append(self._random.choice(("", "  ", "\t")) + self._random.choice(SETTINGS))
        path.write_text("\n".join(lines) + "\n")
        return path


def asked(path: Path, name: str) -> dict[str, list[str]]:
    """What `ssh -G` says, by keyword."""
    ran = subprocess.run(["ssh", "-G", "-F", path, name], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise LaunchError(ran.stderr)
    found: dict[str, list[str]] = {}
    for line in ran.stdout.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    return found


def told_by_ssh(path: Path, name: str) -> dict[str, Any]:
    """The same in our terms; what `ssh -G` leaves unexpanded is expanded here."""
    found = asked(path, name)
    (address,), (port,), (user,) = found["hostname"], found["port"], found["user"]
    alias = found.get("hostkeyalias", [name])[0]
    me = pwd.getpwuid(os.getuid())
    values = {
        "%h": address,
        "%p": port,
        "%r": user,
        "%n": name,
        "%d": me.pw_dir,
        "%k": alias,
        "%u": me.pw_name,
    }
    values |= {"%i": str(os.getuid()), "${SHELL}": os.environ["SHELL"], "%%": "%"}

    def full(text: str) -> str:
        for token, value in values.items():
            text = text.replace(token, value)
        return text.replace("~", me.pw_dir, 1) if text.startswith("~") else text

    unsupported = ("_sk", "id_xmss", "id_dsa")  # kinds of keys that only ssh can use
    jump = found.get("proxyjump", ["none"])[0].replace("ssh://", "")
    return {
        "address": address,
        "port": int(port),
        "user": user,
        "identities": [
            full(one) for one in found["identityfile"] if one != "none" and not one.endswith(unsupported)
        ],
        "only": found["identitiesonly"][0] == "yes",
        "command": full(found["proxycommand"][0]) if "proxycommand" in found else None,
        "jumps": [] if jump == "none" else [one.partition("@")[2] or one for one in jump.split(",")],
        "family": found["addressfamily"][0],
        "timeout": 10 if found["connecttimeout"][0] == "none" else int(found["connecttimeout"][0]),
        "known": [*found["userknownhostsfile"][0].split(), *found["globalknownhostsfile"][0].split()],
        "strict": {"true": "refuse", "ask": "refuse", "accept-new": "add", "false": "add"}[
            found["stricthostkeychecking"][0]
        ],
        "alias": found.get("hostkeyalias", [None])[0],
    }


def told_by_us(path: Path, name: str) -> dict[str, Any]:
    target = Configuration(SshOptions(config=str(path))).resolve(Host(name=name, slots=1))
    alias = target.host_key_name if target.host_key_name == "front" else None
    return {
        "address": target.address,
        "port": target.port,
        "user": target.user,
        "identities": list(target.identities),
        "only": target.has_only_these_identities,
        "command": target.proxy_command,
        "jumps": [written(hop) for hop in target.jumps],
        "family": {0: "any", 2: "inet", 10: "inet6"}[target.family],
        "timeout": target.connect_timeout_s,
        "known": list(target.known_hosts),
        "strict": target.unknown_host_keys,
        "alias": alias,
    }


def answer(tell: Callable[[Path, str], dict[str, Any]], path: Path, name: str) -> dict[str, Any] | str:
    """What it tells, or why it refuses."""
    try:
        return tell(path, name)
    except LaunchError as refusal:
        return str(refusal)


def written(hop: Target) -> str:
    address = f"[{hop.address}]" if ":" in hop.address else hop.address
    return address if hop.port == 22 else f"{address}:{hop.port}"


@pytest.mark.skipif(shutil.which("ssh") is None, reason="the judge is the system's ssh")
@pytest.mark.parametrize(
    "seed",
    [
        *range(NUM_QUICK),
        *(1024, 1158),  # a host that is its own jump; a `Match final` where nothing else holds
        *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(NUM_QUICK, NUM_FILES)),
    ],
)
def test_a_generated_configuration_says_the_same_to_ssh_and_to_us(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", pwd.getpwuid(os.getuid()).pw_dir)
    monkeypatch.setenv("SHELL", "/bin/sh")
    path = Generated(tmp_path, seed).path
    for name in random.Random(seed).sample(NAMES, k=2):
        said, ours = answer(told_by_ssh, path, name), answer(told_by_us, path, name)
        if isinstance(said, str) or isinstance(ours, str):
            # `ssh -G` does not follow the jumps; that they lead in a circle shows only on the way.
            assert isinstance(ours, str), (name, said, path.read_text())
            assert isinstance(said, str) or "is it a circle" in ours, (name, ours, path.read_text())
            continue
        if (
            ours["jumps"] != said["jumps"] and said["jumps"]
        ):  # the jumps' own settings are those of other hosts
            said["jumps"] = ours["jumps"] = None
        assert ours == said, f"{name}\n{path.read_text()}"


def test_a_comment_need_not_be_utf_8_and_what_is_used_must(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_bytes(b"# f\xfcr den Cluster\nBanner \xfc\nPort 2222\n")
    assert told_by_us(path, "node1")["port"] == 2222
    path.write_bytes(b"Port 2222\nUser \xfc\n")
    with pytest.raises(LaunchError, match="cannot be used as an ssh configuration"):
        told_by_us(path, "node1")
