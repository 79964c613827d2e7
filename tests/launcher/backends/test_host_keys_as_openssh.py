"""Whether a host's key is taken: the system's own ssh is the judge, for generated known_hosts files.

Each row is one login on a real sshd (`sshd -i`, no port): by OpenSSH as it is, by our own SSH, and by OpenSSH
with the words that a job tells it. Where ours is stricter the row says why.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from dslaunch.launcher.backends.openssh_strict import asked, strict_words
from dslaunch.launcher.backends.ssh_config import Configuration
from dslaunch.launcher.backends.ssh_login import OpenSshMay, SshFiles, log_in
from dslaunch.launcher.backends.ssh_proxy import Proxy
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.options.hosts import SshOptions

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
pytestmark = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="the judge is the system's ssh"
)
NUM_QUICK = 4
NUM_FILES = 30
NAMES = ("node7", "node8", "NODE7", "n", "node7.lan")
STRICT = ("yes", "ask", "accept-new", "no")


class Keys(NamedTuple):
    """Public keys as known_hosts has them, and the folder of all files."""

    folder: Path
    host: str  # ed25519, of the server
    host_2: str  # ecdsa, of the server, too
    other: str  # ed25519
    other_2: str  # rsa
    authority: str  # which has signed host
    other_authority: str


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    folder = tmp_path_factory.mktemp("keys")
    kinds = ("ed25519", "ecdsa", "ed25519", "rsa", "ed25519", "ed25519")
    texts = []
    for name, kind in zip(Keys._fields[1:], kinds, strict=True):
        path = folder / name
        size = ["-b", "2048"] if kind == "rsa" else []
        subprocess.run(["ssh-keygen", "-q", "-t", kind, *size, "-N", "", "-C", "", "-f", path], check=True)
        texts.append(path.with_suffix(".pub").read_text().strip())
    sign = ["ssh-keygen", "-q", "-s", folder / "authority", "-I", "test", "-h"]
    subprocess.run([*sign, "-n", "node7,n", folder / "host.pub"], check=True)
    return Keys(folder, *texts)


class Row(NamedTuple):
    """One login: the host's name, what known_hosts files say, and the settings of the configuration."""

    name: str
    user: str
    system: str = ""
    settings: tuple[str, ...] = ()
    strict: str = "accept-new"
    has_certificate: bool = False
    stricter: str = ""  # why ours says no where OpenSSH says yes


class Judged(NamedTuple):
    is_taken: bool
    added: str  # to the user's file


class Trial:
    """A row's files, and the logins on them."""

    def __init__(self, row: Row, keys: Keys, folder: Path, *, hashes: bool = False) -> None:
        self._row, self._folder = row, folder
        server = ["UsePAM no", f"HostKey {keys.folder}/host", f"HostKey {keys.folder}/host_2", "PidFile none"]
        if row.has_certificate:
            server.append(f"HostCertificate {keys.folder}/host-cert.pub")
        (folder / "sshd").write_text("\n".join(server) + "\n")
        sshd = f"exec {SSHD} -i -f {folder}/sshd"
        # sshd of root needs a folder in /run, which only a machine with a running sshd has.
        own_run = "mount -t tmpfs none /run && mkdir -m 755 /run/sshd"
        is_root = os.geteuid() == 0
        (folder / "serve").write_text(f"exec unshare -m sh -c '{own_run} && {sshd}'\n" if is_root else sshd)
        user, system = folder / "user", folder / "system"
        for path, text in ((user, row.user), (system, row.system)):
            path.write_text(text)
            if hashes and text:  # it leaves a file with a line that it cannot read as it is
                subprocess.run(["ssh-keygen", "-q", "-H", "-f", path], check=False, capture_output=True)
        self._before = user.read_text()
        lines = [
            "Host *",
            *row.settings,
            f"StrictHostKeyChecking {row.strict}",
            f"UserKnownHostsFile {user}",
            f"GlobalKnownHostsFile {system}",
            f"ProxyCommand sh {folder}/serve",
            *("User nobody", "IdentityFile none", "HashKnownHosts no", "UpdateHostKeys no"),
            *("BatchMode yes", "IdentityAgent none"),
        ]
        self.config = folder / "config"
        self.config.write_text("\n  ".join(lines) + "\n")

    def by_openssh(self, *, as_in_a_job: bool = False) -> Judged:
        where: tuple[str, ...] = ("-F", str(self.config), "--", self._row.name)
        if as_in_a_job:
            where = strict_words(asked("ssh", where), "ssh", where, str(self.config))
        ran = subprocess.run(["ssh", *where, "true"], capture_output=True, text=True, check=False)
        assert ran.returncode == 255
        is_taken = "Permission denied" in ran.stderr
        refused = (*("verification failed", "CHANGED", "REVOKED", "revoked by file", "strict checking"),)
        assert is_taken or any(word in ran.stderr for word in refused), ran.stderr
        return self._judged(is_taken)

    def by_us(self) -> Judged | str:
        """Or why the system's ssh is to decide."""
        host = Host(name=self._row.name, slots=1)
        target = Configuration(SshOptions(config=str(self.config))).resolve(host)
        if target.openssh.only:
            return target.openssh.only
        assert target.proxy_command is not None
        proxy = Proxy(target.proxy_command)
        try:
            log_in(target, proxy.sock, SshFiles())
        except OpenSshMay as error:
            if "is taken" not in error.because and "accepted" not in error.because:
                return error.because
            return self._judged(True)
        except LaunchError as error:
            said = str(error)
            assert "ended the connection" not in said, said
            return self._judged(all(word not in said for word in ("host key", "HOST KEY")))
        finally:
            proxy.close()
        raise AssertionError("nobody may log in there")

    def _judged(self, is_taken: bool) -> Judged:
        """What became of the user's file, which is put back. OpenSSH 9.2 goes on in a line without an end."""
        path = self._folder / "user"
        after = path.read_text()
        path.write_text(self._before)
        assert after.startswith(self._before)
        return Judged(is_taken, after.removeprefix(self._before).strip())


