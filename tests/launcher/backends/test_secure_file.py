"""Files of OpenSSH's that others own or may write to: what they say runs commands, so they are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dslaunch.launcher.backends import ssh_config
from dslaunch.launcher.backends.ssh_config import Configuration
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.options import SshOptions
from tests.lab import Lab

OTHER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / ".ssh").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(ssh_config, "SYSTEM_CONFIG", tmp_path / "system")
    return tmp_path


def user_of(home: Path, **options: Any) -> str:
    """What is read, or why nothing is."""
    try:
        return Configuration(SshOptions(**options)).resolve(Host(name="w0", slots=1)).user
    except LaunchError as error:
        return str(error)


def put(path: Path, text: str, mode: int = 0o644, owner: int | None = None) -> Path:
    path.write_text(text)
    path.chmod(mode)
    if owner is not None:
        os.chown(path, owner, -1)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o666, 0o602])
@pytest.mark.parametrize("where", ["own", "included", "included by the system's"])
def test_a_file_that_others_may_write_to_is_refused(mode: int, where: str, home: Path) -> None:
    path = home / ".ssh" / ("config" if where == "own" else "more")
    if where != "own":
        put(home / "system" if "system" in where else home / ".ssh" / "config", f"Include {path}\n")
    put(path, "User ada\n", mode)
    os.chown(path, -1, OTHER)  # a group that is not of this user alone
    found = user_of(home)
    if mode & 0o022:
        assert found.startswith(f"{path}: others may write to it (mode {mode:04o}), and what it says runs ")
        assert found.endswith("take that away with chmod go-w")
    else:
        assert found == "ada"


@needs_root
@pytest.mark.parametrize("where", ["own", "included"])
def test_a_file_of_another_user_is_refused(where: str, home: Path) -> None:
    path = home / ".ssh" / ("config" if where == "own" else "more")
    if where == "included":
        put(home / ".ssh" / "config", "Host elsewhere\n  Include more\n")
    put(path, "User ada\n", owner=OTHER)
    assert user_of(home).startswith(
        f"{path}: it belongs to the user with number {OTHER}, who may write to it"
    )


def test_what_an_option_names_is_taken_as_it_is_and_what_it_includes_is_not(home: Path) -> None:
    """As ssh does with -F."""
    given = put(home / "given", "User ada\n", 0o666)
    assert user_of(home, config=str(given)) == "ada"
    put(given, "Include more\n", 0o666)
    put(home / ".ssh" / "more", "User ada\n", 0o666)
    assert user_of(home, config=str(given)).startswith(
        f"{home}/.ssh/more: others may write to it (mode 0666)"
    )


ASK = """
import json, os, subprocess, sys
from pathlib import Path
from dslaunch.launcher.backends.ssh_config import Configuration
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.options import SshOptions

ssh = Path("/root/.ssh")
answers = []
for place in ("config", "more", "system", "system more", "given", "given more"):
    for owner, group in ((0, 0), (0, 65534), (65534, 0), (65534, 65534), (1, 1), (0, 1)):
        for mode in (0o600, 0o644, 0o640, 0o660, 0o664, 0o620, 0o602, 0o622, 0o666, 0o444, 0o646, 0o777):
            for path in (ssh / "config", ssh / "more", Path("/etc/ssh/ssh_config"), Path("/etc/ssh/more")):
                path.unlink(missing_ok=True)
            top = Path("/etc/ssh/ssh_config") if place.startswith("system") else ssh / "config"
            given = ("-F", str(ssh / "given")) if place.startswith("given") else ()
            top = ssh / "given" if given else top
            path = top.parent / "more" if place.split()[-1] == "more" else top
            if path != top:
                top.write_text("Include more\\n")
                top.chmod(0o600)
                os.chown(top, 0, 0)
            path.write_text("User ada\\n")
            path.chmod(mode)
            os.chown(path, owner, group)
            ran = subprocess.run(["ssh", "-G", *given, "w0"], capture_output=True, text=True)
            theirs = "user ada" in ran.stdout
            assert theirs or "Bad owner or permissions" in ran.stderr, ran.stderr
            try:
                options = SshOptions(config=given[1] if given else None)
                ours = Configuration(options).resolve(Host(name="w0", slots=1)).user == "ada"
            except LaunchError as error:
                ours = False
            answers.append([f"{place} {owner}:{group} {mode:04o}", theirs, ours])
print(json.dumps(answers))
"""


@pytest.mark.exhaustive
def test_owners_and_modes_count_as_for_the_systems_ssh(lab: Lab) -> None:
    """Also where the group may write and has one member, which Debian's ssh allows."""
    command = [sys.executable, "-c", ASK]
    said: subprocess.CompletedProcess[str] = lab.head.run(["sh", "-c", "cp /etc/ssh/ssh_config /tmp/kept"])
    try:
        said = lab.head.run(command, check=True)
    finally:
        lab.head.run(["cp", "/tmp/kept", "/etc/ssh/ssh_config"])
    answers = json.loads(said.stdout)
    assert len(answers) == 6 * 6 * 12
    assert [one for one in answers if one[1] != one[2]] == []
    assert {one[1] for one in answers} == {True, False}
