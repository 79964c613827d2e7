from __future__ import annotations

import re

import pytest
from hypothesis import given, settings, strategies as st

from dslaunch.launcher.errors import EXIT_MISTAKE, LaunchError
from dslaunch.launcher.inputs.hostfile import Host
from dslaunch.launcher.inputs.selection import hosts_in_question, local_devices_from_visible, select
from tests.mistakes import mistakes

W0 = Host(name="w0", slots=4)
W1 = Host(name="w1", slots=4)
SIX = Host(name="::1", slots=2)
BIG = Host(name="Big.lan", slots=12)
TWO = (W0, W1)
ALL4 = ("0", "1", "2", "3")


def devices_by_host(hosts: tuple[Host, ...], **options: str | int) -> dict[str, tuple[str, ...]]:
    selected = select(hosts, **options)  # type: ignore[arg-type]
    assert [hosts.index(one.host) for one in selected] == sorted(hosts.index(one.host) for one in selected)
    return {one.host.name: one.devices for one in selected}


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("", {"w0": ALL4, "w1": ALL4}),
        ("w0", {"w0": ALL4}),
        ("w1@w0", {"w0": ALL4, "w1": ALL4}),
        ("w1:0,2", {"w1": ("0", "2")}),
        ("w1:2,0", {"w1": ("0", "2")}),
        ("w1:1,1", {"w1": ("1",)}),
        ("w0:1@w0:0,1", {"w0": ("0", "1")}),
        ("w0:0,1@w0:3", {"w0": ("0", "1", "3")}),
        ("w0@w0:1", {"w0": ALL4}),
        ("w0:1@w0", {"w0": ALL4}),
        ("w0@w1:0,2", {"w0": ALL4, "w1": ("0", "2")}),
        ("w1:0@w0:3", {"w0": ("3",), "w1": ("0",)}),
        ("w1:0-2", {"w1": ("0", "1", "2")}),
        ("w1:0-1,3", {"w1": ("0", "1", "3")}),
        ("w1:2-2", {"w1": ("2",)}),
        ("w1:03", {"w1": ("3",)}),
        (" w1 : 0 , 2 - 3 @ w0 ", {"w0": ALL4, "w1": ("0", "2", "3")}),
        ("W1:0", {"w1": ("0",)}),
    ],
)
def test_include_gives_the_named_slots_in_hostfile_order(
    include: str, expected: dict[str, tuple[str, ...]]
) -> None:
    assert devices_by_host(TWO, include=include) == expected


@pytest.mark.parametrize(
    ("exclude", "expected"),
    [
        ("w1", {"w0": ALL4}),
        ("w1:0", {"w0": ALL4, "w1": ("1", "2", "3")}),
        ("w1:1,2", {"w0": ALL4, "w1": ("0", "3")}),
        ("w1:1-3", {"w0": ALL4, "w1": ("0",)}),
        ("w1:0,1,2,3", {"w0": ALL4}),
        ("w0:0,1@w1:3", {"w0": ("2", "3"), "w1": ("0", "1", "2")}),
        ("w0@w1:3", {"w1": ("0", "1", "2")}),
        ("w0:1@w0", {"w1": ALL4}),
    ],
)
def test_exclude_leaves_the_rest(exclude: str, expected: dict[str, tuple[str, ...]]) -> None:
    assert devices_by_host(TWO, exclude=exclude) == expected


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        ("[::1]", {"::1": ("0", "1")}),
        ("[::1]:1", {"::1": ("1",)}),
        ("[0:0::1]:1", {"::1": ("1",)}),
        ("big.LAN:9-11", {"Big.lan": ("9", "10", "11")}),
        ("Big.lan:11,9@[::1]:0", {"::1": ("0",), "Big.lan": ("9", "11")}),
    ],
)
def test_addresses_stand_in_brackets_and_slots_sort_as_numbers(
    include: str, expected: dict[str, tuple[str, ...]]
) -> None:
    assert devices_by_host((SIX, BIG), include=include) == expected


