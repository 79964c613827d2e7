"""Lengths of samples: files, what micro batches are padded to, and what is said of a plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.fit.lengths import Lengths, PlannedLengths, read_lengths

from .answers import GIB

SIX = Lengths(counts=((10, 3), (20, 2), (100, 1)))


@pytest.mark.parametrize(
    "text",
    ["10\n20\n100\n10\n10\n\n20\n", "10 3\n20 2\n100 1\n", "10,3\n20,2\n100", "[10, 10, 20, 10, 20, 100]",
     "[[100, 1], [20, 2], [10, 3]]", "\ufeff10 3\n20 2\n100 1\n"],
)  # fmt: skip
def test_lengths_are_read_in_each_form(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    assert read_lengths(path) == SIX


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10\nten\n", "line 2: 'ten' is no length; write one length a line, or a length and a number"),
        ("10\n0\n", "line 2: '0' is no length"),
        ("10 2 3\n", "line 1: '10 2 3' is no length"),
        ("[10, -1]", "item 2: '-1' is no length"),
        ("[10,", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("\n", "it has no length"),
        (None, "it cannot be read (No such file or directory)"),
    ],
)
def test_mistakes_say_where_they_are(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(LaunchError) as caught:
        read_lengths(path)
    assert message in str(caught.value)


def test_what_has_no_end_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"--lengths=/dev/zero: it cannot be read \(it is a device\)"):
        read_lengths(Path("/dev/zero"))


def test_a_micro_batch_is_padded_to_its_longest() -> None:
    assert SIX.padded(1) == pytest.approx((3 * 10 + 2 * 20 + 100) / 6)
    # of two, both are 10 in 9 of 36 draws, none is 100 in 25
    assert SIX.padded(2) == pytest.approx((9 * 10 + 16 * 20 + 11 * 100) / 36)
    assert SIX.padded(10_000) == pytest.approx(100)
    assert SIX.chance_of_longest(2) == pytest.approx(11 / 36)
    assert SIX.share_up_to(99) == pytest.approx(5 / 6)
    assert SIX.cut(20) == Lengths(counts=((10, 3), (20, 3)))


def planned(*, room: int) -> PlannedLengths:
    return PlannedLengths(
        lengths=SIX,
        micro_batch_size=2,
        num_samples=4,
        usual=40,
        usual_bytes=4 * GIB,
        longest_bytes=10 * GIB,
        room_bytes=room * GIB,
    )


def test_the_lines_say_how_probable_the_peak_is() -> None:
    assert planned(room=10).notes() == (
        "lengths: 6 samples of 10 to 100 tokens; the peak is that of a micro batch with one of the longest: "
        "17 % of the samples, in 52 % of the steps",
        "lengths: times are for 40 tokens, to which micro batches of 2 are padded in the mean; such a one "
        "needs 4.0 GiB",
    )
    assert planned(room=8).notes()[2:] == (
        "lengths: up to about 80 tokens fit; 83 % of the samples are no longer",
    )
    assert planned(room=3).notes()[2:] == ("lengths: micro batches of the usual length do not fit, either",)
