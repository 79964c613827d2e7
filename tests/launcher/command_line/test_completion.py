"""`dslaunch completion SHELL`, in the shells themselves: a line is typed, and the key pressed."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dslaunch.launcher.command_line import completer
from tests.exhaustive import few
from tests.launcher.registry.records import make_record

DSLAUNCH = Path(sys.executable).with_name("dslaunch")
PATH = f"{DSLAUNCH.parent}:{os.environ['PATH']}"
TIMEOUT_S = 60
QUOTES = "\"'"  # which a shell may close, or leave out

# What is typed, and all that can stand in place of its last word.
ROWS: list[tuple[str, list[str]]] = [
    ("dslaunch chec", ["check", "checkpoint"]),
    ("dslaunch --num_", ["--num_accelerators", "--num_gpus", "--num_nodes"]),
    ("dslaunch --drop_in=al", ["--drop_in=always"]),
    ("dslaunch -qH hosts -i n", ["node1", "node2", "node3"]),
    ("dslaunch check --hostfile=hosts -e node1@node", ["node1@node2", "node1@node3"]),
    ("dslaunch -H hosts train.py --hostf", []),
    ('dslaunch -H "hosts" -i "o', ["other"]),
    ("dslaunch checkpoint export --dt", ["--dtype"]),
    ("dslaunch trai", ["train.py"]),
    ("dslaunch --hostf", ["--hostfile"]),
    ("dslaunch check --no_to", ["--no_torch"]),
    ("dslaunch env --show", ["--show_secrets"]),
    ("dslaunch --drop_in al", ["always"]),
    ("dslaunch --launcher=openm", ["--launcher=openmpi"]),
    ("dslaunch exec --max_re", []),
    ("dslaunch exec --launcher o", ["openssh"]),
    ("dslaunch checkpoint export --dtype bf", ["bfloat16"]),
    ("dslaunch checkpoint verif", ["verify"]),
    ("dslaunch checkpoint ls --dt", []),
    ("dslaunch checkpoint ls fol", ["folder/"]),
    ("dslaunch help host", ["hosts"]),
    ("dslaunch completion f", ["fish"]),
    ("dslaunch -H hosts --include=o", ["--include=other"]),
    ("dslaunch --hostfile hosts -e node1:", []),
    ("dslaunch -H nosuch -i n", []),
    ("dslaunch -H hos", ["hosts"]),
    ("dslaunch --log_dir f", ["folder/"]),
    ("dslaunch --log_dir=f", ["--log_dir=folder/"]),
    ("dslaunch --num-nodes 2 -q trai", ["train.py"]),
    ("dslaunch -H hosts train.py tra", ["train.py"]),
    ("dslaunch exec -H hosts -- ls tra", ["train.py"]),
    ("dslaunch -q check --no_to", []),
    ("dslaunch -H 'hosts' --include='o", ["--include=other"]),
    ('dslaunch -H hosts -i "node1@o', ["node1@other"]),
    ('dslaunch --launcher "openm', ["openmpi"]),
    ('dslaunch "trai', ["train.py"]),
    ("dslaunch attach resn", ["resnet-run"]),
    ("dslaunch logs -f --rank 3 twin.0", ["twin.0001"]),
    ("dslaunch stop --no", ["--now"]),
    ("dslaunch -H hosts -i node1:0,1@o", ["node1:0,1@other"]),
]

BASH = """
PS1='ready '
source {script}
bind '"\\C-xa": insert-completions'
show() {{ printf '%s' "$READLINE_LINE" > {shown}.new; mv {shown}.new {shown}; READLINE_LINE=; }}
bind -x '"\\C-xs": show'
"""
ZSH = """
PS1='ready '
autoload -U compinit && compinit -u -D
source {script}
bindkey '^Xa' complete-word
show() {{ printf '%s' "$BUFFER" > {shown}.new; mv {shown}.new {shown}; BUFFER= }}
zle -N show
bindkey '^Xs' show
"""


class Terminal:
    """A shell at its prompt."""

    def __init__(self, words: list[str], folder: Path) -> None:
        self._shown = folder.parent / "shown"
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            env = {"PATH": PATH, "ZDOTDIR": str(folder.parent), "HOME": str(folder.parent), "TERM": "dumb"}
            os.execve(shutil.which(words[0]) or "", words, env)
        self.completed("true")  # until it reads what is typed

    def completed(self, line: str) -> str:
        """What stands there after the key that completes."""
        os.write(self._terminal, line.encode() + b"\x18a\x18s")
        deadline, output = time.monotonic() + TIMEOUT_S, b""
        while not self._shown.exists():
            assert time.monotonic() < deadline, (line, output)
            if select.select([self._terminal], [], [], 0.01)[0]:
                output += os.read(self._terminal, 1 << 16)
        text = self._shown.read_text()
        self._shown.unlink()
        return text

    def close(self) -> None:
        os.close(self._terminal)
        os.waitpid(self._pid, 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home") / "work"
    (folder / "folder").mkdir(parents=True)
    (folder / "train.py").touch()
    jobs = folder.parent / ".local" / "state" / "dslaunch" / "jobs"
    jobs.mkdir(parents=True, mode=0o700)
    jobs.parent.chmod(0o700)
    make_record(jobs, "resnet-run")
    for key in ("0001", "1002"):
        make_record(jobs, "twin", key)
    (folder / "hosts").write_text("node[1-3] slots=2\nother slots=1\n")
    return folder


def script_of(shell: str, folder: Path) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    path = folder.parent / f"completion.{shell}"
    done = subprocess.run([DSLAUNCH, "completion", shell], check=True, capture_output=True)
    path.write_bytes(done.stdout)
    return path


@pytest.fixture(scope="module")
def bash(folder: Path) -> Iterator[Callable[[str], str]]:
    script, start = script_of("bash", folder), folder.parent / "bashrc"
    start.write_text(BASH.format(script=script, shown=folder.parent / "shown"))
    terminal = Terminal(["bash", "--noprofile", "--rcfile", str(start), "-i"], folder)
    yield terminal.completed
    terminal.close()


@pytest.fixture(scope="module")
def zsh(folder: Path) -> Iterator[Callable[[str], str]]:
    script, start = script_of("zsh", folder), folder.parent / ".zshrc"
    start.write_text(ZSH.format(script=script, shown=folder.parent / "shown"))
    terminal = Terminal(["zsh", "-i"], folder)
    yield terminal.completed
    terminal.close()


@pytest.mark.slow
@pytest.mark.parametrize(("line", "wanted"), few(ROWS, lambda *row: row in ROWS[:8]))
def test_bash_completes(line: str, wanted: list[str], bash: Callable[[str], str]) -> None:
    """Of several words those behind the first begin where bash cuts. A folder has no slash here."""
    before, last = line.rsplit(" ", 1)
    wanted = [one.rstrip("/") for one in wanted]
    pieces = [one.strip(QUOTES).rstrip("/") for one in bash(line).removeprefix(f"{before} ").split()]
    cut = max(wanted[0].rfind("=") + 1, wanted[0].rfind("@")) if wanted else 0
    assert pieces == ([wanted[0], *(one[cut:] for one in wanted[1:])] if wanted else [last])


@pytest.mark.slow
@pytest.mark.parametrize(("line", "wanted"), few(ROWS, lambda *row: row in ROWS[2:6]))
def test_zsh_completes(line: str, wanted: list[str], zsh: Callable[[str], str]) -> None:
    """As far as all that it may be agree; behind an option that takes a value stands its `=`."""
    before, last = line.rsplit(" ", 1)
    completed = zsh(line).removeprefix(f"{before} ").strip().strip(QUOTES).removesuffix("=")
    wanted = [one.rstrip("/") for one in wanted]
    shared = {"node1": "node", "node1@node2": "node1@node", "check": "check", "--num_accelerators": "--num_"}
    assert completed.rstrip("/") == (shared.get(wanted[0], wanted[0]) if wanted else last)


@pytest.mark.slow
def test_fish_completes(folder: Path) -> None:
    script = script_of("fish", folder)
    lines = [line.replace("'", "\\'") for line, _ in ROWS]
    asks = [f"complete -C '{line}'; echo ==" for line in lines]
    done = subprocess.run(
        ["fish", "--no-config", "-c", "; ".join([f"source {script}", *asks])],
        cwd=folder,
        env={
            **os.environ,
            "PATH": PATH,
            "HOME": str(folder),
            "XDG_STATE_HOME": str(folder.parent / ".local" / "state"),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    answers = [[line.split("\t")[0] for line in part.splitlines()] for part in done.stdout.split("==\n")]
    for (line, wanted), found in zip(ROWS, answers, strict=False):
        assert sorted(found) == wanted, line


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["-H", "hosts", "-i", ""], ["node1", "node2", "node3", "other"]),
        (["-H", "hosts", "-i", "node2@"], ["node2@node1", "node2@node3", "node2@other"]),
        (["check", "-Hhosts", "-i", "node2:0,1@o"], ["node2:0,1@other"]),
        (["--hostf=$FOLDER/hosts", "-i", "n"], ["node1", "node2", "node3"]),
        (["--hostf=$FOLDER/hosts", "--incl=o"], ["--incl=other"]),
        (["-i", "n"], []),
    ],
)
def test_the_hosts_are_those_of_the_hostfile_on_the_line(
    words: list[str], wanted: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("FOLDER", str(folder))
    assert completed(*words) == wanted


def completed(*words: str) -> list[str]:
    return [item.value for item in completer.completions(words[:-1], words[-1])]


def test_without_a_hostfile_the_hosts_are_those_of_the_default_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dslaunch.launcher.run import host_pool

    (tmp_path / "hostfile").write_text("node7 slots=1\nfd00::7 slots=1\n")
    monkeypatch.setattr(host_pool, "DEFAULT_HOSTFILE", tmp_path / "hostfile")
    assert completed("-q", "-i", "") == ["node7", "[fd00::7]"]


@pytest.mark.parametrize(
    ("words", "cword", "answer"),
    [
        ("dslaunch --drop_in = a", 3, "plain,auto\nplain,always"),
        ("dslaunch --drop_in = ", 2, "plain,auto\nplain,always\nplain,never"),
        ("dslaunch -H hosts -e node1 @ o", 6, "plain,@other"),
        ("dslaunch -H hosts -e node1 : 0 @ o", 8, "plain,@other"),
        ('dslaunch -H hosts -e "node1@o', 4, "plain,node1@other"),
        ("dslaunch chec", 1, "plain,check\nplain,checkpoint"),
        ("dslaunch --log_dir ", 2, "dir,"),
        ("dslaunch --nosuch --num_", 2, ""),
    ],
)
def test_bash_gets_what_follows_its_last_cut(
    words: str,
    cword: int,
    answer: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsysbinary: pytest.CaptureFixture[bytes],
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(cword))
    completer.answer("bash_complete")
    assert capsysbinary.readouterr().out.decode().rstrip("\n") == answer