@pytest.mark.parametrize(
    ("num_nodes", "num_gpus", "expected"),
    [
        (-1, -1, {"::1": ("0", "1"), "w0": ALL4, "w1": ALL4}),
        (0, 0, {"::1": ("0", "1"), "w0": ALL4, "w1": ALL4}),
        (1, -1, {"::1": ("0", "1")}),
        (2, 0, {"::1": ("0", "1"), "w0": ALL4}),
        (3, -1, {"::1": ("0", "1"), "w0": ALL4, "w1": ALL4}),
        (-1, 1, {"::1": ("0",), "w0": ("0",), "w1": ("0",)}),
        (2, 2, {"::1": ("0", "1"), "w0": ("0", "1")}),
    ],
)
def test_numbers_take_the_first_hosts_and_slots(
    num_nodes: int, num_gpus: int, expected: dict[str, tuple[str, ...]]
) -> None:
    assert devices_by_host((SIX, W0, W1), num_nodes=num_nodes, num_gpus=num_gpus) == expected


def test_only_the_hosts_that_take_part_must_have_the_slots() -> None:
    assert devices_by_host((W0, SIX), num_nodes=1, num_gpus=4) == {"w0": ALL4}


@pytest.mark.parametrize("option", ["--include", "--exclude"])
@pytest.mark.parametrize(("text", "message"), mistakes("selection"))
def test_a_bad_item_is_quoted_with_its_option(option: str, text: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        devices_by_host(TWO, **{option[2:]: text})
    assert str(caught.value) == f"{option} {message}".replace("--include", option)
    assert caught.value.exit_code == EXIT_MISTAKE


NAMED = Host(name="named", slots=4, devices=("5", "GPU-a1", "0", "2"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"w0": ALL4, "named": ("5", "GPU-a1", "0", "2")}),
        ({"include": "named"}, {"named": ("5", "GPU-a1", "0", "2")}),
        ({"include": "named:0,2"}, {"named": ("0", "2")}),
        ({"include": "named:2,05"}, {"named": ("5", "2")}),
        ({"include": "named:GPU-a1,2-2@w0:3"}, {"w0": ("3",), "named": ("GPU-a1", "2")}),
        ({"exclude": "named:5@w0"}, {"named": ("GPU-a1", "0", "2")}),
        ({"num_gpus": 2}, {"w0": ("0", "1"), "named": ("5", "GPU-a1")}),
    ],
)
def test_slots_are_device_ids_where_the_hostfile_names_devices(
    options: dict[str, str | int], expected: dict[str, tuple[str, ...]]
) -> None:
    assert devices_by_host((W0, NAMED), **options) == expected


@pytest.mark.parametrize("piece", ["1", "0-2", "GPU-b2", "MIG-1/0", "5-5000"])
def test_a_device_that_the_hostfile_does_not_name_is_refused_with_those_it_names(piece: str) -> None:
    with pytest.raises(LaunchError) as caught:
        select((W0, NAMED), include=f"named:{piece}")
    assert str(caught.value) == (
        f"--include 'named:{piece}': host 'named' has devices=5,GPU-a1,0,2, so {piece} is beyond the allowed "
        "5,GPU-a1,0,2; write e.g. --include named:5,GPU-a1,0,2"
    )


def test_more_devices_than_named_are_refused() -> None:
    with pytest.raises(
        LaunchError, match=r"the smallest host, 'named', has devices=5,GPU-a1,0,2; give at most 4"
    ):
        select((NAMED,), num_gpus=5)


def test_a_range_of_hosts_can_be_selected() -> None:
    hosts = tuple(Host(name=f"n{number:02}", slots=2) for number in range(1, 13))
    assert devices_by_host(hosts, include="n[02-03,11]:1@n05") == {
        "n02": ("1",),
        "n03": ("1",),
        "n05": ("0", "1"),
        "n11": ("1",),
    }


AUTO = tuple(Host(name=f"a{number}", slots=None) for number in range(3))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({}, "w0 a0 a1 a2"),
        ({"include": "a1@w0"}, "w0 a1"),
        ({"include": "a1:7"}, "a1"),
        ({"exclude": "a1@a2:0"}, "w0 a0 a2"),
        ({"exclude": "a1@a1:0"}, "w0 a0 a1 a2"),  # whether a1 has a slot 0 is worth a look
        ({"num_nodes": 2}, "w0 a0"),
        ({"num_nodes": 2, "num_gpus": 9}, "w0 a0"),
    ],
)
def test_only_hosts_that_may_take_part_are_in_question(options: dict[str, str | int], names: str) -> None:
    found = hosts_in_question((W0, *AUTO), **options)  # type: ignore[arg-type]
    assert " ".join(host.name for host in found) == names


