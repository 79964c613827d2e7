"""An option of the command line, which is a field of the record that keeps its value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import click

from ..errors import LaunchError

T = TypeVar("T")


class JobOption(click.Option):
    """`topic` is the part of the help that it stands in, `needs` the option of the same record without which
    it has no effect.

    For scripts written for DeepSpeed: `deepspeed` is a second name, and `absent` a value that means not
    given. `may_be_empty`: an empty value has a meaning. Other options refuse an empty value, because it
    usually comes from a shell variable that is not set. `takes_stream`: - stands for standard input.
    `takes_next` tells of a value whether the word behind it belongs to it, after a space.
    """

    def __init__(
        self,
        names: list[str],
        *,
        topic: str,
        needs: str = "",
        deepspeed: str = "",
        absent: Any = None,
        may_be_empty: bool = False,
        takes_stream: bool = False,
        takes_next: Callable[[str], bool] = lambda value: False,
        **of_click: Any,
    ) -> None:
        super().__init__([*names, *filter(None, [deepspeed])], **of_click)
        self.topic, self.needs = topic, needs
        self.deepspeed, self.absent = deepspeed, absent
        self.may_be_empty, self.takes_stream = may_be_empty, takes_stream
        self.takes_next = takes_next

    def is_given(self, given: Mapping[str, Any]) -> bool:
        """Tell whether the option is in `given`, the values of the command line by parameter name."""
        value = given.get(self.name or "")
        if value is None or ((self.is_flag or self.multiple) and not value):
            return False
        return self.absent is None or value != self.absent


class _Field(NamedTuple):
    option: JobOption
    default: Any


def option(*names: str, default: Any = None, read: Callable[[Any], Any] | None = None, **more: Any) -> Any:
    """Make a field of a record: `default` is its value where the option is not given, `read` makes the value
    of the text (with `multiple`, of all texts), or raises a ValueError with the allowed values. `more` are
    further arguments of JobOption and click.Option.
    """
    if read is not None:
        more["callback"] = _callback(read)
    return _Field(JobOption([*names], **more), default)


def flag(*names: str, **more: Any) -> Any:
    """Make an option without a value: True if it is given, else False."""
    return option(*names, default=False, is_flag=True, **more)


def _callback(read: Callable[[Any], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def callback(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        try:
            return None if value is None else read(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def record(cls: type[T]) -> type[T]:
    """Turn a class into a NamedTuple, some of whose fields are options: the fields get the options'
    defaults, and the class keeps the options.
    """
    found = cls._field_defaults  # type: ignore[attr-defined]
    options = {name: value.option for name, value in found.items() if isinstance(value, _Field)}
    defaults = {name: value.default if name in options else value for name, value in found.items()}
    cls._field_defaults = defaults  # type: ignore[attr-defined]
    cls.__new__.__defaults__ = tuple(defaults.values())
    cls._options = options  # type: ignore[attr-defined]
    return cls


def _fields(cls: Any) -> Iterator[tuple[str, JobOption | None, Any]]:
    """Yield for each field with a default: its name, its option if it has one, and its default, which may be
    a record.
    """
    options: dict[str, JobOption] = cls._options
    return ((name, options.get(name), default) for name, default in cls._field_defaults.items())


def options_of(cls: type[Any]) -> tuple[JobOption, ...]:
    """Return the options of a record, and of the records in it, in the order of its fields."""
    found: list[JobOption] = []
    for _, option, default in _fields(cls):
        if option is not None:
            found.append(option)
        elif hasattr(default, "_options"):
            found += options_of(type(default))
    return tuple(found)


def read(cls: type[T], given: Mapping[str, Any], **others: Any) -> T:
    """Return the record of the given values, by parameter name; `others` are values of fields that are no
    options.

    If the record has a method `settled`, that method holds the rules that concern several options together.
    Errors: LaunchError for an option without the option it needs, and as `settled`
    """
    values = dict(others)
    for name, option, default in _fields(cls):
        if name in others:
            continue
        if option is not None:
            _check_needs(option, cls, given)
            values[name] = given[option.name or ""] if option.is_given(given) else default
        elif hasattr(default, "_options"):
            values[name] = read(type(default), given)
    made: Any = cls(**values)
    settled: T = made.settled(given) if hasattr(made, "settled") else made
    return settled


def _check_needs(option: JobOption, cls: type[Any], given: Mapping[str, Any]) -> None:
    if not option.needs or not option.is_given(given):
        return
    needed = next(one for one in options_of(cls) if option.needs in one.opts)
    if not needed.is_given(given):
        value = "" if needed.is_flag else f"={needed.metavar}"
        raise LaunchError(
            f"{option.opts[0]} has no effect without {option.needs}; add {option.needs}{value}, or leave it "
            "out"
        )


def given_in(made: Any) -> tuple[str, ...]:
    """Return the names of a record's options whose values are not their defaults."""
    return tuple(
        option.opts[0]
        for name, option, default in _fields(type(made))
        if option is not None and getattr(made, name) != default
    )


def refuse(names: tuple[str, ...], why: str) -> None:
    """Errors: LaunchError for the first of these options, which were given where they can have no effect"""
    if names:
        raise LaunchError(f"{names[0]} has no effect with {why}; leave it out")
