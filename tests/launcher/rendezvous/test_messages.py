from __future__ import annotations

import contextlib
import json
import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from dslaunch.launcher.job.mesh import JobMesh
from dslaunch.launcher.job.verdict import HostFailure, OutputFailure, RankFailure
from dslaunch.launcher.rendezvous.messages import (
    MAX_FRAME_BYTES,
    MAX_TEXT,
    Beat,
    Challenge,
    End,
    Failed,
    Go,
    Join,
    Joined,
    News,
    NewsDecoder,
    NodeEnded,
    NodeReady,
    Proof,
    Refused,
    Welcome,
    encode_news,
    failure_of,
    news_of,
)
from dslaunch.launcher.wire.frames import ProtocolError
from tests.launcher.rendezvous.identity import IDENTITY, PROVEN

texts = st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), max_size=50)
numbers = st.integers(min_value=-(2**53), max_value=2**53)
times = st.floats(allow_nan=False, allow_infinity=False)
any_news = st.one_of(
    st.builds(Welcome, numbers, texts),
    st.builds(Challenge, texts),
    st.builds(Proof, texts),
    st.builds(Refused, texts, numbers),
    st.builds(Joined, times),
    st.builds(Join, numbers, texts, numbers, texts, texts, texts, times, texts),
    st.builds(Failed, numbers, numbers, numbers, numbers, numbers, numbers, texts, times),
    st.sampled_from([Go(), End(), NodeReady(), NodeEnded(), Beat()]),
)


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


@given(st.lists(any_news, max_size=5), st.integers(min_value=1, max_value=7))
def test_news_arrives_as_it_was_sent_however_it_is_cut(sent: list[News], size: int) -> None:
    data = b"".join(encode_news(one) for one in sent)
    decoder = NewsDecoder()
    came = [one for place in range(0, len(data), size) for one in decoder.feed(data[place : place + size])]
    assert came == sent


@given(st.binary(max_size=400))
@settings(max_examples=500)
def test_random_bytes_are_an_error_or_nothing(data: bytes) -> None:
    for stream in (data, framed(data)):
        with contextlib.suppress(ProtocolError):
            NewsDecoder().feed(stream)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(st.sampled_from(["Join", "Failed", "Beat", "Go"]), st.lists(json_values, max_size=9))
@settings(max_examples=60)
def test_fields_of_the_wrong_kind_are_an_error(kind: str, values: list[object]) -> None:
    try:
        (news,) = NewsDecoder().feed(framed(json.dumps([kind, *values]).encode()))
    except ProtocolError:
        return
    assert type(news).__name__ == kind
    assert all(type(one) in (int, str, float) for one in news)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b"3",
        b'"Go"',
        b'["Prepare",{}]',
        b'["Go",1]',
        b'["Joined","1"]',
        b'["Joined",NaN]',
        b'["Joined",1e999]',
        b'["Joined",true]',
        b'["Refused","x",1.5]',
        b'["Refused","x",18014398509481984]',
        b'["Joined",1' + b"0" * 400 + b"]",
        b'["Joined",' + b"9" * 5000 + b"]",
        b"[" * 60000,
        b"\xff\xfe",
    ],
)
def test_what_is_not_news_is_an_error(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        NewsDecoder().feed(framed(body))


def test_a_length_beyond_the_limit_is_an_error_at_once() -> None:
    with pytest.raises(ProtocolError, match="at most 65536"):
        NewsDecoder().feed(struct.pack(">I", MAX_FRAME_BYTES + 1))


def test_text_of_a_stranger_does_no_harm_on_a_terminal() -> None:
    text = "\x1b[31mred\n\ud800\u202e" + "x" * 10000
    (news,) = NewsDecoder().feed(framed(json.dumps(["Refused", text, 2]).encode()))
    assert isinstance(news, Refused)
    assert news.message.startswith("red ??x")
    assert len(news.message) == MAX_TEXT + len("...")


def test_who_does_not_know_the_token_cannot_prove_it() -> None:
    join = PROVEN.join(1, nonce="n", heartbeat_s=1.0)
    assert join.proof == PROVEN.proof_of(join, "n")
    assert PROVEN.token not in encode_news(join).decode()
    for other, nonce in ((join, "m"), (join._replace(node_rank=0), "n"), (join._replace(job_id="j"), "n")):
        assert join.proof != PROVEN.proof_of(other, nonce)


def test_a_failure_travels_without_what_a_worker_wrote() -> None:
    texts: dict[str, object] = {"str": "secret", "tuple[str, ...]": ("secret",)}
    kinds = {name: kind.__forward_arg__ for name, kind in RankFailure.__annotations__.items()}
    written = {name: texts[kind] for name, kind in kinds.items() if kind in texts}
    known = {"rank": 5, "local_rank": 1, "host": "b", "pid": 7, "code": 3, "signal": 0, "at_s": 90.0}
    failure = RankFailure(**{**written, **known})  # type: ignore[arg-type]
    assert failure.last_lines == ("secret",)
    news = news_of(failure, node_rank=1, now=100.0)
    assert "secret" not in encode_news(news).decode()
    assert failure_of(news, IDENTITY, now=50.0) == RankFailure(
        rank=5, local_rank=1, host="b", pid=7, code=3, signal=0, at_s=40.0, last_lines=()
    )


def test_the_place_of_a_rank_elsewhere_is_that_of_the_mesh() -> None:
    """It is known here: what the worker itself said does not travel."""
    failure = RankFailure(rank=3, local_rank=1, host="b", pid=7, code=3, signal=0, at_s=1.0, place="stage 9")
    news = news_of(failure, node_rank=1, now=1.0)
    with_mesh = replace(IDENTITY, mesh=JobMesh(pp=2, dp=2))
    assert failure_of(news, with_mesh, now=1.0) == failure._replace(place="stage 1 of 2, dp 1")
    stranger = failure_of(news._replace(rank=1 << 50), with_mesh, now=1.0)
    assert isinstance(stranger, RankFailure)
    assert stranger.place == ""


def test_other_failures_travel_as_those_of_a_node() -> None:
    lost = HostFailure(host="b", message="gone", at_s=1.0, exit_code=3)
    assert failure_of(news_of(lost, node_rank=1, now=1.0), IDENTITY, now=2.0) == HostFailure(
        host="node 1 (b)", message="gone", at_s=2.0, exit_code=3
    )
    output = OutputFailure(message="no process reads", at_s=1.0, exit_code=141)
    assert failure_of(news_of(output, node_rank=0, now=1.0), IDENTITY, now=2.0) == HostFailure(
        host="node 0 (a)", message="no process reads", at_s=2.0, exit_code=141
    )