def test_a_host_that_is_excluded_needs_no_known_slots() -> None:
    assert devices_by_host((W0, *AUTO), exclude="a[0-2]") == {"w0": ALL4}
    assert devices_by_host((W0, *AUTO), include="w0:1") == {"w0": ("1",)}
    assert devices_by_host((W0, *AUTO), num_nodes=1) == {"w0": ALL4}


def test_selecting_slots_that_were_not_looked_up_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="the slots of a0 were not looked up"):
        select((W0, *AUTO))


@pytest.mark.parametrize("text", ["zz", "a1@@", "a1:0:0"])
def test_a_bad_item_is_found_before_anybody_looks(text: str) -> None:
    with pytest.raises(LaunchError, match=r"^--exclude"):
        hosts_in_question((W0, *AUTO), exclude=text)


def test_a_number_of_thousands_of_digits_is_beyond_the_slots() -> None:
    with pytest.raises(LaunchError, match="is beyond the allowed 0-3"):
        select(TWO, include="w0:" + "9" * 5000)


@pytest.mark.parametrize(
    ("options", "slots"),
    [
        ({}, "0 1 2 3"),
        ({"exclude": "worker-0:1"}, "0 2 3"),
        ({"exclude": "worker-0:1,2"}, "0 3"),
        ({"include": "worker-0:1"}, "1"),
        ({"include": "worker-0:1,1"}, "1"),
        ({"include": "worker-0:1@worker-0:0,1"}, "0 1"),
        ({"include": "worker-0"}, "0 1 2 3"),
    ],
)
def test_one_host_as_in_deepspeed_s_own_tests(options: dict[str, str], slots: str) -> None:
    """Source: DeepSpeed 0.19.8 tests/unit/launcher/test_run.py, `test_parser_local`."""
    found = devices_by_host((Host(name="worker-0", slots=4),), **options)
    assert found == {"worker-0": tuple(slots.split())}


def test_the_one_slot_of_a_host_is_named() -> None:
    with pytest.raises(LaunchError) as caught:
        select((Host(name="::1", slots=1),), include="[::1]:1")
    assert str(caught.value) == (
        "--include '[::1]:1': host '::1' has slots=1, so 1 is beyond the allowed 0; write "
        "e.g. --include [::1]:0"
    )


@pytest.mark.parametrize("text", ["w0@w1", "w0:0-3@w1:0,1,2,3"])
def test_nothing_left_is_an_error(text: str) -> None:
    with pytest.raises(LaunchError) as caught:
        select(TWO, exclude=text)
    assert str(caught.value) == (
        f"--exclude {text!r}: nothing is left; the hosts are w0, w1; leave at least one slot of one host"
    )


def test_no_hosts_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"^no host to start on; write a hostfile"):
        select(())


