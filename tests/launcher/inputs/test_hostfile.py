from __future__ import annotations

import re
from pathlib import Path

import click
import pytest
from hypothesis import given, settings, strategies as st

from dslaunch.launcher.command_line.cli import dslaunch
from dslaunch.launcher.errors import EXIT_MISTAKE, LaunchError
from dslaunch.launcher.inputs.env_file import EnvEntry
from dslaunch.launcher.inputs.host_range import RangeMistake, expand
from dslaunch.launcher.inputs.hostfile import Host, host_key, parse_hostfile, read_hostfile
from dslaunch.launcher.inputs.hostfile_yaml import parse_yaml_hostfile
from dslaunch.launcher.inputs.profile import parse_profile
from tests.mistakes import mistakes

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("w slots=4", Host(name="w", slots=4)),
        ("w\tslots=4", Host(name="w", slots=4)),
        ("  \t w   slots=4  ", Host(name="w", slots=4)),
        ("w slots=4\r", Host(name="w", slots=4)),
        ("w slots=2 # x", Host(name="w", slots=2)),
        ("w slots=2 #x slots=3", Host(name="w", slots=2)),
        ("w slots=04", Host(name="w", slots=4)),
        ("w slots=4096", Host(name="w", slots=4096)),
        ("w slots=4 port=2222", Host(name="w", slots=4, port=2222)),
        ("w port=65535 slots=4", Host(name="w", slots=4, port=65535)),
        ("user@h slots=2", Host(name="h", slots=2, user="user")),
        ("ada@corp.example@h slots=2", Host(name="h", slots=2, user="ada@corp.example")),
        ("CORP\\ada@h slots=2", Host(name="h", slots=2, user="CORP\\ada")),
        ("Worker_1.lan slots=2", Host(name="Worker_1.lan", slots=2)),
        ("10.0.0.1 slots=2", Host(name="10.0.0.1", slots=2)),
        ("[::1] slots=2", Host(name="::1", slots=2)),
        ("::1 slots=2", Host(name="::1", slots=2)),
        ("fe80::1%eth0 slots=2", Host(name="fe80::1%eth0", slots=2)),
        ("root@[fd00::7] slots=2 port=22", Host(name="fd00::7", slots=2, user="root", port=22)),
        ("w slots=auto", Host(name="w", slots=None)),
        ("w slots=2 user=ada", Host(name="w", slots=2, user="ada")),
        ("ada@w slots=2 user=ada", Host(name="w", slots=2, user="ada")),
        ("w devices=2,0", Host(name="w", slots=2, devices=("2", "0"))),
        ("w slots=2 devices=02,GPU-8c-1f", Host(name="w", slots=2, devices=("2", "GPU-8c-1f"))),
        ("w devices=MIG-GPU-8c/1/0", Host(name="w", slots=1, devices=("MIG-GPU-8c/1/0",))),
        ("w slots=1 python=~/env/bin/python", Host(name="w", slots=1, python="~/env/bin/python")),
        ("w slots=1 cwd='/my \\ job' port=1", Host(name="w", slots=1, cwd="/my \\ job", port=1)),
        ('w slots=1 cwd="/my \\"$HOME\\" job"', Host(name="w", slots=1, cwd='/my "$HOME" job')),
        ("w slots=1 cwd='/it'\"'\"'s here'", Host(name="w", slots=1, cwd="/it's here")),
        (
            "w1 slots=1 exec_prefix='podman exec -i \"box {host}\" --format={{.Id}}'",
            Host(name="w1", slots=1, exec_prefix=("podman", "exec", "-i", "box w1", "--format={{.Id}}")),
        ),
        ("w slots=1 exec_prefix=true", Host(name="w", slots=1, exec_prefix=("true",))),
        ("w slots=1 exec_prefix=''", Host(name="w", slots=1, exec_prefix=())),
        ("w slots=1 cwd='/a # b' # c'd", Host(name="w", slots=1, cwd="/a # b")),
    ],
)
def test_a_line_names_one_host(line: str, host: Host) -> None:
    assert parse_hostfile(line, source="hosts") == (host,)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", ("1",)),
        ("", ("",)),
        ("''", ("",)),
        ("'a b'", ("a b",)),
        ("'$HOME'", ("$HOME",)),
        ('"a $HOME"', ("a ", "HOME", "")),
        ("$HOME/x:${PATH}", ("", "HOME", "/x:", "PATH", "")),
        ("\\$HOME", ("$HOME",)),
        ("a=b=", ("a=b=",)),
        ('{"a":1}', ('{"a":1}',)),
        ("it's", ("it's",)),
        ("a#b", ("a#b",)),
    ],
)
def test_a_variable_s_value_is_written_as_in_an_environment_file(text: str, value: tuple[str, ...]) -> None:
    (host,) = parse_hostfile(f"w env.A=1 env._X9={text} slots=2", source="hosts")
    assert host.env == (
        EnvEntry(name="A", value=("1",), source="hosts:1"),
        EnvEntry(name="_X9", value=value, source="hosts:1"),
    )


