"""What the system's ssh is told so that it takes no changed key. It is asked what its configuration means."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dslaunch.launcher.backends.openssh_strict import asked, strict_words

pytestmark = pytest.mark.skipif(shutil.which("ssh") is None, reason="the system's ssh is asked")

NEW = ("-o", "StrictHostKeyChecking=accept-new")
HEAD = "ssh -o NoHostAuthenticationForLocalhost=no"
LOOSE = "-o StrictHostKeyChecking=accept-new"


def told(folder: Path, text: str, *more: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words that are added for the host w0, and those that are left."""
    path = folder / "config"
    path.write_text(text)
    where = ("-F", str(path), *more, "--", "w0")
    words = strict_words(asked("ssh", where), "ssh", where, str(path))
    return words[: words.index("-F")], words[words.index("-F") + 2 :]


@pytest.mark.parametrize("value", ["yes", "ask", "accept-new"])
def test_what_takes_no_changed_key_is_left_alone(value: str, tmp_path: Path) -> None:
    text = f"StrictHostKeyChecking {value}\nHost w0\nProxyJump gate"
    assert told(tmp_path, text, "-J", "front") == ((), ("-J", "front", "--", "w0"))


@pytest.mark.parametrize("value", ["no", "OFF", "false"])
def test_what_takes_a_changed_key_takes_an_unknown_one_only(value: str, tmp_path: Path) -> None:
    assert told(tmp_path, f"Host w*\nStrictHostKeyChecking {value}") == (NEW, ("--", "w0"))
    assert told(tmp_path, "", "-o", f"StrictHostKeyChecking={value}")[0] == NEW


def test_hosts_on_the_way_are_told_so_too_each_as_its_own_configuration_says(tmp_path: Path) -> None:
    text = "Host w0\nProxyJump ada@a:23,b\nHost a\nStrictHostKeyChecking no"
    words, _ = told(tmp_path, text)
    config = f"-F {tmp_path}/config"
    inner = f"{HEAD} {LOOSE} -l ada -p 23 {config} -W '[%h]:%p' -- a"
    quoted = "'ProxyCommand=" + inner.replace("%", "%%").replace("'", "'\"'\"'") + "'"
    assert words == ("-o", f"ProxyCommand={HEAD} -o {quoted} {config} -W '[%h]:%p' -- b")
    text = "Host w0\nProxyJump b\nHost b\nProxyJump a\nStrictHostKeyChecking no"
    words, _ = told(tmp_path, text)
    assert words[1].count("StrictHostKeyChecking=accept-new") == 1
    assert words[1].count("-W") == 2


def test_a_jump_of_the_command_line_is_replaced(tmp_path: Path) -> None:
    text = "Host a\nStrictHostKeyChecking no"
    for given in (("-J", "a"), ("-Ja",)):
        words, left = told(tmp_path, text, *given)
        assert words == ("-o", f"ProxyCommand={HEAD} {LOOSE} -F {tmp_path}/config -W '[%h]:%p' -- a")
        assert left == ("--", "w0")