def test_a_pool_without_slots_is_an_error() -> None:
    with pytest.raises(LaunchError, match=r"^no host has a slot \(localhost\); give"):
        select((Host(name="localhost", slots=0),))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"include": "A", "exclude": "B"},
            "--include 'A' and --exclude 'B': only one of the two is allowed; "
            "give --include with what takes part, or --exclude with what does not",
        ),
        (
            {"num_nodes": 1, "include": "localhost"},
            (
                "--num_nodes 1 and --include 'localhost': a number cannot be combined with names; give one "
                "of the two"
            ),
        ),
        (
            {"num_gpus": 0, "exclude": "w0"},
            "--num_gpus 0 and --exclude 'w0': a number cannot be combined with names; give one of the two",
        ),
        (
            {"num_nodes": 0, "num_gpus": 1, "include": "w0"},
            "--num_nodes 0 and --include 'w0': a number cannot be combined with names; give one of the two",
        ),
        (
            {"num_nodes": 4},
            "--num_nodes 4: there are 3 hosts (w0, w1, [::1]); give at most 3, or add lines to the hostfile",
        ),
        (
            {"num_gpus": 3},
            "--num_gpus 3: the smallest host, '::1', has slots=2; "
            "give at most 2, or name each host's slots with --include",
        ),
        (
            {"num_nodes": 2, "num_gpus": 5},
            "--num_gpus 5: the smallest host, 'w0', has slots=4; "
            "give at most 4, or name each host's slots with --include",
        ),
    ],
)
def test_options_that_contradict_each_other_or_the_pool_are_refused(
    options: dict[str, str | int], message: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        devices_by_host((W0, W1, SIX), **options)
    assert str(caught.value) == message


def test_one_host_is_counted_in_the_singular() -> None:
    with pytest.raises(LaunchError, match=re.escape("--num_nodes 2: there is 1 host (w0); give at most 1")):
        select((W0,), num_nodes=2)


def test_a_long_list_of_hosts_is_shortened() -> None:
    hosts = tuple(Host(name=f"n{number}", slots=1) for number in range(1000))
    with pytest.raises(LaunchError, match=r"the hosts are n0, .*, n9 and 990 more; write"):
        select(hosts, include="zz")


@pytest.mark.parametrize(
    ("value", "devices"),
    [
        ("", ()),
        ("  ", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0", ("0",)),
        ("1,0", ("1", "0")),
        ("3, 1 ,2", ("3", "1", "2")),
        ("03", ("3",)),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,0", ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "0")),
        ("MIG-GPU-8932f937-d72c/1/0", ("MIG-GPU-8932f937-d72c/1/0",)),
    ],
)
def test_visible_devices_keep_their_order_and_spelling(value: str, devices: tuple[str, ...]) -> None:
    assert local_devices_from_visible(value) == devices


ALLOWED = (
    "is not a device; allowed are an index, GPU-... and MIG-..., joined by commas; "
    "write e.g. CUDA_VISIBLE_DEVICES=0,1"
)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0,,1", f"'' {ALLOWED}"),
        ("0,", f"'' {ALLOWED}"),
        ("all", f"'all' {ALLOWED}"),
        ("0,-1", f"'-1' {ALLOWED}"),
        ("0-3", f"'0-3' {ALLOWED}"),
        (
            "1, 0,1",
            (
                "device '1' is given twice, and one device takes one process; write e.g. "
                "CUDA_VISIBLE_DEVICES=1,0"
            ),
        ),
    ],
)
def test_bad_visible_devices_are_refused(value: str, message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        local_devices_from_visible(value)
    assert str(caught.value) == f"CUDA_VISIBLE_DEVICES={value!r}: {message}"


_pieces = st.sampled_from(
    ["w0", "w1", "[::1]", "named", "@", ":", ",", "-", "0", "1", "3", "4", "5", "GPU-a1", " "]
)
_items = st.lists(_pieces | st.text(max_size=2)).map("".join)
_numbers = st.just(-1) | st.integers(-2, 5)


@settings(max_examples=80)
@given(st.just("") | _items, st.just("") | _items, _numbers, _numbers)
def test_any_options_select_slots_that_exist_or_are_refused(
    include: str, exclude: str, num_nodes: int, num_gpus: int
) -> None:
    try:
        selected = select(
            (W0, SIX, NAMED, W1), include=include, exclude=exclude, num_nodes=num_nodes, num_gpus=num_gpus
        )
    except LaunchError:
        return
    assert selected
    for one in selected:
        assert one.devices
        assert [device for device in one.host.device_ids if device in one.devices] == list(one.devices)


@given(_items)
def test_include_and_exclude_of_the_same_text_share_out_the_slots(text: str) -> None:
    taken: dict[str, set[tuple[str, str]]] = {}
    for option in ("include", "exclude"):
        try:
            selected = devices_by_host((W0, SIX, NAMED, W1), **{option: text})
        except LaunchError as error:
            if "nothing is left" not in str(error):
                return
            selected = {}
        taken[option] = {(host, slot) for host, slots in selected.items() for slot in slots}
    every = {(host.name, slot) for host in (W0, SIX, NAMED, W1) for slot in host.device_ids}
    assert taken["include"] | taken["exclude"] == every
    assert not text or not taken["include"] & taken["exclude"]


@given(_items)
def test_any_visible_devices_are_read_or_refused(value: str) -> None:
    try:
        devices = local_devices_from_visible(value)
    except LaunchError:
        return
    assert len(set(devices)) == len(devices)


def test_a_host_is_named_as_it_is_spelled_where_names_differ_in_case_only() -> None:
    hosts = (Host(name="Node1", slots=1), Host(name="node1", slots=2))
    assert [one.host.name for one in select(hosts, include="Node1")] == ["Node1"]
    assert [one.host.name for one in select(hosts, include="node1")] == ["node1"]
    assert [one.host.name for one in select(hosts, exclude="node1")] == ["Node1"]