def test_a_variable_that_cannot_be_read_is_refused_without_its_value() -> None:
    with pytest.raises(LaunchError, match=r"^hosts:1: X: after '\$\{' only a variable's name") as caught:
        parse_hostfile("w slots=2 env.X=secret${", source="hosts")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("node[1-3]", "node1 node2 node3"),
        ("node[08-11]", "node08 node09 node10 node11"),
        ("node[0-1].lan", "node0.lan node1.lan"),
        ("node[9-10]", "node9 node10"),
        ("n[1,3,7-9]", "n1 n3 n7 n8 n9"),
        ("n[08-12/2,20]", "n08 n10 n12 n20"),
        ("n[3,1]", "n3 n1"),
        ("n[007]", "n007"),
        ("n[1,01]", "n1 n01"),
        ("dc[1-2]n[1-3]", "dc1n1 dc1n2 dc1n3 dc2n1 dc2n2 dc2n3"),
        ("10.0.[0-1].[1-2]", "10.0.0.1 10.0.0.2 10.0.1.1 10.0.1.2"),
        ("[1-2]x", "1x 2x"),
    ],
)
def test_a_range_names_many_hosts_in_order(word: str, names: str) -> None:
    hosts = parse_hostfile(f"ada@{word} slots=8 port=22", source="hosts")
    assert hosts == tuple(Host(name=name, slots=8, user="ada", port=22) for name in names.split())


def test_ten_thousand_hosts_fit_into_a_range() -> None:
    hosts = parse_hostfile("n[0000-9999] slots=8", source="hosts")
    assert len(hosts) == 10_000
    assert hosts[7].name == "n0007"


@pytest.mark.parametrize(("line", "why"), mistakes("hostfile"))
def test_a_bad_line_is_refused_with_its_place_and_what_to_write(line: str, why: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_hostfile(f"first slots=1\n\n{line}", source="job/hosts")
    line = re.sub(r"( env\.\w+=).*", r"\1...", line)  # a variable's value may be a secret
    assert str(caught.value) == f"job/hosts:3: {line!r}: {why}"
    assert caught.value.exit_code == EXIT_MISTAKE


def test_the_order_of_the_file_is_kept() -> None:
    text = """
    worker-9 slots=2
        worker-1 slots=2

#worker-1 slots=3
    # this is a comment
    localhost slots=1
      127.0.0.1 slots=2
    """
    assert parse_hostfile(text, source="hosts") == (
        Host(name="worker-9", slots=2),
        Host(name="worker-1", slots=2),
        Host(name="localhost", slots=1),
        Host(name="127.0.0.1", slots=2),
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("w slots=2", "w slots=2"),
        ("a@w slots=2", "b@w slots=2"),
        ("w slots=2 port=1", "w slots=2 port=2"),
        ("fd00::7 slots=1", "[FD00:0::7] slots=1"),
        ("w[1-3] slots=1", "w2 slots=auto"),
        ("w2 slots=1", "w[1-3] devices=0"),
    ],
)
def test_a_host_named_twice_is_refused(first: str, second: str) -> None:
    with pytest.raises(LaunchError, match=r"^hosts:3: .* is on line 1 already"):
        parse_hostfile(f"{first}\n# between\n{second}\n", source="hosts")


