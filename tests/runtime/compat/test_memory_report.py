"""What is printed about memory, and where."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
import torch

from dslaunch.runtime.compat.accelerator.current import get_accelerator
from dslaunch.runtime.compat.memory_report import empty_cache, get_ma_status, see_memory_usage
from tests.runtime.ranks import Ranks

GIB = 2**30
_LINE = re.compile(
    r"cpu: in use ([\d.]+) GiB, peak ([\d.]+) GiB, held [\d.]+ GiB, peak held [\d.]+ GiB, host "
    r"([\d.]+) GiB \([\d.]+%\)"
)


@pytest.mark.slow  # memory is given back before, page by page
@pytest.mark.skipif(torch.cuda.is_available(), reason="figures of the CPU")
def test_what_is_in_use_is_printed_and_the_peak_counts_from_the_last_call(
    capsys: pytest.CaptureFixture[str],
) -> None:
    see_memory_usage("quiet")
    assert capsys.readouterr().out == ""
    empty_cache()
    before = get_accelerator().memory_allocated()
    held = torch.ones(GIB // 32)  # an eighth of a GiB
    del held
    see_memory_usage("after the model", force=True)
    title, line = capsys.readouterr().out.splitlines()
    assert title == "after the model"
    match = _LINE.fullmatch(line)
    assert match is not None
    in_use, peak, host = map(float, match.groups())
    assert in_use == pytest.approx(before / GIB, abs=0.04)
    assert peak == pytest.approx(before / GIB + 0.125, abs=0.04)
    assert 0 < host <= get_accelerator().total_memory() / GIB
    see_memory_usage("once more", force=True)
    match = _LINE.fullmatch(capsys.readouterr().out.splitlines()[1])
    assert match is not None
    assert float(match[2]) == pytest.approx(before / GIB, abs=0.04)


def _say(rank: int) -> tuple[str, int]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        see_memory_usage("hello", force=True)
    return out.getvalue(), get_ma_status()


def test_only_the_first_rank_prints(ranks: Ranks) -> None:
    (first, first_bytes), (second, second_bytes) = ranks(_say, world_size=2)
    assert first.startswith("hello\n")
    assert first_bytes > 2**20
    assert (second, second_bytes) == ("", 0)
