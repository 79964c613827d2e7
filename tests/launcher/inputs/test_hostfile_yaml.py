from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from dslaunch.launcher.errors import EXIT_MISTAKE, LaunchError
from dslaunch.launcher.inputs.env_file import EnvEntry
from dslaunch.launcher.inputs.hostfile import Host, host_key, parse_hostfile, read_hostfile
from dslaunch.launcher.inputs.hostfile_yaml import parse_yaml_hostfile


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


ITEM = "write e.g. '{name: w, slots: 8}'"
EXAMPLE = "write e.g. 'hosts: [{name: worker-1, slots: 8}]'"
KEYS = "allowed are slots, devices, port, user, python, cwd, exec_prefix and env.NAME"
WHOLE = "slots must be a whole number above 0, or 'auto'"
VARIABLES = "write e.g. '{name: w, slots: 8, env: {NCCL_DEBUG: INFO}}'"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts: [{name: v, slots: 1}, {name: w, slots: x}]", f"f: hosts[1].slots: 'x': {WHOLE}; {ITEM}"),
        ("hosts: {w: {slots: x}}", f"f: hosts.w.slots: 'x': {WHOLE}; write e.g. 'w: {{slots: 8}}'"),
        (
            "hosts: [{name: w, slots: 0}]",
            "f: every host in it has slots=0, so none can take part; write e.g. slots: 8 for one",
        ),
        ("hosts: [{name: w, slots: 1.0}]", f"f: hosts[0].slots: '1.0': {WHOLE}; {ITEM}"),
        ("hosts: [{name: w, slots: }]", f"f: hosts[0].slots: '': {WHOLE}; {ITEM}"),
        ("hosts: [{name: w, slots: [8]}]", f"f: hosts[0].slots: a list: slots is one word or number; {ITEM}"),
        (
            "hosts: [{name: w}]",
            "f: hosts[0]: slots is missing, the number of processes the host takes "
            f"('auto': one for each GPU found there); {ITEM}",
        ),
        (
            "hosts: [{name: w, slot: 1}]",
            f"f: hosts[0]: unknown key 'slot' (did you mean 'slots'?); {KEYS}; "
            "write e.g. '{name: w, slots: 8, port: 22}'",
        ),
        (
            "hosts: {w: {name: v, slots: 1}}",
            f"f: hosts.w: unknown key 'name'; {KEYS}; write e.g. 'w: {{slots: 8, port: 22}}'",
        ),
        (
            "hosts: [{name: w, devices: [0, x]}]",
            "f: hosts[0].devices: a list: 'x' is not a device; devices are an index, GPU-... or MIG-..., "
            "joined by commas; write e.g. '{name: w, devices: [0,2]}'",
        ),
        (
            "hosts: [{name: w, devices: [0, [1]]}]",
            "f: hosts[0].devices: a list: 'a list' is not a device; devices are an index, GPU-... or "
            "MIG-..., joined by commas; write e.g. '{name: w, devices: [0,2]}'",
        ),
        (
            "hosts: [{name: w, slots: 3, devices: [0, 1]}]",
            "f: hosts[0].slots: '3': slots is 3, but devices names 2; each device is one slot, so slots can "
            "be left out; write e.g. '{name: w, devices: [0,1]}'",
        ),
        (
            "hosts: [{name: 'w[3-1]', slots: 3}]",
            "f: hosts[0]: 'w[3-1]': the range 3-1 runs backwards; "
            "write e.g. '{name: \"node[01-16]\", slots: 8}'",
        ),
        (
            "hosts: [{name: w, slots: 1}, {name: w, slots: 2}]",
            "f: hosts[1]: host 'w' is named by hosts[0] already; leave one of them out; "
            "write e.g. '{name: w, slots: 3}'",
        ),
        ("hosts: [w]",
         "f: hosts[0]: 'w': a host is a mapping with a name; write e.g. '{name: worker-1, slots: 8}'"),
        (
            "hosts: [{slots: 1}]",
            ("f: hosts[0]: a mapping: a host is a mapping with a name; write e.g. '{name: "
             "worker-1, slots: 8}'"),
        ),
        ("hosts: {w: 8}",
         "f: hosts: 'w': a host's name is followed by a mapping; write e.g. 'worker-1: {slots: 8}'"),
        (
            'hosts: {"a\\nb": {slots: 8}}',
            "f: hosts: 'a\\nb': a host's name is followed by a mapping; write e.g. 'worker-1: {slots: 8}'",
        ),
        ("hosts: w slots=8", f"f: hosts: 'w slots=8': a list or a mapping of hosts is allowed; {EXAMPLE}"),
        ("hosts: []", f"f: no host in it; {EXAMPLE}"),
        ("hosts: {}", f"f: no host in it; {EXAMPLE}"),
        ("", f"f: '' at the top; allowed is one key, 'hosts'; {EXAMPLE}"),
        ("# nothing", f"f: '' at the top; allowed is one key, 'hosts'; {EXAMPLE}"),
        ("w slots=8", f"f: 'w slots=8' at the top; allowed is one key, 'hosts'; {EXAMPLE}"),
        ("- {name: w}", f"f: a list at the top; allowed is one key, 'hosts'; {EXAMPLE}"),
        ("hosts: []\nhost: []", f"f: 'hosts, host' at the top; allowed is one key, 'hosts'; {EXAMPLE}"),
        ("hosts: [",
         f"f:1: not YAML as it is read here: expected the node content, but found '<stream end>'; {EXAMPLE}"),
        ("hosts:\n- name: w\n  name: v",
         f"f:3: not YAML as it is read here: 'name' is given twice; {EXAMPLE}"),
        ("hosts: []\n---\nhosts: []",
         f"f:2: not YAML as it is read here: but found another document; {EXAMPLE}"),
        ("? [a]\n: 1", f"f:1: not YAML as it is read here: a key is not a word; {EXAMPLE}"),
        ("hosts: *x", f"f:1: not YAML as it is read here: found undefined alias 'x'; {EXAMPLE}"),
        ("hosts: &x [*x]",
         f"f:1: not YAML as it is read here: found unconstructable recursive node; {EXAMPLE}"),
        ("[" * 1000, f"f: lists in lists, too deep to be read; {EXAMPLE}"),
        ("hosts: [{name: w, slots: 1, env: [X=1]}]",
         f"f: hosts[0].env: a list: env is a mapping of variables; {VARIABLES}"),
        (
            "hosts: [{name: w, slots: 1, env: {1X: secret}}]",
            "f: hosts[0]: '1X' in env: a variable's name holds letters, digits and '_', and does not begin "
            f"with a digit; {VARIABLES}",
        ),
        (
            "hosts: [{name: w, slots: 1, env: {X: [secret]}}]",
            f"f: hosts[0]: env.X is one text without a NUL byte; {VARIABLES}",
        ),
        (
            "hosts: [{name: w, slots: 1, env: {X: 'secret${'}}]",
            "f: hosts[0].env: X: after '${' only a variable's name and '}' may follow; "
            "write e.g. '${HOME}', or '\\${' for the text itself",
        ),
    ],
)  # fmt: skip
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