def test_the_message_for_a_host_named_twice() -> None:
    with pytest.raises(LaunchError) as caught:
        parse_hostfile("w1 slots=2\nada@w1 slots=4 # again", source="hosts")
    assert str(caught.value) == (
        "hosts:2: 'ada@w1 slots=4 # again': host 'w1' is on line 1 already, and a host has one line for all "
        "its slots; leave one of them out; write e.g. 'ada@w1 slots=6'"
    )


@pytest.mark.parametrize("text", ["", "\n", " \t\r\n", "# w slots=2\n   #x\n"])
def test_a_hostfile_without_hosts_is_refused(text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_hostfile(text, source="hosts")
    assert str(caught.value) == (
        "hosts: no host in it, only blank lines and comments; "
        "a hostfile has one line per host; write e.g. 'worker-1 slots=8'"
    )


def test_a_long_line_is_shortened_in_the_message() -> None:
    with pytest.raises(LaunchError) as caught:
        parse_hostfile("w " + "x" * 1000, source="hosts")
    assert "'w " + "x" * 118 + "...'" in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("w1", "W1", True),
        ("w1", "w2", False),
        ("::1", "0:0::1", True),
        ("fe80::1%eth0", "FE80::1%eth0", True),
        ("fe80::1%eth0", "fe80::1%eth1", False),
    ],
)
def test_names_are_compared_without_case_and_addresses_by_value(one: str, other: str, is_same: bool) -> None:
    assert (host_key(one) == host_key(other)) is is_same


def entries(source: str, **values: tuple[str, ...]) -> tuple[EnvEntry, ...]:
    return tuple(EnvEntry(name=name, value=value, source=source) for name, value in values.items())


EXAMPLES = {
    "single-node": (Host(name="worker-1", slots=8),),
    "two-nodes": (Host(name="worker-1", slots=8), Host(name="worker-2", slots=8)),
    "unequal": (
        Host(name="big-1", slots=8),
        Host(name="big-2", slots=4, user="ada"),
        Host(name="small.lan", slots=1),
    ),
    "ipv6-and-ports": (
        Host(name="10.0.0.5", slots=4),
        Host(name="fd00::7", slots=4),
        Host(name="fd00::8", slots=4, port=2222),
        Host(name="fe80::9%eth0", slots=2, user="root", port=2222),
    ),
    "ranges": (
        *(Host(name=f"node{number:02}", slots=None) for number in range(1, 17)),
        *(Host(name=f"rack{rack}-{place}", slots=8, port=2222) for rack in (1, 2) for place in (1, 2, 3)),
        *(Host(name=f"extra{number}", slots=4) for number in (1, 3, 7, 8)),
    ),
    "each-its-own": (
        Host(name="worker-1", slots=3, devices=("2", "3", "0")),
        Host(name="worker-2", slots=1, devices=("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",)),
        Host(name="worker-3", slots=8, user="ada", python="~/envs/train/bin/python", cwd="/scratch/job"),
        Host(
            name="worker-4",
            slots=8,
            env=entries(
                "hostfiles/each-its-own:11",
                NCCL_SOCKET_IFNAME=("ib0",),
                NOTE=("two words",),
                PATH=("/opt/bin:", "PATH", ""),
            ),
        ),
        Host(name="worker-5", slots=8, exec_prefix=("podman", "exec", "-i", "train-worker-5")),
    ),
    "cluster.yaml": (
        Host(name="worker-1", slots=8),
        Host(
            name="worker-2",
            slots=2,
            devices=("0", "2"),
            user="ada",
            port=2222,
            cwd="/scratch/job",
            env=entries("hostfiles/cluster.yaml: hosts[1].env", NCCL_SOCKET_IFNAME=("ib0",)),
        ),
        *(Host(name=f"node{number:02}", slots=None) for number in range(1, 5)),
    ),
}