def assert_agree(trial: Trial, row: Row) -> None:
    theirs, ours = trial.by_openssh(), trial.by_us()
    told = trial.by_openssh(as_in_a_job=True)
    shown = f"{row}\n{trial.config.read_text()}"
    if row.strict == "no":
        # What it takes beyond accept-new are keys that have changed or are revoked.
        accept_new = trial.config.read_text().replace("Checking no", "Checking accept-new")
        trial.config.write_text(accept_new)
        theirs = trial.by_openssh()
    assert told == theirs, f"OpenSSH in a job\n{shown}"
    if isinstance(ours, str):
        return  # told is its answer
    if row.stricter:
        assert (ours.is_taken, theirs.is_taken) == (False, True), f"not stricter any more\n{shown}"
        assert ours.added == ""
    else:
        assert ours == theirs, f"our own SSH\n{shown}"


def by_hand(keys: Keys) -> dict[str, Row]:
    """What each rule of known_hosts is about."""
    other, host = keys.other, keys.host
    return {
        "known": Row("node7", f"node7 {host}\n", strict="yes"),
        "a pattern": Row("node7", f"node* {other}\n"),
        "a question mark": Row("node7", f"nod?7 {host}\n", strict="yes"),
        "negation": Row("node7", f"node*,!node7 {other}\n"),
        "negation of another one": Row("node7", f"node*,!node8 {other}\n"),
        "capitals": Row("node7", f"NODE7 {other}\n"),
        "revoked": Row("node7", f"node7 {host}\n@revoked * {host}\n", strict="no"),
        "revoked in the system's file": Row("node7", f"node7 {host}\n", f"@revoked node* {host}\n"),
        "another one is revoked": Row("node7", f"@revoked node7 {other}\n"),
        "of another kind": Row("node7", f"node7 {keys.other_2}\n"),
        "a kind that is left out": Row("node7", f"node7 {host}\n", settings=("HostKeyAlgorithms -*25519*",)),
        "a kind that comes behind": Row(
            "node7", f"node7 {host}\n", settings=("HostKeyAlgorithms ^ecdsa-sha2-nistp256",)
        ),
        "the kind that is named first": Row(
            "node7", f"node7 {keys.host_2}\n", settings=("HostKeyAlgorithms ssh-ed25519,ecdsa-sha2-*",)
        ),
        "a kind that is added": Row(
            "node7", f"node7 {keys.host_2}\n", settings=("HostKeyAlgorithms +ssh-rsa",), strict="yes"
        ),
        "a comment with other ends of lines": Row(
            "node7", "", settings=("# \x0cStrictHostKeyChecking no", "# \u2028StrictHostKeyChecking no"),
            strict="yes",
        ),
        "the second of two": Row("node7", f"node7 {other}\nnode7 {host}\n", strict="yes"),
        "of two files": Row("node7", f"node7 {other}\n", f"node7 {host}\n", strict="yes"),
        "another port": Row("node7", f"node7 {host}\n", settings=("Port 2222",), strict="yes"),
        "another port, changed": Row("node7", f"[node7]:2222 {other}\n", settings=("Port 2222",)),
        "a pattern of a port": Row("node7", f"[*]:2222 {other}\n", settings=("Port 2222",)),
        "changed at the usual port": Row("node7", f"node7 {other}\n", settings=("Port 2222",)),
        "an alias": Row("n", f"front {other}\n", settings=("HostKeyAlias Front", "Port 2222")),
        "no line feed at the end": Row("node7", f"node8 {host}"),
        "a cut line": Row("node7", f"node7 {other[:40]}\n"),
        "a comment and blanks": Row("node7", f"  # node7 {other}\n\t node7\t {other} it\n"),
        "two markers": Row("node7", f"@revoked @cert-authority node7 {host}\n"),
        "an unknown marker": Row("node7", f"@other node7 {host}\n"),
        "a tab behind a marker": Row(
            "node7", f"@revoked\tnode7 {host}\n", stricter="OpenSSH passes over such a line"
        ),
        "an authority": Row("node7", f"@cert-authority * {keys.authority}\n", "", (), "yes", True),
        "a revoked authority": Row(
            "node7", f"@revoked * {keys.authority}\nnode7 {host}\n", has_certificate=True
        ),
        "an authority of other names": Row(
            "node8", f"@cert-authority * {keys.authority}\n", "", (), "yes", True
        ),
        "an authority and an old key": Row(
            "node7", f"@cert-authority * {keys.authority}\nnode7 {other}\n", "", (), "yes", True
        ),
        "a list of revoked keys": Row("node7", f"node7 {host}\n", settings=("RevokedHostKeys {revoked}",)),
        "no list of revoked keys": Row("node7", f"node7 {host}\n", settings=("RevokedHostKeys /no/file",)),
        "no file of the user": Row("node7", "", settings=("UserKnownHostsFile none",)),
        "revoked for the usual port": Row(
            "node7", f"@revoked node7 {host}\n", settings=("Port 2222",),
            stricter="the same host's key at another port",
        ),
    }  # fmt: skip


