"""Settings of an ssh configuration, host by host, that OpenSSH can follow and dslaunch's own SSH cannot."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import socket
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import LaunchError
from .lean_paramiko import lean_paramiko
from .openssh_config import Values, expand

# Keys on a token, which OpenSSH looks for by itself.
_USUAL_TOKENS = ("~/.ssh/id_ed25519_sk", "~/.ssh/id_ecdsa_sk")
_LISTS = {
    "kexalgorithms": ("KexAlgorithms", "kex"),
    "hostkeyalgorithms": ("HostKeyAlgorithms", "key_types"),
    "ciphers": ("Ciphers", "ciphers"),
    "macs": ("MACs", "digests"),
}
# Further sources of verdicts on a host's key (it may be revoked), which only OpenSSH reads.
_HOST_KEYS = {"revokedhostkeys": "RevokedHostKeys", "knownhostscommand": "KnownHostsCommand"}
_PROBE_S = 0.2  # to connect to a socket of this machine
_CHANGES = "+-^"  # a list with this first sign adds to the default, takes from it, or moves to the front


class OpenSshHints(NamedTuple):
    """`only`: why only OpenSSH will do, in words that follow `because`; empty if our own SSH comes first.
    `is_wish`: our own SSH could be used as well. `has_keys`, `has_host_keys`: OpenSSH may have a key for the
    login, or know the host, where our own SSH does not.
    """

    only: str = ""
    is_wish: bool = False
    has_keys: bool = False
    has_host_keys: bool = False


def hints_of(found: Values, tokens: Mapping[str, str], identities: tuple[str, ...]) -> OpenSshHints:
    """Return the hints from the settings of one host. `tokens`: values of %h and the like; `identities`: key
    files.
    """
    hints = OpenSshHints(
        has_keys=_has_keys(found, identities),
        has_host_keys=_first(found, "verifyhostkeydns") in ("yes", "true"),
    )
    for key, name in _HOST_KEYS.items():
        if _is_set(found, key):
            return hints._replace(only=f"{name} is in the ssh configuration")
    if _first(found, "proxyusefdpass") == "yes" and _is_set(found, "proxycommand"):
        return hints._replace(only="ProxyUseFdpass is yes")
    for key, (name, ours) in _LISTS.items():
        value = _first(found, key)
        if value and not kept(_known(ours), value):
            return hints._replace(only=f"{name} in the ssh configuration names nothing else")
    jump = found.get("proxyjump", ("",))[0]
    if _is_set(found, "controlpath") and _is_open(found["controlpath"][0], tokens, jump):
        return hints._replace(only="a connection is open and shared (ControlPath)", is_wish=True)
    return hints


def _first(found: Values, key: str) -> str:
    return found.get(key, ("",))[0].lower()


def _is_set(found: Values, key: str) -> bool:
    return _first(found, key) not in ("", "none")


def _has_keys(found: Values, identities: tuple[str, ...]) -> bool:
    if any(_is_set(found, key) for key in ("pkcs11provider", "securitykeyprovider", "certificatefile")):
        return True
    others = () if "identityfile" in found else _USUAL_TOKENS
    return any(_is_on_token(Path(one).expanduser()) for one in (*identities, *others))


@functools.lru_cache(maxsize=1024)
def _is_on_token(path: Path) -> bool:
    """Tell whether the private key is on a token: then its file holds only a handle."""
    try:
        with Path(f"{path}.pub").open("rb") as file:
            return file.read(3) == b"sk-"
    except OSError:
        return False


def algorithms_of(found: Values) -> tuple[tuple[str, str], ...]:
    """Return the lists of the configuration, each with the name of paramiko's option of that kind."""
    return tuple((ours, _first(found, key)) for key, (_, ours) in _LISTS.items() if _first(found, key))


@functools.lru_cache(maxsize=1024)
def kept(names: tuple[str, ...], wanted: str) -> tuple[str, ...]:
    """Return the names that remain when a list of the configuration is applied, in the order of the result.

    Source: ssh_config(5), Ciphers; OpenSSH's kex_assemble_names()
    """
    from fnmatch import fnmatchcase

    sign = wanted[0] if wanted[0] in _CHANGES else ""
    patterns = wanted.removeprefix(sign).split(",")
    named = [name for pattern in patterns for name in names if fnmatchcase(name, pattern)]
    if sign == "-":
        return tuple(name for name in names if name not in named)
    return tuple(dict.fromkeys((*named, *(names if sign else ())) if sign != "+" else names))


@functools.cache
def _known(ours: str) -> tuple[str, ...]:
    """Return the algorithms of this kind that paramiko knows."""
    with lean_paramiko():
        import paramiko

    one, other = socket.socketpair()
    with one, other:
        return tuple(getattr(paramiko.Transport(one).get_security_options(), ours))


def _is_open(text: str, tokens: Mapping[str, str], jump: str) -> bool:
    """Tell whether OpenSSH listens at this ControlPath: a killed ssh may have left the socket there."""
    # Newer versions of OpenSSH hash the jump host into the path as well
    for jumps in dict.fromkeys(("", jump)):
        names = "".join((*(tokens[one] for one in "lhpr"), jumps))
        known = {**tokens, "C": hashlib.sha1(names.encode()).hexdigest(), "j": jump}
        with contextlib.suppress(LaunchError, OSError):  # an unknown token or variable, no file
            path = Path(expand(text, known, has_variables=True)).expanduser()
            if stat.S_ISSOCK(path.stat().st_mode) and not _is_refused(path):
                return True
    return False


def _is_refused(path: Path) -> bool:
    """Tell whether no process listens at this socket any more."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # it is busy, or has another problem that ssh will report
            return False
    return False