@pytest.mark.parametrize("path", sorted((ROOT / "hostfiles").iterdir()), ids=lambda path: path.name)
def test_every_hostfile_to_copy_says_what_it_should(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert read_hostfile(path.relative_to(ROOT)) == EXAMPLES[path.name]


def test_the_hostfile_in_the_guide_is_read() -> None:
    (block,) = re.findall(r"```hostfile\n(.*?)```", (ROOT / "docs/launch/hostfile.md").read_text(), re.DOTALL)
    assert parse_hostfile(block, source="guide") == (
        Host(name="worker-1", slots=8),
        Host(name="worker-2", slots=4, user="ada", port=2222),
        Host(name="fd00::7", slots=2, devices=("0", "2")),
        *(Host(name=f"node{number:02}", slots=None) for number in range(1, 17)),
        Host(name="worker-3", slots=8, cwd="/scratch/my job", env=entries("guide:6", NCCL_DEBUG=("INFO",))),
    )


def test_the_yaml_hostfile_in_the_guide_says_the_same_as_the_first_lines() -> None:
    guide = (ROOT / "docs/launch/hostfile.md").read_text()
    lines, text = (re.findall(rf"```{kind}\n(.*?)```", guide, re.DOTALL)[0] for kind in ("hostfile", "yaml"))
    assert parse_yaml_hostfile(text, source="guide") == parse_hostfile(
        "\n".join(lines.splitlines()[:4]), source="guide"
    )


def test_the_profile_in_the_guide_is_read() -> None:
    guide = (ROOT / "docs/launch/hostfile.md").read_text()
    text = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)[1]
    options = {name: one for one in dslaunch.params if isinstance(one, click.Option) for name in one.opts}
    assert parse_profile(text, options, source="job.yaml") == (
        ("--hostfile=hosts", "--num_gpus=4", "--no_local_rank"),
        ("--", "train.py", "--", "--epochs", "3"),
        frozenset(),
    )


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfw slots=2\r\nx slots=3\r\n")
    assert read_hostfile(path) == (Host(name="w", slots=2), Host(name="x", slots=3))


def test_a_missing_hostfile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    with pytest.raises(LaunchError) as caught:
        read_hostfile(path)
    assert str(caught.value) == (
        f"{path}: this hostfile cannot be read (No such file or directory); "
        "give --hostfile the path of a text file, or a list such as 'node[1-4]:8'"
    )


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"cannot be read \(Is a directory\)"):
        read_hostfile(tmp_path)


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"w slots=2\n\xff\xfe")
    with pytest.raises(LaunchError) as caught:
        read_hostfile(path)
    assert str(caught.value) == (
        f"{path}: not text (byte 10 is not UTF-8); "
        "a hostfile is UTF-8 text with one host per line; write e.g. 'worker-1 slots=8'"
    )


_WORDS = (
    "w1",
    "w2",
    "::1",
    "slots=",
    "slots=auto",
    "port=",
    "devices=",
    "env.X=",
    "cwd=/",
    "user=",
    "GPU-1",
    "${",
)
_pieces = st.sampled_from([*_WORDS, *"[]@ '\"$\\30-,#\n\t=:%\0"])


@given(st.lists(_pieces | st.text(max_size=3)).map("".join))
@settings(deadline=2000)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        hosts = parse_hostfile(text, source="hosts")
    except LaunchError:
        return
    assert all(host.slots is None or len(host.device_ids) == host.slots > 0 for host in hosts)
    assert len({host_key(host.name) for host in hosts}) == len(hosts) > 0


@given(
    st.lists(st.tuples(st.integers(0, 120), st.integers(0, 120)).map(sorted), min_size=1, max_size=3),
    st.booleans(),
)
def test_a_range_is_what_counting_gives(spans: list[list[int]], is_padded: bool) -> None:
    width = 3 if is_padded else 0
    word = ",".join(f"{first:0{width}}-{last:0{width}}" for first, last in spans)
    names = [f"n{number:0{width}}" for first, last in spans for number in range(first, last + 1)]
    if len(set(names)) < len(names):
        with pytest.raises(RangeMistake, match="twice"):
            expand(f"n[{word}]")
    else:
        assert expand(f"n[{word}]") == tuple(names)