QUICK = ("negation", "a comment with other ends of lines", "revoked", "a revoked authority")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in by_hand(Keys(Path(), *("k e y",) * 6))
    ],
)
def test_a_line_means_to_us_what_it_means_to_openssh(name: str, keys: Keys, tmp_path: Path) -> None:
    (tmp_path / "revoked").write_text(keys.host + "\n")
    row = by_hand(keys)[name]
    row = row._replace(
        settings=tuple(one.replace("{revoked}", f"{tmp_path}/revoked") for one in row.settings)
    )
    assert_agree(Trial(row, keys, tmp_path), row)


def generated(seed: int, keys: Keys) -> tuple[Row, bool]:
    """A row, and whether its names are hashed."""
    dice = random.Random(seed)
    name = dice.choice(NAMES)
    settings = []
    if dice.random() < 0.3:
        settings.append("Port 2222")
    if dice.random() < 0.15:
        settings.append("HostKeyAlias " + dice.choice(("front", "Node7", "node8")))

    def one_name() -> str:
        plain = dice.choice((*NAMES, "front", "node?", "node*", "*", "NODE*", "?", "n*7", "node[78]"))
        if dice.random() < 0.3:
            plain = f"[{plain}]:" + dice.choice(("2222", "2222", "22", "*"))
        return ("!" if dice.random() < 0.2 else "") + plain

    def line() -> str:
        names = ",".join(one_name() for _ in range(dice.choice((1, 1, 1, 2, 3))))
        key = dice.choice(keys[1:])
        marker = dice.choices(("", "@revoked ", "@cert-authority ", "@REVOKED ", "@x "), (70, 12, 12, 2, 2))[
            0
        ]
        text = f"{marker}{names} {key}"
        ways = (
            text,
            f"  {text}",
            f"{text} a comment",
            f"# {text}",
            text[: dice.randrange(len(text))],
            text + "\r",
        )
        return dice.choices(ways, (60, 8, 8, 4, 8, 4))[0]

    def file() -> str:
        lines = [line() for _ in range(dice.choice((0, 1, 1, 2, 2, 3, 5)))]
        return "\n".join(lines) + dice.choice(("\n", "\n", "")) if lines else ""

    row = Row(name, file(), file() if dice.random() < 0.3 else "", tuple(settings), dice.choice(STRICT))
    return row._replace(has_certificate=dice.random() < 0.3), dice.random() < 0.15


@pytest.mark.parametrize(
    "seed",
    [
        *range(NUM_QUICK),
        *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(NUM_QUICK, NUM_FILES)),
    ],
)
def test_a_generated_file_is_judged_as_by_openssh(seed: int, keys: Keys, tmp_path: Path) -> None:
    row, hashes = generated(seed, keys)
    assert_agree(Trial(row, keys, tmp_path, hashes=hashes), row)
