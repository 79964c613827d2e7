from __future__ import annotations

import ast
import json
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from dslaunch.launcher.wire import frames
from dslaunch.launcher.wire.fast_tuple import Record
from dslaunch.launcher.wire.frames import (
    MAX_FRAME_BYTES,
    AskStacks,
    Decoder,
    Done,
    Exited,
    Facts,
    Frame,
    Hello,
    Hold,
    Inspect,
    Listen,
    Listening,
    Output,
    Ping,
    Pong,
    Prepare,
    Problem,
    ProtocolError,
    Reach,
    Reached,
    Ready,
    Signal,
    Stacks,
    Start,
    Started,
    Stop,
    bytes_of,
    encode,
    text_of,
)

any_text = st.binary(max_size=60).map(text_of)  # what the protocol carries: bytes, standing as text
numbers = st.integers(min_value=-(2**63), max_value=2**63)
times = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=10,
)
any_frame = st.one_of(
    st.builds(Prepare, st.dictionaries(any_text, json_values, max_size=5)),
    st.builds(Start, any_text, numbers),
    st.builds(Listen, numbers, any_text),
    st.builds(Reach, st.lists(any_text, max_size=4), numbers, any_text, times),
    st.builds(Inspect, any_text, st.dictionaries(any_text, json_values, max_size=5)),
    st.builds(Signal, numbers),
    st.builds(Hold, times),
    st.builds(AskStacks),
    st.builds(Stacks, numbers, any_text, any_text, any_text),
    st.builds(Stop, times),
    st.builds(Ping, numbers),
    st.builds(Hello, any_text, any_text, any_text, numbers, numbers),
    st.builds(Ready, numbers, st.lists(any_text, max_size=4)),
    st.builds(Listening, numbers, st.lists(any_text, max_size=4), any_text),
    st.builds(Reached, st.lists(any_text, max_size=4)),
    st.builds(Facts, any_text, st.dictionaries(any_text, json_values, max_size=5)),
    st.builds(Problem, any_text, numbers),
    st.builds(Started, numbers, numbers),
    st.builds(Output, numbers, numbers, any_text),
    st.builds(Exited, numbers, numbers, numbers, times, st.dictionaries(any_text, json_values, max_size=5)),
    st.builds(Pong, numbers, times),
    st.builds(Done, numbers),
)


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def test_a_frame_is_four_bytes_of_length_and_a_list_of_kind_and_fields() -> None:
    assert encode(Output(3, 1, "a\n")) == b"\0\0\0\x14" + b'["Output",3,1,"a\\n"]'
    assert encode(Done(0)) == b"\0\0\0\x0a" + b'["Done",0]'


def test_every_kind_of_the_protocol_can_be_decoded() -> None:
    kinds = {
        name for name, value in vars(frames).items() if hasattr(value, "_fields") and value is not Record
    }
    assert {name: kind for name, (kind, _) in frames._FRAMES.items()} == {
        name: getattr(frames, name) for name in kinds
    }


def test_the_type_checker_is_told_of_every_kind() -> None:
    """Its list stands beside the one that is found at run time."""
    tree = ast.parse(Path(frames.__file__).read_text())
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    values = {
        ast.unparse(one.targets[0]): one.value for one in assigned if isinstance(one.value, ast.Subscript)
    }
    union = values["Frame"]
    assert isinstance(union, ast.Subscript)
    assert {one.id for one in ast.walk(union.slice) if isinstance(one, ast.Name)} == set(frames._FRAMES)


@given(data=st.binary())
def test_text_carries_every_byte(data: bytes) -> None:
    assert bytes_of(text_of(data)) == data


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", ""),
        (b"plain", "plain"),
        ("caf\u00e9 \U0001f600".encode(), "caf\u00e9 \U0001f600"),
        (b"\xff\xc3", "\udcff\udcc3"),
        (b"\xed\xb3\xbf", "\udced\udcb3\udcbf"),  # the UTF-8 form of a surrogate is not UTF-8
        (b"\0", "\0"),
    ],
)
def test_bytes_that_are_not_utf_8_stand_as_lone_surrogates(data: bytes, text: str) -> None:
    assert text_of(data) == text
    assert bytes_of(text) == data


@given(sent=st.lists(any_frame, max_size=6), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_what_arrives_is_what_was_sent_however_the_stream_is_cut(sent: list[Frame], sizes: list[int]) -> None:
    stream = b"".join(encode(frame) for frame in sent)
    decoder = Decoder()
    received: list[Frame] = []
    turn = 0
    while stream:
        size = sizes[turn % len(sizes)]
        received += decoder.feed(stream[:size])
        stream = stream[size:]
        turn += 1
    assert received == sent
    assert [type(frame) for frame in received] == [type(frame) for frame in sent]


def test_a_frame_fed_byte_by_byte_comes_out_with_its_last_byte() -> None:
    stream = encode(Ping(7))
    decoder = Decoder()
    assert [decoder.feed(stream[place : place + 1]) for place in range(len(stream))] == [
        *[[]] * (len(stream) - 1),
        [Ping(7)],
    ]


def test_an_empty_feed_gives_nothing() -> None:
    assert Decoder().feed(b"") == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"7",
        b"null",
        b'"Ping"',
        b"[7]",
        b"[[]]",
        b"[{}]",
        b'["Ping"]',
        b'["Ping",1,2]',
        b'["NoSuchKind"]',
        b'["_FRAMES"]',
        b'["Ping",1',
        b"\xff\xfe",
        b"[" * 100_000,
        b'["Ping",' + b"9" * 5000 + b"]",
        b'["Ping","1"]',
        b'["Ping",1.0]',
        b'["Ping",true]',
        b'["Ping",null]',
        b'["Stop",NaN]',
        b'["Stop",Infinity]',
        b'["Stop",' + b"9" * 400 + b"]",
        b'["Problem",["no"],3]',
        b'["Reached","x"]',
        b'["Reached",["x",7]]',
        b'["Facts","shm",[]]',
    ],
)
def test_a_body_that_is_no_frame_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        Decoder().feed(framed(body))


def test_a_length_that_no_frame_has_is_refused_at_once() -> None:
    decoder = Decoder()
    with pytest.raises(ProtocolError, match=str(MAX_FRAME_BYTES)):
        decoder.feed(struct.pack(">I", MAX_FRAME_BYTES + 1))
    assert Decoder().feed(struct.pack(">I", MAX_FRAME_BYTES)) == []


@given(data=st.binary(max_size=200))
def test_garbage_gives_a_protocol_error_or_nothing(data: bytes) -> None:
    try:
        Decoder().feed(data)
    except ProtocolError:
        return


@settings(max_examples=200)
@given(value=json_values)
def test_json_that_is_no_frame_gives_a_protocol_error_or_a_frame(value: object) -> None:
    body = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    try:
        received = Decoder().feed(framed(body))
    except ProtocolError:
        return
    assert len(received) == 1
