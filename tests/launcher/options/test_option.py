"""A record whose fields are options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import click
import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.options import JOB_OPTIONS
from dslaunch.launcher.options.number import Whole
from dslaunch.launcher.options.option import flag, given_in, option, options_of, read, record, refuse


def _even(text: str) -> int:
    if int(text) % 2:
        raise ValueError(f"{text!r} is odd; give an even number")
    return int(text)


@record
class Inner(NamedTuple):
    """A record in another."""

    place: str | None = option("--place", topic="t", metavar="DIR", help="Where.")
    is_forced: bool = flag("--force", topic="t", needs="--place", help="All the same.")


@record
class Outer(NamedTuple):
    """A record of a command."""

    program: str
    size: int = option("--size", topic="t", default=-1, type=Whole(absent=-1), absent=-1, help="How large.")
    step: int = option("--step", topic="u", default=2, read=_even, help="How far.")
    words: tuple[str, ...] = option("--word", topic="u", default=(), multiple=True, help="What.")
    inner: Inner = Inner()
    total: int = 0

    def settled(self, given: Mapping[str, Any]) -> Outer:
        return self._replace(total=self.size * self.step)


def outer(*words: str) -> Outer:
    command = click.Command("outer", params=[*options_of(Outer)])
    return read(Outer, command.make_context("outer", [*words]).params, program="p")


def test_a_record_without_options_has_the_defaults() -> None:
    assert Outer("p") == Outer(
        program="p", size=-1, step=2, words=(), inner=Inner(place=None, is_forced=False)
    )
    assert outer() == Outer("p", total=-2)


def test_the_fields_are_read_of_the_command_line_those_of_inner_records_too() -> None:
    assert outer("--size=3", "--step=4", "--word=a", "--word=b", "--place=d", "--force") == Outer(
        "p", size=3, step=4, words=("a", "b"), inner=Inner("d", is_forced=True), total=12
    )


def test_the_value_that_means_not_given_is_the_default() -> None:
    assert outer("--size=-1").size == -1
    assert outer("--size=0").size == 0  # which is a value


def test_text_that_is_not_allowed_is_a_mistake_of_the_option() -> None:
    with pytest.raises(click.BadParameter, match="'3' is odd; give an even number"):
        outer("--step=3")


def test_an_option_without_the_one_that_it_needs_is_refused() -> None:
    message = "--force has no effect without --place; add --place=DIR, or leave it out"
    with pytest.raises(LaunchError, match=f"^{message}$"):
        outer("--force")


def test_what_an_option_of_a_job_needs_is_an_option_of_a_job() -> None:
    names = {name for one in JOB_OPTIONS for name in one.opts}
    assert {one.needs for one in JOB_OPTIONS} - {""} <= names


def test_what_was_given_is_what_differs_from_the_defaults() -> None:
    assert given_in(outer("--step=2", "--word=a")) == ("--word",)
    assert given_in(Inner("d")) == ("--place",)
    refuse((), "it")
    with pytest.raises(LaunchError, match=r"^--place has no effect with it; leave it out$"):
        refuse(given_in(Inner("d")), "it")
