from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from dslaunch.launcher.node.system.line_buffer import MAX_LINE_BYTES, LineBuffer

LATER = 0.01  # seconds between two reads, far less than the interval of progress


def lines_of(*chunks: bytes, step_s: float = LATER) -> bytes:
    """What comes out of a buffer that is fed these chunks, the end of the stream included."""
    buffer = LineBuffer()
    parts = [buffer.add(chunk, now=place * step_s) for place, chunk in enumerate(chunks)]
    return b"".join(parts) + buffer.rest()


@pytest.mark.parametrize(
    ("chunks", "out"),
    [
        ((), b""),
        ((b"",), b""),
        ((b"a\n",), b"a\n"),
        ((b"a\nb\n",), b"a\nb\n"),
        ((b"a", b"b\nc", b"\n"), b"ab\nc\n"),
        ((b"no newline at the end",), b"no newline at the end\n"),
        ((b"\n\n",), b"\n\n"),
        ((b"\0\xff\n",), b"\0\xff\n"),
        ((b"dos\r\n",), b"dos\n"),
        ((b"dos\r", b"\n"), b"dos\n"),
        ((b"dos\r", b"\nnext\r", b"\n"), b"dos\nnext\n"),
        ((b"dos\r\r\n",), b"dos\n"),
        ((b"dos\r", b"\r", b"\n"), b"dos\n"),
        ((b"\r\n",), b"\n"),
        ((b"\r", b"\n"), b"\n"),
        ((b"10%\r20%\r30%\n",), b"30%\n"),
        ((b"\r10%\r20%\r30%\n",), b"30%\n"),
        ((b"10%\r20%\r", b"\n"), b"20%\n"),
        ((b"\r10%", b"\r20%", b"\r", b"\n"), b"20%\n"),
        ((b"over\rwritten\nplain\n",), b"written\nplain\n"),
        ((b"only a return\r",), b"only a return\n"),
        ((b"\r",), b""),
    ],
)
def test_lines_come_out_whole_and_as_a_terminal_would_leave_them(
    chunks: tuple[bytes, ...], out: bytes
) -> None:
    # The first version of a progress bar is due at once, so let that moment pass.
    buffer = LineBuffer()
    assert buffer.add(b"0\r1", now=-0.5) == b"0\n"
    assert buffer.add(b"\n", now=-0.5) == b"1\n"
    parts = [buffer.add(chunk, now=place * LATER) for place, chunk in enumerate(chunks)]
    assert b"".join(parts) + buffer.rest() == out


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_line_end_of_two_bytes_may_be_cut_anywhere_after_an_overwritten_line(cut: int) -> None:
    text = b"10%\r20%\r\n"
    shown = lines_of(text[:cut], text[cut:])
    assert shown.split(b"\n").count(b"20%") == 1
    assert b"\n\n" not in shown
    assert shown.endswith(b"20%\n")


def test_an_unfinished_line_waits_for_its_newline() -> None:
    buffer = LineBuffer()
    assert buffer.add(b"half", now=0.0) == b""
    assert buffer.add(b"", now=100.0) == b""
    assert buffer.rest() == b"half\n"
    assert buffer.rest() == b""


def test_a_progress_bar_is_shown_once_a_second() -> None:
    buffer = LineBuffer()
    shown = [(tick, text) for tick in range(31) if (text := buffer.add(b"\r%d%%" % tick, now=10 + tick / 10))]
    assert shown == [(1, b"0%\n"), (11, b"10%\n"), (21, b"20%\n")]
    assert buffer.add(b"\rdone\n", now=14.0) == b"done\n"


def test_a_progress_bar_that_ends_each_version_with_a_return_is_shown_too() -> None:
    buffer = LineBuffer()
    shown = [(tick, text) for tick in range(31) if (text := buffer.add(b"%d%%\r" % tick, now=10 + tick / 10))]
    assert shown == [(1, b"0%\n"), (11, b"10%\n"), (21, b"20%\n")]
    assert buffer.add(b"\n", now=14.0) == b"30%\n"


