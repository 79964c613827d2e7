"""known_hosts files: whose keys stand there, in all the forms that OpenSSH writes."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest

from dslaunch.launcher.backends.known_hosts import HostKey, HostNames, KnownHosts, Standing

ED = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ/36eqJJSWiVzT5D47Gv0kbEj7yz5Ml9E8FeGplPYc8"
ED_2 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEFEMQB4jRR5kPCnmm4X0sOaMO+yE2XK7G0k5Q6cYpV3"


def found(text: str, name: str, folder: Path) -> list[str]:
    path = folder / "known_hosts"
    path.write_text(text)
    return written(KnownHosts().known(name, [str(path)]).keys)


def written(keys: tuple[HostKey, ...]) -> list[str]:
    return [f"{key.kind} {base64.b64encode(key.blob).decode()}" for key in keys]


def key_of(line: str) -> HostKey:
    kind, blob = line.split()
    return HostKey(kind, base64.b64decode(blob))


@pytest.mark.parametrize(
    ("text", "name", "keys"),
    [
        (f"a {ED}\n", "a", [ED]),
        (f"a {ED}\n", "b", []),
        (f"b,a,10.0.0.1 {ED} with a comment\n", "a", [ED]),
        (f"# a {ED}\n\n   a {ED}  \r\n", "a", [ED]),
        (f"[a]:2222 {ED}\n", "[a]:2222", [ED]),
        (f"[a]:2222 {ED}\n", "a", []),
        (f"a {ED}\na {ED_2}\n", "a", [ED, ED_2]),
        (f"A,[B]:2222 {ED}\n", "[b]:2222", [ED]),
        (f"node*,!node7 {ED}\nno?e7 {ED_2}\n", "node7", [ED_2]),
        (f"node*,!node7 {ED}\nno?e7 {ED_2}\n", "node8", [ED]),
        (f"!node7 {ED}\n", "node8", []),
        (f"a,|1|x|y {ED}\n", "a", [ED]),
        (f"{'b' * 1023},a {ED}\n", "a", []),
        (f"a\x0c,b {ED}\na\0 {ED}\n", "a", []),
        ("a sk-new-kind@example.com AAAACm5ldy1raW5k\n", "a", []),
        (f"@revoked a {ED}\n@cert-authority * {ED}\n", "a", []),
        ("a ssh-ed25519 not-base64\na ssh-ed25519\na new-kind AAAA\na\n", "a", []),
        (f"x ssh-ed25519 A\n|1|short {ED}\n|1|?|? {ED}\na {ED}\n", "a", [ED]),
        (f"\udcffx {ED_2}\na {ED}\n".encode("utf-8", "surrogateescape").decode("latin-1"), "a", [ED]),
    ],
)
def test_the_keys_of_a_host_are_found(text: str, name: str, keys: list[str], tmp_path: Path) -> None:
    assert found(text, name, tmp_path) == keys


def test_names_that_openssh_has_hashed_are_found(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    path.write_text(f"a {ED}\n[b]:2222 {ED_2}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", path], check=True, capture_output=True)
    assert path.read_text().startswith("|1|")
    known = KnownHosts()
    for name, keys in (("a", [ED]), ("A", [ED]), ("[b]:2222", [ED_2]), ("b", [])):
        assert written(known.known(name, [str(path)]).keys) == keys


def test_all_files_count_and_a_missing_one_has_no_keys(tmp_path: Path) -> None:
    (tmp_path / "first").write_text(f"a {ED}\n")
    (tmp_path / "second").write_text(f"a {ED_2}\nb {ED_2}\n")
    paths = [str(tmp_path / name) for name in ("missing", "first", "second")]
    assert written(KnownHosts().known("a", paths).keys) == [ED, ED_2]
    assert written(KnownHosts().known("b", paths).keys) == [ED_2]


@pytest.mark.parametrize("before", ["", f"b {ED_2}\n", f"b {ED_2}"])
def test_a_key_is_added_once_behind_whole_lines_and_found_from_then_on(before: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "known_hosts"
    if before:
        path.parent.mkdir()
        path.write_text(before)
    known = KnownHosts()
    for expected in (Standing.UNKNOWN, Standing.KNOWN):
        assert known.judge(key_of(ED), HostNames("a"), [str(path)], adds=True).standing is expected
    assert path.read_text() == (before.rstrip() + "\n" if before else "") + f"a {ED}\n"
    assert written(known.known("b", [str(path)]).keys) == ([ED_2] if before else [])


def test_a_key_that_another_program_has_added_meanwhile_counts(tmp_path: Path) -> None:
    path = tmp_path / "known_hosts"
    known = KnownHosts()
    assert known.known("a", [str(path)]).keys == ()
    path.write_text(f"a {ED_2}\n")
    assert known.judge(key_of(ED), HostNames("a"), [str(path)], adds=True).standing is Standing.CHANGED
    assert path.read_text() == f"a {ED_2}\n"


def test_a_key_that_cannot_be_written_down_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "known_hosts"
    finding = KnownHosts().judge(key_of(ED), HostNames("a"), [str(path)], adds=True)
    assert finding.standing is Standing.UNKNOWN
    assert finding.unwritten == f"{path}: File exists"
