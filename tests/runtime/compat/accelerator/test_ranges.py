"""Functions whose calls a profiler shows."""

from __future__ import annotations

import pytest

from dslaunch.runtime.compat.accelerator.current import get_accelerator
from dslaunch.runtime.compat.accelerator.ranges import instrument_w_nvtx


@instrument_w_nvtx
def _half(value: int, *, by: int = 2) -> float:
    """Divide."""
    return value / by


def test_a_call_is_a_range_that_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    kind = type(get_accelerator())
    monkeypatch.setattr(kind, "range_push", lambda self, msg: seen.append(f"begin {msg}"))
    monkeypatch.setattr(kind, "range_pop", lambda self: seen.append("end"))
    assert _half(4) == 2.0
    with pytest.raises(ZeroDivisionError):
        _half(4, by=0)
    assert seen == ["begin _half", "end"] * 2
    assert (_half.__name__, _half.__doc__) == ("_half", "Divide.")
