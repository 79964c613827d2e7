"""OpenSSH's client configuration: the settings in its files for one host, as `ssh -G HOST` shows them.

A keyword that makes no difference to `dslaunch` is passed over, whatever its value; so is one that OpenSSH
does not know.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import LaunchError
from ..inputs.named_file import read_named
from .openssh_patterns import fits_list
from .secure_file import why_insecure

MAX_DEPTH = 16  # depth of files that include files
EXEC_TIMEOUT_S = 30.0  # for the command of a `Match exec`

# Keywords that are used here: those with one value, those that take the rest of the line, those with a list.
_REST_OF_LINE = frozenset(("proxycommand", "proxyjump", "knownhostscommand"))
_LISTS = frozenset(("userknownhostsfile", "globalknownhostsfile", "canonicaldomains"))
_USED = _REST_OF_LINE | _LISTS | frozenset((
    *("user", "port", "hostname", "hostkeyalias", "identityfile", "identitiesonly", "identityagent", "tag"),
    *("stricthostkeychecking", "checkhostip", "connecttimeout", "addressfamily", "canonicalizehostname",
      "canonicalizemaxdots"),
    *("canonicalizefallbacklocal", "canonicalizepermittedcnames"),
    # Only OpenSSH can follow these settings, see openssh_only.py.
    *("kexalgorithms", "hostkeyalgorithms", "ciphers", "macs", "controlpath", "proxyusefdpass"),
    *("certificatefile", "pkcs11provider", "securitykeyprovider", "verifyhostkeydns", "revokedhostkeys"),
))  # fmt: skip
_PARTS = ("host", "match", "include")
_WHITE = " \t\r\f"
_FAMILIES = {"any": socket.AF_UNSPEC, "inet": socket.AF_INET, "inet6": socket.AF_INET6}
_KEYWORD = re.compile(r"""[ \t]*"?([A-Za-z0-9]+)"?(?:[ \t]*=[ \t]*|[ \t]+|$)""")
_MATCH_WORD = re.compile(r"""[ \t]*(?:"([^"]*)"|([^ \t="]+))[ \t]*=?""")  # a criterion, or its value
_LOCAL_CRITERIA = ("host", "originalhost", "user", "localuser", "tagged", "exec")
_TOKEN = re.compile(r"%(.)")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")

Values = dict[str, tuple[str, ...]]


class ConfigLine(NamedTuple):
    """One line with a keyword. `files` are those that an Include leads to."""

    keyword: str
    rest: str
    place: str  # for messages
    files: tuple[tuple[ConfigLine, ...], ...] = ()


class Me(NamedTuple):
    """The user and the machine that connect."""

    user: str
    home: str
    hostname: str


def read_file(
    path: Path, *, include_from: Path, must_be_secure: bool, depth: int = 0
) -> tuple[ConfigLine, ...]:
    """Read the lines of a configuration file; a relative Include is looked for in the folder `include_from`.

    Its lines may run commands (ProxyCommand). So a file that must be secure, and each one that is included,
    is refused where another user owns it or may write to it, as OpenSSH does.

    Only a line feed ends a line, as for OpenSSH. Lines that are not used here need not be UTF-8.

    Errors: OSError; UnicodeDecodeError; LaunchError for a line without a keyword or value, or for files that
    include each other
    """
    if depth > MAX_DEPTH:
        raise LaunchError(f"{path}: Include leads through more than {MAX_DEPTH} files; is it a circle?")
    found = []
    refuse = why_insecure if must_be_secure else None
    for number, data in enumerate(read_named(path, refuse=refuse).split(b"\n"), start=1):
        text = data.decode("utf-8", "surrogateescape").strip(_WHITE)
        if not text or text.startswith("#"):
            continue
        place = f"{path}:{number}"
        match = _KEYWORD.match(text)
        if match is None or not text[match.end() :]:
            raise _unusable(place, f"{text!r} is not a keyword and its value")
        line = ConfigLine(match[1].lower(), text[match.end() :], place)
        if line.keyword in _USED or line.keyword in _PARTS:
            data.decode()  # Errors: as said above
        if line.keyword == "include":
            paths = [one for word in _words(line) for one in _included(word, include_from)]
            files = (
                read_file(one, include_from=include_from, must_be_secure=True, depth=depth + 1)
                for one in paths
            )
            line = line._replace(files=tuple(files))
        if line.keyword in _USED or line.keyword in _PARTS:
            found.append(line)
    return tuple(found)


def settings_of(name: str, given: Values, files: tuple[tuple[ConfigLine, ...], ...], me: Me) -> Values:
    """Return the settings of the host that is called `name`, keywords in lower case, always with `hostname`.

    `given` comes first, as from the command line. Where the files ask for it (CanonicalizeHostname, `Match
    final`), they are read a second time, with the host name that the first reading gave.

    Errors: LaunchError for settings that cannot be understood, or are not supported
    Source: ssh_config(5)
    """
    first = _Reading(name, name, given, me, is_final=False)
    first.read(files)
    found = first.values
    host = expand(found["hostname"][0], {"h": name}) if "hostname" in found else name
    canonicalizes = found.get("canonicalizehostname", ("no",))[0].lower()
    family = family_of(found)
    if _numeric(host):
        host = _numeric(host, family) or host
    elif canonicalizes in ("no", "false"):
        host = host.lower()
    else:
        host = _canonical(host.lower(), found, family, is_always=canonicalizes == "always")
    if canonicalizes in ("no", "false") and not first.wants_final:
        return {**found, "hostname": (host,)}
    second = _Reading(host, name, {**found, "hostname": (host,)}, me, is_final=True)
    second.read(files)
    return second.values


def expand(text: str, tokens: Mapping[str, str], *, has_variables: bool = False) -> str:
    """Replace `%h` and the like, and `${NAME}` where these are allowed.

    Errors: LaunchError for a token or variable without a value here
    """

    def token(match: re.Match[str]) -> str:
        if match[1] != "%" and match[1] not in tokens:
            known = " ".join(f"%{one}" for one in tokens)
            raise LaunchError(
                f"ssh configuration: {text!r}: %{match[1]} has no meaning there; allowed are %% {known}; "
                "or use --launcher=openssh"
            )
        return "%" if match[1] == "%" else tokens[match[1]]

    def variable(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise LaunchError(f"ssh configuration: {text!r}: there is no variable {match[1]}; set it")
        return os.environ[match[1]]

    # Replace all in one pass, so that a `%` in the value of a token stays.
    pattern = re.compile(f"{_TOKEN.pattern}|{_VARIABLE.pattern}" if has_variables else _TOKEN.pattern)
    return pattern.sub(
        lambda one: token(one) if one[0][0] == "%" else variable(_VARIABLE.match(one[0]) or one), text
    )


def tokens_of(name: str, values: Values, me: Me) -> dict[str, str]:
    """Return the values of `%h` and the like once the settings are known (%C and %j are not supported)."""
    return {
        "h": values["hostname"][0],
        "n": name,
        "p": values.get("port", ("22",))[0],
        "r": values.get("user", (me.user,))[0],
        "k": values.get("hostkeyalias", (name,))[0],
        "u": me.user,
        "d": me.home,
        "i": str(os.getuid()),
        "l": me.hostname,
        "L": me.hostname.partition(".")[0],
    }


class _Reading:
    """One reading of all files for one host. The first value of a keyword counts; values of IdentityFile are
    collected.
    """

    def __init__(self, host: str, original: str, given: Values, me: Me, *, is_final: bool) -> None:
        self.values = dict(given)
        self.wants_final = False
        self._host = host
        self._original = original
        self._me = me
        self._is_final = is_final

    def read(self, files: tuple[tuple[ConfigLine, ...], ...]) -> None:
        for lines in files:
            self._read(lines, is_active=True)

    def _read(self, lines: tuple[ConfigLine, ...], *, is_active: bool) -> None:
        holds = is_active
        for line in lines:
            if line.keyword == "host":
                holds = self._is_host(_words(line)) and is_active
            elif line.keyword == "match":
                holds = self._matches(line, is_active=is_active)
            elif line.keyword == "include":
                for one in line.files:
                    self._read(one, is_active=holds)
            elif holds:
                self._take(line)

    def _take(self, line: ConfigLine) -> None:
        key = line.keyword
        if self._is_said(key):
            return
        values = _words(line) if key not in _REST_OF_LINE else (line.rest,)
        if key == "proxyjump":
            values = (line.rest.partition("#")[0].rstrip(),)
        elif key == "connecttimeout" and values[0].lower() == "none":
            return
        if len(values) != 1 and key not in _LISTS:
            raise _unusable(line.place, f"{key} takes one value, and {len(values)} are given: {line.rest!r}")
        if key == "identityfile":
            values = tuple(dict.fromkeys((*self.values.get(key, ()), *values)))
        self.values[key] = values

    def _is_said(self, key: str) -> bool:
        """Tell whether an earlier line set this keyword; ProxyCommand and ProxyJump exclude each other."""
        if key == "proxycommand" and self.values.get("proxyjump", ("none",))[0].lower() != "none":
            return True
        if key == "proxyjump" and "proxycommand" in self.values:
            return True
        return key in self.values and key != "identityfile"

    def _is_host(self, patterns: tuple[str, ...]) -> bool:
        return fits_list(patterns, self._host)

    def _matches(self, line: ConfigLine, *, is_active: bool) -> bool:
        """Tell whether all criteria of a Match hold; after one that fails, no further `exec` command is run.

        A `final` asks for a second reading of all files, even if its Match does not hold.
        """
        words = _match_words(line)
        holds = is_active
        for word in words:
            is_negated, name = word.startswith("!"), word.removeprefix("!").lower()
            if name == "all":
                holds = holds and not is_negated
            elif name in ("final", "canonical"):
                self.wants_final = self.wants_final or name == "final"
                holds = holds and self._is_final != is_negated
            elif name in _LOCAL_CRITERIA:
                value = next(words, None)
                if value is None:
                    raise _unusable(line.place, f"Match {name} has no value")
                holds = holds and self._is_met(name, value) != is_negated
            else:
                allowed = ", ".join(("all", "final", "canonical", *_LOCAL_CRITERIA))
                raise _unusable(
                    line.place,
                    f"Match {name} is not supported; allowed are {allowed}; or use --launcher=openssh",
                )
        return holds

    def _is_met(self, name: str, value: str) -> bool:
        me, values = self._me, self.values
        host = self._host
        if not self._is_final and "hostname" in values:
            host = expand(values["hostname"][0], {"h": self._original})
        if name == "exec":
            tokens = tokens_of(self._original, {**values, "hostname": (host,)}, me)
            return _succeeds(expand(value, tokens))
        subject = {
            "host": host.lower(),
            "originalhost": self._original.lower(),
            "user": values.get("user", (me.user,))[0],
            "localuser": me.user,
            "tagged": values.get("tag", ("",))[0],
        }[name]
        return fits_list((value.lower() if "host" in name else value).split(","), subject)


def _words(line: ConfigLine) -> tuple[str, ...]:
    """Return the values of a line: quotes hold words together, and `#` at the beginning of one starts a
    comment.
    """
    words: list[str] = []
    text, at = line.rest, 0
    while at < len(text):
        if text[at] in " \t":
            at += 1
            continue
        if text[at] == "#":
            break
        word, quote = "", ""
        while at < len(text) and (quote or text[at] not in " \t"):
            one = text[at]
            if one == "\\" and at + 1 < len(text) and text[at + 1] in ("\"'\\" if quote else "\"'\\ "):
                word, at = word + text[at + 1], at + 1
            elif one == quote:
                quote = ""
            elif not quote and one in "\"'":
                quote = one
            else:
                word += one
            at += 1
        if quote:
            raise _unusable(line.place, f"a quote never closes in {text!r}")
        words.append(word)
    if not words:
        raise _unusable(line.place, f"{line.keyword} has no value")
    return tuple(words)


def _match_words(line: ConfigLine) -> Iterator[str]:
    """Yield the criteria of a Match and their values; the rules of quoting are other ones here than in all
    other lines.
    """
    at = 0
    while at < len(line.rest) and not line.rest[at:].lstrip().startswith("#"):
        match = _MATCH_WORD.match(line.rest, at)
        if match is None:
            raise _unusable(line.place, f"a quote never closes in {line.rest!r}")
        yield match[1] if match[1] is not None else match[2]
        at = match.end()


def _included(word: str, folder: Path) -> list[Path]:
    return [Path(one) for one in sorted(glob.glob(str(folder / Path(word).expanduser())))]


def _succeeds(command: str) -> bool:
    """Tell whether the command succeeds. Errors: LaunchError if it does not end"""
    import subprocess

    try:
        ran = subprocess.run(
            [os.environ.get("SHELL") or "/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            timeout=EXEC_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"ssh configuration: Match exec {command!r} cannot be used: {error}") from None
    return ran.returncode == 0


def family_of(values: Values) -> socket.AddressFamily:
    """Return the address family of AddressFamily. Errors: LaunchError for another word"""
    value = values.get("addressfamily", ("any",))[0]
    if value.lower() not in _FAMILIES:
        raise LaunchError(f"ssh configuration: addressfamily {value!r} is none of {', '.join(_FAMILIES)}")
    return _FAMILIES[value.lower()]


def _numeric(host: str, family: socket.AddressFamily = socket.AF_UNSPEC) -> str | None:
    """Return the usual form of an address of this family; None for anything else."""
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, family, socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        return str(socket.getnameinfo(found[0][4], socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0])
    return None


def _canonical(host: str, found: Values, family: socket.AddressFamily, *, is_always: bool) -> str:
    """Return the name with the first domain in which it is known, as CanonicalizeHostname wants it."""
    if found.get("canonicalizepermittedcnames", ("none",))[0].lower() != "none":
        raise LaunchError(
            f"ssh configuration: what it says of {host} cannot be used: CanonicalizePermittedCNAMEs is not "
            "supported; leave it out, write the name itself with HostName, or use --launcher=openssh"
        )
    is_direct = all(found.get(key, ("none",))[0].lower() == "none" for key in ("proxycommand", "proxyjump"))
    max_dots = found.get("canonicalizemaxdots", ("1",))[0]
    if not max_dots.isdecimal():
        raise LaunchError(f"ssh configuration: canonicalizemaxdots {max_dots!r} is not a whole number")
    if not (is_direct or is_always):
        return host
    if host.endswith("."):
        if _is_known(host, family):
            return host[:-1]
    elif host.count(".") > int(max_dots):
        return host
    else:
        for domain in found.get("canonicaldomains", ()):
            if domain.lower() == "none":
                break
            if _is_known(f"{host}.{domain}.", family):
                return f"{host}.{domain}"
    if found.get("canonicalizefallbacklocal", ("yes",))[0].lower() in ("no", "false"):
        raise LaunchError(
            f"ssh configuration: what it says of {host} cannot be used: it is known in none of "
            "CanonicalDomains, and CanonicalizeFallbackLocal is no; correct the name or the domains"
        )
    return host


def _is_known(name: str, family: socket.AddressFamily) -> bool:
    with contextlib.suppress(OSError, UnicodeError):
        return bool(socket.getaddrinfo(name, None, family, socket.SOCK_STREAM))
    return False


def _unusable(place: str, why: str) -> LaunchError:
    return LaunchError(f"{place}: cannot be used as an ssh configuration: {why}")