def test_a_line_that_is_too_long_is_passed_on_in_pieces_without_losing_a_byte() -> None:
    chunk = bytes(range(32, 127)) * 100
    buffer = LineBuffer()
    out = (
        b"".join(buffer.add(chunk, now=0.0) for _ in range(3 * MAX_LINE_BYTES // len(chunk))) + buffer.rest()
    )
    pieces = out.split(b"\n")
    assert max(map(len, pieces)) <= MAX_LINE_BYTES + len(chunk)
    assert b"".join(pieces) == chunk * (3 * MAX_LINE_BYTES // len(chunk))
    assert out.count(b"\n") == 3


@pytest.mark.parametrize("character", ["a", "\u00e9", "\u2192", "\U0001f600"])
@pytest.mark.parametrize("size", [1000, 1001, 1002, 1003])
def test_a_line_that_is_cut_is_cut_between_characters(character: str, size: int) -> None:
    text = character.encode() * (5 * MAX_LINE_BYTES // (2 * len(character.encode())))
    buffer = LineBuffer()
    out = (
        b"".join(buffer.add(text[at : at + size], now=0.0) for at in range(0, len(text), size))
        + buffer.rest()
    )
    pieces = out.removesuffix(b"\n").split(b"\n")
    assert len(pieces) == 3
    assert "".join(piece.decode() for piece in pieces) == text.decode()


@pytest.mark.parametrize("end", [b"\xff", b"\x80", b"\xbf\xbf\xbf\xbf", b"\xf8", b"\x80\x80\x80"])
def test_a_line_that_is_not_utf_8_is_cut_all_the_same(end: bytes) -> None:
    text = b"x" * MAX_LINE_BYTES + end
    buffer = LineBuffer()
    assert buffer.add(text, now=0.0) == text + b"\n"
    assert buffer.rest() == b""


def test_a_progress_bar_without_end_does_not_fill_the_memory() -> None:
    buffer = LineBuffer()
    for _ in range(1000):
        buffer.add(b"x" * 5000 + b"\r", now=0.0)
    assert len(buffer._pending) <= 2 * 5001


@given(
    chunks=st.lists(st.binary(max_size=30).map(lambda data: data.replace(b"\r", b"")), max_size=12),
)
def test_without_carriage_returns_no_byte_is_lost_added_or_moved(chunks: list[bytes]) -> None:
    data = b"".join(chunks)
    expected = data if data.endswith(b"\n") or not data else data + b"\n"
    assert lines_of(*chunks) == expected


@given(chunks=st.lists(st.text("ab\r\n", max_size=8).map(str.encode), max_size=12), step_s=st.floats(0, 2))
def test_finished_lines_show_their_last_version_whatever_the_chunks(
    chunks: list[bytes], step_s: float
) -> None:
    """The lines that a reader of the whole text would see come in order; progress may stand between them."""
    whole = b"".join(chunks)
    expected = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in whole.split(b"\n")]
    shown = lines_of(*chunks, step_s=step_s).split(b"\n")
    assert shown.pop() == b""
    rest = iter(shown)
    for line in expected[:-1]:
        assert line in rest  # a subsequence
    assert all(line == b"" or line in whole for line in shown)
    assert shown.count(b"") <= expected[:-1].count(b"")


@given(chunks=st.lists(st.text("ab\r\n", max_size=8).map(str.encode), max_size=12))
def test_what_comes_out_at_any_time_is_whole_lines(chunks: list[bytes]) -> None:
    buffer = LineBuffer()
    for chunk in chunks:
        text = buffer.add(chunk, now=0.0)
        assert text == b"" or text.endswith(b"\n")
    assert buffer.rest()[-1:] in (b"", b"\n")


def test_verbatim_every_byte_is_passed_on() -> None:
    data = b"50%\r100%\rdone\nwin\r\n\rlast"
    for size in range(1, len(data) + 1):
        buffer = LineBuffer(is_verbatim=True)
        pieces = [buffer.add(data[at : at + size], now=0.0) for at in range(0, len(data), size)]
        assert all(piece.endswith(b"\n") for piece in pieces if piece)
        assert b"".join(pieces) + buffer.rest() == data + b"\n"
