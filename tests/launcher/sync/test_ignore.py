"""What is left out is what git leaves out: compared with `git check-ignore` over generated rules."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from dslaunch.launcher.sync.ignore import MAX_FILE_BYTES
from dslaunch.launcher.sync.manifest import walk
from dslaunch.launcher.wire.manifest import FOLDER
from tests.exhaustive import few

NAMES = (b"a", b"b", b"ab", b"a.b", b"c[x]", b"#d", b"!e", b"f ", b"\xc3\xa4", b"log.txt", b"build")
PIECES = (
    *(
        b"a",
        b"b",
        b"ab",
        b"*",
        b"**",
        b"?",
        b"***",
        b"/",
        b"/",
        b"\\",
        b".",
        b"[ab]",
        b"[!a]",
        b"[^b-z]",
        b"[a-",
    ),
    *(
        b"[[:alpha:]]",
        b"[]]",
        b"[\\]x]",
        b"c\\[x\\]",
        b"#d",
        b"\\#d",
        b"!e",
        b"\\!e",
        b"f ",
        b"f\\ ",
        b"\xc3\xa4",
    ),
    *(
        b"*.txt",
        b"log",
        b"build",
        b"[a-c]*",
        b"[[:digit:][:alpha:]]",
        b"[[:nope:]]",
        b"[x[:]",
        b"!",
        b" ",
        b"-",
        b"]",
    ),
    *(b"**/", b"/**", b"/**/", b"a/", b"b/"),
)

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def drawn_rules(draw: random.Random) -> bytes:
    lines = []
    for _ in range(draw.randrange(1, 5)):
        line = b"".join(draw.choice(PIECES) for _ in range(draw.randrange(1, 4)))
        lines.append((b"!" if draw.random() < 0.25 else b"") + line + (b"/" if draw.random() < 0.2 else b""))
    return draw.choice((b"\n", b"\n", b"\r\n")).join(lines) + draw.choice((b"", b"\n"))


def make(root: bytes, draw: random.Random, depth: int = 0) -> None:
    os.makedirs(root, exist_ok=True)
    if draw.random() < (1.0 if depth == 0 else 0.4):
        with open(os.path.join(root, b".gitignore"), "wb") as file:
            file.write(draw.choice((b"", b"", b"\xef\xbb\xbf")) + drawn_rules(draw))
    for name in draw.sample(NAMES, 5):
        path = os.path.join(root, name)
        if depth < 3 and draw.random() < 0.5:
            make(path, draw, depth + 1)
        else:
            with open(path, "wb"):
                pass


def not_ignored_by_git(root: bytes) -> set[bytes]:
    git = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "PATH": os.environ["PATH"]}
    names = []
    for folder, folders, files in os.walk(root):
        if b".git" in folders:
            folders.remove(b".git")
        names += [os.path.relpath(os.path.join(folder, name), root) for name in (*files, *folders)]
    done = subprocess.run(
        ["git", "check-ignore", "-z", "--stdin", "--no-index"],
        input=b"\0".join(names),
        cwd=root,
        env=git,
        capture_output=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return set(names) - set(done.stdout.split(b"\0"))


def left_in(root: bytes) -> set[bytes]:
    return {one.path for one in walk(root, reads=False).entries}


@pytest.mark.slow
@pytest.mark.parametrize("seed", few(range(8), lambda seed: seed == 0))
def test_the_same_is_left_out_as_by_git(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(25):
        root = os.path.join(bytes(tmp_path), b"%d" % number)
        make(root, draw)
        subprocess.run(["git", "init", "-q", root], check=True)
        if draw.random() < 0.3:
            with open(os.path.join(root, b".git/info/exclude"), "wb") as file:
                file.write(drawn_rules(draw))
        expected = not_ignored_by_git(root)
        rules = subprocess.run(
            ["grep", "-rHn", "", "--include=.gitignore", "."], cwd=root, capture_output=True, check=False
        ).stdout
        assert left_in(root) == expected, (seed, number, rules)
        shutil.rmtree(root)


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        (b"", {b"a.log", b"b", b"data", b"data/x", b"data/y.log"}),
        (b"*.log\n", {b"b", b"data", b"data/x"}),
        (b"*.log\n!data/*.log\n", {b"b", b"data", b"data/x", b"data/y.log"}),
        (b"data\n!data/x\n", {b"a.log", b"b"}),  # what is in an ignored folder cannot be taken back
        (b"data/*\n!data/x\n", {b"a.log", b"b", b"data", b"data/x"}),
        (b"/b\n", {b"a.log", b"data", b"data/x", b"data/y.log"}),
    ],
)
@pytest.mark.parametrize("file", [".gitignore", ".dslaunchignore"])
def test_what_rules_mean(tmp_path: Path, rules: bytes, left: set[bytes], file: str) -> None:
    for name in left | {b"a.log", b"b", b"data/x", b"data/y.log"}:
        path = tmp_path / os.fsdecode(name)
        if name != b"data":
            path.parent.mkdir(exist_ok=True)
            path.touch()
    (tmp_path / file).write_bytes(rules)
    assert left_in(bytes(tmp_path)) == {*left, file.encode()}


def test_our_own_file_has_the_last_word(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("weights.bin", "notes.txt", "data/notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / ".gitignore").write_text("*.bin\n")
    (tmp_path / "data/.gitignore").write_text("!notes.txt\n")
    (tmp_path / ".dslaunchignore").write_text("!weights.bin\nnotes.txt\n.*ignore\n")
    assert left_in(bytes(tmp_path)) == {b"weights.bin", b"data"}


def test_the_repository_that_a_folder_stands_in_counts(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("*.bin\n/job/out\n")
    (tmp_path / "job/out").mkdir(parents=True)
    for name in ("a.py", "a.bin", "out/x"):
        (tmp_path / "job" / name).touch()
    assert left_in(bytes(tmp_path / "job")) == {b"a.py"}


GIT = ("git", "-c", "user.name=test", "-c", "user.email=test@test", "-c", "protocol.file.allow=always", "-C")


@pytest.mark.parametrize("kind", ["worktree", "submodule", "nested repository"])
def test_the_exclude_of_a_repository_counts_wherever_that_keeps_it(tmp_path: Path, kind: str) -> None:
    top = tmp_path / "top"
    top.mkdir()
    commands = [["init", "-q"], ["commit", "-qm", "first", "--allow-empty"]]
    if kind == "worktree":
        commands.append(["worktree", "add", "-q", "../inner"])
    elif kind == "submodule":
        commands.append(["submodule", "--quiet", "add", str(top), "inner"])
    else:
        commands.append(["init", "-q", "inner"])
    for command in commands:
        subprocess.run([*GIT, top, *command], check=True, capture_output=True)
    inner = tmp_path / "inner" if kind == "worktree" else top / "inner"
    git = subprocess.run(
        [*GIT, inner, "rev-parse", "--git-path", "info/exclude"], check=True, capture_output=True, text=True
    )
    exclude = inner / git.stdout.strip()
    exclude.parent.mkdir(exist_ok=True)
    exclude.write_text("*.log\n!kept.log\n*.bin\n")
    (inner / ".gitignore").write_text("!*.bin\n")
    for name in ("a.log", "kept.log", "a.bin"):
        (inner / name).touch()
    expected = {b".gitignore", b"kept.log", b"a.bin"}
    assert not_ignored_by_git(bytes(inner)) - {b".git"} == expected
    assert left_in(bytes(inner)) == expected
    if kind != "worktree":
        assert {one for one in left_in(bytes(top)) if b"inner/" in one} == {
            b"inner/" + one for one in expected
        }


@pytest.mark.parametrize("said", [b"gitdir: nowhere\n", b"", b"\xff\0", b"gitdir: \0", b"gitdir: .git"])
def test_a_repository_that_is_not_where_it_is_said_to_be_has_no_rules(tmp_path: Path, said: bytes) -> None:
    (tmp_path / "a.log").touch()
    (tmp_path / ".git").write_bytes(said)
    assert left_in(bytes(tmp_path)) == {b"a.log"}


def test_git_itself_stays_here_unless_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/HEAD").touch()
    assert left_in(bytes(tmp_path)) == set()
    (tmp_path / ".dslaunchignore").write_text("!.git\n")
    assert left_in(bytes(tmp_path)) == {b".dslaunchignore", b".git", b".git/HEAD"}


def no_rules(path: Path, kind: str) -> None:
    """Something of this kind in place of a file of rules."""
    if kind == "folder":
        path.mkdir()
        (path / "inside.log").touch()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(os.path.relpath(path))
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    elif kind == "link":
        path.symlink_to(path.parent.parent / "rules")
    elif kind == "huge":
        with path.open("wb") as file:
            file.truncate(MAX_FILE_BYTES + 1)


@pytest.mark.parametrize("file", [".gitignore", ".dslaunchignore", ".git/info/exclude"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "dangling link", "link", "huge"])
def test_what_is_no_file_of_rules_holds_none_and_is_named(
    tmp_path: Path, file: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for git, where that does not wait for the pipe's other end, or end."""
    top = tmp_path / "top"
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q", top], check=True)
    (top / ".git/info/exclude").unlink()
    (tmp_path / "rules").write_text("*.log\n")
    for name in ("a.log", "b"):
        (top / name).touch()
    path = top / file
    no_rules(path, kind)
    if kind == "link" and file == ".git/info/exclude":
        path.unlink()
        path.symlink_to(tmp_path / "rules")
    found = walk(bytes(top), reads=False)
    is_followed = file == ".git/info/exclude" and kind == "link"
    is_none = file == ".git/info/exclude" and kind == "dangling link"
    assert (b"a.log" in {one.path for one in found.entries}) == (not is_followed)
    assert [one.rpartition(" (")[0] for one in found.unread_rules] == (
        [] if is_followed or is_none else [str(path)]
    )
    if (file, kind) in ((".gitignore", "folder"), (".gitignore", "link"), (".git/info/exclude", "link")):
        files = {one.path for one in found.entries if one.kind != FOLDER}
        assert files == not_ignored_by_git(bytes(top)) - {b"top"} - folders_in(top)