@pytest.mark.parametrize(
    "line",
    [
        "n" + "[1-9999]" * 2000,
        "n[" + "1," * 50_000 + "1]",
        "w cwd=" + "'" * 100_001,
        "w cwd=" + '"\\' * 50_000,
        "w " + "slots=" * 50_000,
        "a" * 100_000 + "@" * 1000,
        "w slots=" + "9" * 100_000,
        "w devices=" + ",".join(map(str, range(5000))),
    ],
    ids=lambda line: line[:8],
)
@pytest.mark.timeout(5)
def test_a_long_line_is_refused_soon(line: str) -> None:
    with pytest.raises(LaunchError):
        parse_hostfile(line, source="hosts")


@pytest.mark.parametrize(
    ("text", "hosts", "warning"),
    [
        (
            "w slots=2 max_slots=4",
            [("w", 2)],
            "hosts:1: 'max_slots=4' has no effect, as with DeepSpeed; leave it out",
        ),
        (
            "w slots=2#gpus cwd=/x",
            [("w", 2)],
            "hosts:1: '#gpus cwd=/x' is read as a comment, as with DeepSpeed; write a space before '#'",
        ),
        (
            "w slots=2 shelf 7 colour=red",
            [("w", 2)],
            "hosts:1: 'shelf 7 colour=red' has no effect, as with DeepSpeed; leave it out, or write a "
            "key that has one: slots, devices, port, user, python, cwd, role, rack, exec_prefix, env.NAME",
        ),
        ("w slots=2 spare", [("w", 2)], "hosts:1: 'spare' has no effect"),
        ("v slots=0\nw slots=1", [("w", 1)], "hosts:1: v has slots=0 and takes no part"),
        ("Node1 slots=1\nnode1 slots=2", [("Node1", 1), ("node1", 2)], ""),
    ],
)
def test_a_line_that_deepspeed_reads_means_the_same_here(
    text: str, hosts: list[tuple[str, int]], warning: str
) -> None:
    said: list[str] = []
    found = parse_hostfile(text, source="hosts", warn=said.append)
    assert [(host.name, host.slots) for host in found] == hosts
    assert len(said) == bool(warning)
    assert all(one.startswith(warning) for one in said)


def test_a_file_whose_hosts_all_have_no_slots_names_no_host() -> None:
    with pytest.raises(LaunchError) as caught:
        parse_hostfile("# mine\nw slots=0\n", source="hosts")
    assert str(caught.value) == (
        "hosts: every host in it has slots=0, so none can take part; write e.g. slots=8 for one"
    )


@pytest.mark.parametrize(
    ("lines", "example"),
    [
        ("node[1-3] slots=2\nnode2 slots=3", "'node2 slots=5'"),
        ("node2 slots=2\nnode[1-3] slots=auto", "'node2 slots=auto'"),
        ("[::1] devices=0,2\n[::1] devices=2,3", "'[::1] devices=0,2,3'"),
        ("w slots=4096\nw slots=1", "'w slots=4096'"),
    ],
)
def test_the_example_for_a_host_named_twice_says_what_both_lines_say(lines: str, example: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_hostfile(lines, source="hosts")
    assert str(caught.value).endswith(f"leave one of them out; write e.g. {example}")


@pytest.mark.parametrize("key", ["cwd", "env.NCCL_DEBUG", "python"])
def test_a_key_without_a_value_is_no_text_that_has_no_effect(key: str) -> None:
    with pytest.raises(LaunchError, match=f"only key=value may stand, and {key!r} is not"):
        parse_hostfile(f"w slots=2 {key}", source="hosts")


def test_a_name_that_is_too_long_is_told_so() -> None:
    with pytest.raises(LaunchError, match="a host's name has 253 characters at most, and this one has 254"):
        parse_hostfile(f"{'a' * 254} slots=2", source="hosts")
    assert parse_hostfile(f"{'a' * 253} slots=2", source="hosts")
