from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.errors import EXIT_MISTAKE, LaunchError
from dslaunch.launcher.hostfile import Host, host_key, parse_hostfile, read_hostfile

ROOT = Path(__file__).parents[2]


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
    ],
)
def test_a_line_names_one_host(line: str, host: Host) -> None:
    assert parse_hostfile(line, source="hosts") == (host,)


SLOTS = "slots must be a whole number above 0; write e.g. '{0} slots=8'"
NAME = "a host's name is made of letters, digits and .-_ and begins with none of .-; write e.g. 'worker-1 slots=8'"
RANGES = "ranges are not supported; write one line per host; write e.g. 'worker-1 slots=8'"
COLON = (
    "':' may stand only in an IPv6 address; slots are given as slots=N, an ssh port as port=N; "
    "write e.g. '{0} slots=8'"
)
UNKNOWN = "allowed are slots=N and port=N; write e.g. 'w slots=8 port=22'"
SPACE = "no space may stand around '='; write e.g. 'w slots=8'"
MISSING = "slots=N is missing, the number of processes the host takes; write e.g. '{0}'"
USER = (
    "a user, before the last '@', is made of letters, digits and _.+-$@\\ and begins with none of +-$@\\; "
    "write e.g. 'ada@worker-1 slots=8'"
)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("worker-3 slots=x", SLOTS.format("worker-3")),
        ("w slots=0", SLOTS.format("w")),
        ("w slots=-1", SLOTS.format("w")),
        ("w slots=2x", SLOTS.format("w")),
        ("w slots=2#x", SLOTS.format("w")),
        ("w slots=2.5", SLOTS.format("w")),
        ("w slots=", SLOTS.format("w")),
        ("w slots=\u00b2", SLOTS.format("w")),
        ("w slots=4097", "slots must be a whole number from 1 to 4096; write e.g. 'w slots=8'"),
        ("w slots=4 port=0", "port must be a whole number from 1 to 65535; write e.g. 'w slots=8 port=22'"),
        (
            "w slots=4 port=65536",
            "port must be a whole number from 1 to 65535; write e.g. 'w slots=8 port=22'",
        ),
        ("w slots=4 port=ssh", "port must be a whole number from 1 to 65535; write e.g. 'w slots=8 port=22'"),
        ("w slots = 2", SPACE),
        ("w slots =2", SPACE),
        ("w slots= 2", SPACE),
        ("w", MISSING.format("w slots=8")),
        ("missingslots", MISSING.format("missingslots slots=8")),
        ("w port=2222 # slots=8", MISSING.format("w slots=8 port=2222")),
        ("w slots=2 slots=3", "slots is given twice; write e.g. 'w slots=3'"),
        ("w slots=2 max_slots=4", f"unknown key 'max_slots'; {UNKNOWN}"),
        ("w slot=2", f"unknown key 'slot' (did you mean 'slots'?); {UNKNOWN}"),
        ("w SLOTS=2", f"unknown key 'SLOTS' (did you mean 'slots'?); {UNKNOWN}"),
        ("w slots=2 prt=22", f"unknown key 'prt' (did you mean 'port'?); {UNKNOWN}"),
        (
            "this is bad slots=1",
            "after the host's name only key=value may stand, and 'is' is not; write e.g. 'this slots=8'",
        ),
        (
            "w slots=2 spare",
            "after the host's name only key=value may stand, and 'spare' is not; write e.g. 'w slots=8'",
        ),
        ("slots=4", "a line begins with the host's name; write e.g. 'worker-1 slots=8'"),
        ("w:2", COLON.format("w")),
        ("w:2 slots=2", COLON.format("w")),
        ("ada@10.0.0.1:22 slots=2", COLON.format("ada@10.0.0.1")),
        ("[::1]:22 slots=2", "brackets may hold only an IPv6 address; write e.g. '[fd00::7] slots=8'"),
        ("[fd00::7 slots=2", "brackets may hold only an IPv6 address; write e.g. '[fd00::7] slots=8'"),
        ("[w] slots=2", "brackets may hold only an IPv6 address; write e.g. '[fd00::7] slots=8'"),
        (":::1 slots=2", COLON.format("[fd00::7]")),
        ("node[1-4] slots=8", RANGES),
        ("node[01,03] slots=8", RANGES),
        ("node{1..4} slots=8", RANGES),
        ("ada@node[1-4] slots=8", RANGES.replace("'worker", "'ada@worker")),
        (
            "10.0.0.256 slots=2",
            "an IPv4 address has four numbers from 0 to 255; write e.g. '10.0.0.7 slots=8'",
        ),
        ("10.0.1 slots=2", "an IPv4 address has four numbers from 0 to 255; write e.g. '10.0.0.7 slots=8'"),
        ("w0,w1 slots=2", NAME),
        ("-oProxyCommand=id slots=2", "a line begins with the host's name; write e.g. 'worker-1 slots=8'"),
        ("-w slots=2", NAME),
        ("w\u00f6rker slots=2", NAME),
        ("w$(id) slots=2", NAME),
        ("ada@ slots=2", "a host's" + NAME.removeprefix("a host's").replace("'worker", "'ada@worker")),
        ("@w slots=2", USER),
        ("-l@w slots=2", USER),
        ("a;b@w slots=2", USER),
    ],
)
def test_a_bad_line_is_refused_with_its_place_and_what_to_write(line: str, why: str) -> None:
    with pytest.raises(LaunchError) as caught:
        parse_hostfile(f"first slots=1\n\n{line}", source="job/hosts")
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
        ("w slots=2", "W slots=3"),
        ("a@w slots=2", "b@w slots=2"),
        ("w slots=2 port=1", "w slots=2 port=2"),
        ("fd00::7 slots=1", "[FD00:0::7] slots=1"),
    ],
)
def test_a_host_named_twice_is_refused(first: str, second: str) -> None:
    with pytest.raises(LaunchError, match=r"^hosts:3: .* is on line 1 already"):
        parse_hostfile(f"{first}\n# between\n{second}\n", source="hosts")


