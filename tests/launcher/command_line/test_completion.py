"""`dslaunch completion SHELL`, in the shells themselves."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dslaunch.launcher.command_line import cli

DSLAUNCH = Path(sys.executable).with_name("dslaunch")
PATH = f"{DSLAUNCH.parent}:{os.environ['PATH']}"
CASES = [
    ("dslaunch --hostf", "--hostfile"),
    ("dslaunch -H hosts --num_no", "--num_nodes"),
    ("dslaunch chec", "check"),
    ("dslaunch check --no_to", "--no_torch"),
    ("dslaunch --drop_in al", "always"),
    ("dslaunch checkpoint verif", "verify"),
    ("dslaunch trai", "train.py"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    return tmp_path


def script_of(shell: str, folder: Path) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    path = folder / "completion.sh"
    done = subprocess.run([DSLAUNCH, "completion", shell], check=True, capture_output=True)
    path.write_bytes(done.stdout)
    return path


def test_bash_completes_options_commands_values_and_files(folder: Path) -> None:
    script = script_of("bash", folder)
    asks = [
        f'COMP_WORDS=({line}); COMP_CWORD={len(line.split()) - 1}; _dslaunch; echo "${{COMPREPLY[@]}}"'
        for line, _ in CASES
    ]
    done = subprocess.run(
        ["bash", "--norc", "-c", "; ".join([f"source {script}", *asks])],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [word if word != "check" else "check checkpoint" for _, word in CASES]
    assert done.stderr == ""


def test_fish_completes_options_commands_values_and_files(folder: Path) -> None:
    script = script_of("fish", folder)
    asks = [f"complete -C '{line}'; echo ==" for line, _ in CASES]
    done = subprocess.run(
        ["fish", "--no-config", "-c", "; ".join([f"source {script}", *asks])],
        cwd=folder,
        env={**os.environ, "PATH": PATH, "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    answers = [[line.split("\t")[0] for line in part.splitlines()] for part in done.stdout.split("==\n")]
    for (line, word), found in zip(CASES, answers, strict=False):
        assert word in found, (line, found, done.stderr)


@pytest.mark.slow
def test_zsh_completes_at_the_key(folder: Path) -> None:
    script = script_of("zsh", folder)
    (folder / ".zshrc").write_text(
        f"PS1='ready '\nautoload -U compinit && compinit -u -D\nsource {script}\nprint loaded\n"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(
            shutil.which("zsh") or "",
            ["zsh", "-i"],
            {"PATH": PATH, "ZDOTDIR": str(folder), "HOME": str(folder), "TERM": "dumb"},
        )
    try:
        shown = _read_until(terminal, b"ready ", since=b"loaded")
        for line, word in CASES[:5]:
            os.write(terminal, f"{line}\t".encode())
            _read_until(terminal, word.encode())
            os.write(terminal, b"\x15")  # clear the line
        assert b"rror" not in shown
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def _read_until(terminal: int, wanted: bytes, *, since: bytes = b"") -> bytes:
    shown, deadline = b"", time.monotonic() + 60
    while wanted not in shown.partition(since)[2] if since else wanted not in shown:
        assert time.monotonic() < deadline, (wanted, shown)
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 1 << 16)
    return shown


def test_every_command_and_option_is_in_what_bash_gets() -> None:
    text = subprocess.run([DSLAUNCH, "completion", "bash"], check=True, capture_output=True, text=True).stdout
    assert all(name in text for name in cli.COMMANDS)
    assert all(one.opts[-1] in text for one in cli.dslaunch.params if one.opts[-1].startswith("--"))
