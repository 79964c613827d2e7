"""known_hosts files: whose keys stand there, in all the forms that OpenSSH writes."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import paramiko
import pytest

from dslaunch.launcher.backends.known_hosts import KnownHosts

ED = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ/36eqJJSWiVzT5D47Gv0kbEj7yz5Ml9E8FeGplPYc8"
ED_2 = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIEFEMQB4jRR5kPCnmm4X0sOaMO+yE2XK7G0k5Q6cYpV3"


def found(text: str, name: str, folder: Path) -> list[str]:
    path = folder / "known_hosts"
    path.write_text(text)
    return [f"{key.get_name()} {key.get_base64()}" for key in KnownHosts().keys_of(name, [str(path)])]


@pytest.mark.parametrize(
    ("text", "name", "keys"),
    [
        (f"a {ED}\n", "a", [ED]),
        (f"a {ED}\n", "b", []),
        (f"b,a,10.0.0.1 {ED} with a comment\n", "a", [ED]),
        (f"# a {ED}\n\n   a {ED}  \r\n", "a", [ED]),
        (f"[a]:2222 {ED}\n", "[a]:2222", [ED]),
        (f"[a]:2222 {ED}\n", "a", []),
        (f"a {ED}\na {ED_2}\n", "a", [ED]),
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
    for name, keys in (("a", [ED]), ("[b]:2222", [ED_2]), ("b", [])):
        assert [f"{key.get_name()} {key.get_base64()}" for key in known.keys_of(name, [str(path)])] == keys


def test_the_first_file_counts_and_a_missing_one_has_no_keys(tmp_path: Path) -> None:
    (tmp_path / "first").write_text(f"a {ED}\n")
    (tmp_path / "second").write_text(f"a {ED_2}\nb {ED_2}\n")
    paths = [str(tmp_path / name) for name in ("missing", "first", "second")]
    known = KnownHosts()
    assert [key.get_base64() for key in known.keys_of("a", paths)] == [ED.split()[1]]
    assert [key.get_base64() for key in known.keys_of("b", paths)] == [ED_2.split()[1]]


def test_a_key_is_added_once_and_found_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "new" / "known_hosts"
    key = paramiko.PKey.from_type_string("ssh-ed25519", base64.b64decode(ED.split()[1]))
    known = KnownHosts()
    assert known.keys_of("a", [str(path)]) == []
    known.add("a", key, str(path))
    known.add("a", key, str(path))
    assert path.read_text() == f"a {ED}\n"
    assert known.keys_of("a", [str(path)]) == [key]