def test_the_message_for_a_host_named_twice() -> None:
    with pytest.raises(LaunchError) as caught:
        parse_hostfile("w1 slots=2\nada@W1 slots=4 # again", source="hosts")
    assert str(caught.value) == (
        "hosts:2: 'ada@W1 slots=4 # again': host 'W1' is on line 1 already, and a host has one line for all its "
        "slots (upper and lower case are the same name); write e.g. 'ada@W1 slots=4'"
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
}


@pytest.mark.parametrize("path", sorted((ROOT / "hostfiles").iterdir()), ids=lambda path: path.name)
def test_every_hostfile_to_copy_says_what_it_should(path: Path) -> None:
    assert read_hostfile(path) == EXAMPLES[path.name]


def test_the_hostfile_in_the_guide_is_read() -> None:
    (block,) = re.findall(r"```hostfile\n(.*?)```", (ROOT / "docs/guide-hostfile.md").read_text(), re.DOTALL)
    assert parse_hostfile(block, source="guide") == (
        Host(name="worker-1", slots=8),
        Host(name="worker-2", slots=4, user="ada", port=2222),
        Host(name="fd00::7", slots=8),
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
        "give --hostfile the path of a text file"
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


_pieces = st.sampled_from(
    ["w1", "w2", "::1", "[", "]", "@", " ", "slots=", "port=", "3", "0", "#", "\n", "\t", "=", ":"]
)


@given(st.lists(_pieces | st.text(max_size=3)).map("".join))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        hosts = parse_hostfile(text, source="hosts")
    except LaunchError:
        return
    assert all(host.slots > 0 for host in hosts)
    assert len({host_key(host.name) for host in hosts}) == len(hosts) > 0
