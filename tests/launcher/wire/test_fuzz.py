"""Well-formed frames of wrong content, and bytes of no form: a reader of them ends in an
orderly way, and at once.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

from dslaunch.launcher.backends.bootstrap import READ_LOADER, AgentParts, agent_source
from dslaunch.launcher.backends.relayed import RelayStreams
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.wire.frames import (
    MAGIC,
    Decoder,
    Frame,
    Hold,
    Inspect,
    Listen,
    Prepare,
    Problem,
    ProtocolError,
    Reach,
    Signal,
    Start,
    Stop,
    encode,
)
from dslaunch.launcher.wire.mux import MAGIC as RELAY_MAGIC, ParcelKind, Unpacker, pack
from tests.launcher.controller.test_link import MemoryChannel

WITHIN_S = 30.0
JOBS = (
    {},
    {"heartbeat_s": "soon", "kill_grace_s": []},
    {"heartbeat_s": 60.0, "kill_grace_s": 0.0},
    {"heartbeat_s": 60.0, "kill_grace_s": 0.0, "ranks": [{}], "cwd": 7, "devices": None},
)
STRANGE: tuple[list[Frame], ...] = (
    *([Prepare(job)] for job in JOBS),
    [Start("nowhere", -1)],
    [Listen(99999, ""), Reach(["\0", "999.1.1.1", ""], 99999, "", -1.0)],
    [Inspect("what?", {}), Inspect("cwd", {"path": 7}), Inspect("port", {})],
    [Signal(9999), Signal(-1), Hold(-1.0), Stop(-5.0), Stop(1e300)],
)


@pytest.mark.slow
@pytest.mark.parametrize("said", STRANGE)
def test_an_agent_that_is_told_nonsense_says_so_or_passes_over_it_and_ends(said: list[Frame]) -> None:
    agent = subprocess.run(
        [sys.executable, "-I", "-S", "-u", "-c", READ_LOADER],
        input=agent_source(AgentParts(moves_files=True)) + b"".join(map(encode, said)),
        capture_output=True,
        timeout=WITHIN_S,
        check=False,
    )
    _, magic, answers = agent.stdout.partition(MAGIC)
    assert magic
    frames = Decoder().feed(answers)
    assert b"keeper.py" not in agent.stderr, agent.stderr.decode()  # the agent itself did not end of it
    if isinstance(said[0], Listen) or said[0] in [Prepare(job) for job in JOBS]:  # before its input ends
        problems = [one for one in frames if isinstance(one, Problem)]
        assert [one.exit_code for one in problems] == [3]
        if isinstance(said[0], Prepare):
            assert "cannot do what it was told: WrongForm: " in problems[0].message


@given(data=st.binary(max_size=64), cut_at=st.integers(0, 64))
def test_bytes_of_no_form_are_parcels_or_a_protocol_error(data: bytes, cut_at: int) -> None:
    unpacker = Unpacker()
    try:
        for piece in (data[:cut_at], data[cut_at:]):
            for parcel in unpacker.feed(piece):
                assert parcel.kind in ParcelKind
    except ProtocolError:
        return


any_payload = st.one_of(
    st.binary(max_size=8),
    st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda one: st.lists(one, max_size=3)).map(
        lambda value: json.dumps(value).encode()
    ),
    st.integers(0, 2**32 - 1).map(lambda number: struct.pack(">I", number)),
)


@settings(max_examples=60)
@given(
    parcels=st.lists(st.tuples(st.sampled_from(list(ParcelKind)), st.integers(0, 2), any_payload), max_size=5)
)
def test_whatever_a_relay_says_ends_in_a_channel_or_a_reason(
    parcels: list[tuple[ParcelKind, int, bytes]],
) -> None:
    stream = MemoryChannel()
    stream.chunks.get()  # the magic of an agent
    stream.chunks.put(RELAY_MAGIC)
    relay = RelayStreams(stream, gateway="g0")
    for parcel in parcels:
        stream.chunks.put(pack(*parcel))
    stream.chunks.put(b"")
    with pytest.raises(LaunchError):
        relay.open(("ssh", "w0"), timeout_s=WITHIN_S)
    assert relay.why_ended
    relay.close()
