from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from dslaunch.launcher.errors import EXIT_MISTAKE, LaunchError
from dslaunch.launcher.inputs.env_file import EnvEntry
from dslaunch.launcher.inputs.hostfile import Host, host_key, parse_hostfile, read_hostfile
from dslaunch.launcher.inputs.hostfile_yaml import parse_yaml_hostfile
from tests.mistakes import mistakes


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("hosts: [{name: w, slots: 8}]", "w slots=8"),
        ("hosts: {w: {slots: 8}}", "w slots=8"),
        ("hosts: [{slots: 08, name: w}]", "w slots=8"),
        ("hosts: [{name: 'ada@[fd00::7]', slots: auto, port: 2222}]", "ada@[fd00::7] slots=auto port=2222"),
        ("hosts: [{name: w, slots: 2, user: ada}]", "w slots=2 user=ada"),
        ("hosts: [{name: w, devices: [2, 0]}]", "w devices=2,0"),
        ('hosts: [{name: w, devices: "2,GPU-1f", slots: 2}]', "w devices=2,GPU-1f"),
        ("hosts: [{name: w, devices: 3}]", "w devices=3"),
        ("hosts:\n  n[1-2]: {slots: 1, cwd: /my job}", "n[1-2] slots=1 cwd='/my job'"),
        ("hosts: [{name: w, slots: 1, python: ~/bin/python}]", "w slots=1 python=~/bin/python"),
        ("hosts: [{name: w, slots: 1, env: {}}]", "w slots=1"),
        (
            "hosts:\n  n[1-2]:\n    slots: 1\n    exec_prefix: podman exec -i 'b {host}'",
            "n[1-2] slots=1 exec_prefix=\"podman exec -i 'b {host}'\"",
        ),
        (
            "hosts: {w: {slots: 1, exec_prefix: [podman, exec, -i, b c]}}",
            "w slots=1 exec_prefix=\"podman exec -i 'b c'\"",
        ),
    ],
)
def test_an_item_says_what_a_line_says(text: str, line: str) -> None:
    assert parse_yaml_hostfile(text, source="hosts") == parse_hostfile(line, source="hosts")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", ("1",)),
        ("010", ("010",)),
        ("yes", ("yes",)),
        ("~", ("~",)),
        ("", ("",)),
        ("a b", ("a b",)),
        ("$HOME/x", ("", "HOME", "/x")),
        ("'$HOME/x'", ("", "HOME", "/x")),
        ("\\$HOME", ("$HOME",)),
        ("\"'quoted'\"", ("'quoted'",)),
        ('"two\\nlines"', ("two\nlines",)),
        ('"  spaces  "', ("  spaces  ",)),
    ],
)
def test_a_variable_is_text_in_which_variables_of_the_host_expand(text: str, value: tuple[str, ...]) -> None:
    (host,) = parse_yaml_hostfile(f"hosts:\n- name: w\n  slots: 1\n  env:\n    X: {text}", source="f")
    assert host.env == (EnvEntry(name="X", value=value, source="f: hosts[0].env"),)


def test_the_order_of_the_file_is_kept() -> None:
    text = "hosts:\n- {name: z, slots: 1}\n- {name: 'n[2,1]', slots: 2}\n- {name: a, slots: 3}\n"
    assert [host.name for host in parse_yaml_hostfile(text, source="f")] == ["z", "n2", "n1", "a"]
    text = "hosts:\n  z: {slots: 1}\n  a: {slots: 3}\n"
    assert [host.name for host in parse_yaml_hostfile(text, source="f")] == ["z", "a"]


@pytest.mark.parametrize(("text", "message"), mistakes("hostfile_yaml"))
def test_a_bad_file_is_refused_with_the_place_and_what_to_write(text: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_yaml_hostfile(text, source="f")
    assert str(caught.value) == message
    assert caught.value.exit_code == EXIT_MISTAKE


@pytest.mark.parametrize("name", ["hosts.yaml", "hosts.yml", "HOSTS.YAML"])
def test_the_end_of_the_name_says_that_it_is_yaml(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("\ufeffhosts: [{name: w, slots: 2}]\r\n")
    assert read_hostfile(tmp_path / name) == (Host(name="w", slots=2),)


def test_tags_make_no_objects() -> None:
    text = "hosts: [{name: w, slots: !!python/object/apply:os.system ['touch made']}]"
    with pytest.raises(LaunchError, match=r"hosts\[0\]\.slots: a list: slots is one word"):
        parse_yaml_hostfile(text, source="f")
    assert not Path("made").exists()


_WORDS = (
    "hosts",
    "name",
    "slots",
    "devices",
    "env",
    "cwd",
    ": ",
    "- ",
    ", ",
    "w1",
    "n[1-3]",
    "auto",
    "&a ",
    "*a",
    "---",
)
_pieces = st.sampled_from([*_WORDS, *"\n[]{}'\"|>#%\t\\01/$~!?"])


@given(
    st.just("hosts: [{name: ") | st.just("hosts:\n- name: ") | st.just(""),
    st.lists(_pieces | st.text(max_size=3)),
)
@settings(max_examples=300)
def test_any_text_is_read_or_refused(start: str, pieces: list[str]) -> None:
    try:
        hosts = parse_yaml_hostfile(start + "".join(pieces), source="f")
    except LaunchError as refused:
        message = str(refused)
    else:
        message = "f: read"
        assert len({host_key(host.name) for host in hosts}) == len(hosts) > 0
        assert all(host.slots is None or len(host.device_ids) == host.slots > 0 for host in hosts)
    assert re.fullmatch(r"f:[^\n]+", message)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x]\n" + "".join(f"b{n}: &b{n} [*a, *a]\n" for n in range(2000)),
        "{" * 20_000,
        "? " * 20_000,
        "- " * 20_000,
        "hosts: [{name: 'n" + "[1-9999]" * 2000 + "', slots: 1}]",
        "x" * (5 << 20),
    ],
    ids=lambda text: text[:8],
)
@pytest.mark.slow
@pytest.mark.timeout(30)
def test_a_file_made_to_hang_is_refused_soon(text: str) -> None:
    with pytest.raises(LaunchError):
        parse_yaml_hostfile(text, source="f")


def test_no_slots_leave_a_host_out_as_in_the_other_form() -> None:
    said: list[str] = []
    text = "hosts: {v: {slots: 0}, w: {slots: 1}, W: {slots: 2}}"
    hosts = parse_yaml_hostfile(text, source="f", warn=said.append)
    assert [(one.name, one.slots) for one in hosts] == [("w", 1), ("W", 2)]
    assert said == ["f: hosts.v: v has slots=0 and takes no part"]
