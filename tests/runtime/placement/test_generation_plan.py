"""Whether parameters are gathered once for a generation: arithmetic."""

from __future__ import annotations

import pytest

from dslaunch.runtime.errors import ConfigError
from dslaunch.runtime.placement.generation_plan import GenerationRoom, KeysAndValues, plan_generation

GIB = 2**30


def test_parameters_are_gathered_once_where_they_fit_on_every_rank() -> None:
    rooms = [GenerationRoom(10 * GIB, 20 * GIB), GenerationRoom(10 * GIB, 12 * GIB)]
    assert plan_generation(rooms).weights == "whole"
    tight = [rooms[0], GenerationRoom(10 * GIB, 11 * GIB)]
    found = plan_generation(tight)
    assert found.weights == "units"
    assert found.line == (
        "generation: parameters are gathered for each token, unit by unit (all at once do not fit with a "
        "tenth free: 10.0 GiB, of 11.0 GiB free on rank 1)"
    )
    with_cache = [room._replace(cache=KeysAndValues(2 * GIB)) for room in rooms]
    found = plan_generation(with_cache)
    assert found.weights == "units"
    assert "10.0 GiB and 2.0 GiB of keys and values, of 12.0 GiB free" in found.line


def test_a_program_may_say_how() -> None:
    room = GenerationRoom(10 * GIB, 20 * GIB)
    assert plan_generation([room], wanted="units").weights == "units"
    assert plan_generation([GenerationRoom(0, 20 * GIB)], wanted="units").weights == "whole"
    with pytest.raises(ConfigError, match=r"generating\(weights='all'\): must be \"whole\""):
        plan_generation([room], wanted="all")


def test_a_static_cache_that_does_not_fit_is_refused_with_what_would() -> None:
    cache = KeysAndValues(8 * GIB, num_sequences=8, num_tokens=1024, bytes_per_token=2**20)
    room = GenerationRoom(0, 4 * GIB, cache)
    plan_generation([room])  # it grows, and answers may end early
    text = (
        r"static cache does not fit: 8 sequences of 1024 tokens have 8.0 GiB of keys and values, and 4.0 GiB "
        r"were free on rank 1: 4 sequences of this length fit, or 512 tokens of each"
    )
    with pytest.raises(ConfigError, match=text):
        plan_generation([GenerationRoom(0, 4 * GIB), room._replace(cache=cache._replace(is_static=True))])