def folders_in(top: Path) -> set[bytes]:
    return {bytes(one.relative_to(top)) for one in top.rglob("*") if one.is_dir() and not one.is_symlink()}


@pytest.mark.parametrize(
    "rule",
    [b"*a" * 30 + b"b", b"a*" * 1000 + b"b", b"/" + b"**/*a*" * 20 + b"b", b"*a" * 10_000],
    ids=["stars", "many stars", "any folders", "longer than a path"],
)
def test_a_rule_with_many_stars_is_decided_at_once(tmp_path: Path, rule: bytes) -> None:
    deep = tmp_path / "/".join(["a" * 200] * 8)
    deep.mkdir(parents=True)
    (tmp_path / ".gitignore").write_bytes(rule + b"\n")
    before = time.monotonic()
    assert len(left_in(bytes(tmp_path))) == 9
    assert time.monotonic() < before + 20  # without end otherwise


def test_a_long_file_of_rules_counts_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "a.log").touch()
    (tmp_path / ".gitignore").write_bytes(b"# as git reads it\n" * 100_000 + b"*.log\n")
    assert left_in(bytes(tmp_path)) == {b".gitignore"}


def test_a_folder_that_its_repository_ignores_is_sent_when_it_is_named(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / ".gitignore").write_text("build/\n*.o\n")
    (tmp_path / "build/inner").mkdir(parents=True)
    for name in ("build/program", "build/inner/a.o"):
        (tmp_path / name).touch()
    assert left_in(bytes(tmp_path / "build")) == {b"inner", b"program"}


def test_folders_may_be_deeper_than_calls_of_functions(tmp_path: Path) -> None:
    path = bytes(tmp_path) + b"/d" * 1200
    os.makedirs(bytes(tmp_path) + b"/d" * 600)
    os.makedirs(path)
    assert len(walk(bytes(tmp_path), reads=False).entries) == 1200
    subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)
