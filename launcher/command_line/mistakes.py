"""Mistakes on a command line, in our words: click's messages say less, and not what to write instead."""

from __future__ import annotations

import re

import click

_NOT_A_CHOICE = re.compile(r"'(?P<value>.*?)' is not one of\b", re.DOTALL)
_EXTRA = re.compile(r"Got unexpected extra arguments? \((?P<words>.*)\)", re.DOTALL)


def in_our_words(error: click.ClickException) -> str:
    """Return one sentence: what was given, what is allowed, what to write."""
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return _missing(error, error.param)
    if isinstance(error, click.BadParameter) and error.param is not None:
        return _bad_value(error.message, error.param)
    if isinstance(error, click.BadOptionUsage):
        return _bad_use(error)
    if isinstance(error, click.NoSuchOption):
        return f"there is no option {error.option_name}; write: {_path(error)} --help"
    if isinstance(error, click.UsageError) and (extra := _EXTRA.fullmatch(error.message)):
        return f"{_path(error)} takes no more words, and was given {extra['words']}; write: {_usage(error)}"
    return error.format_message()


def name_of(parameter: click.Parameter) -> str:
    """Return the name as it is written: the long form of an option, the usage's word for an argument."""
    if isinstance(parameter, click.Option):
        return next((one for one in parameter.opts if one.startswith("--")), parameter.opts[0])
    return parameter.metavar or (parameter.name or "").upper()


def _bad_value(message: str, parameter: click.Parameter) -> str:
    name, found = name_of(parameter), _NOT_A_CHOICE.match(message)
    if found is None or not isinstance(parameter.type, click.Choice):  # one of our own types
        return f"{name}: {message}"
    between = "=" if isinstance(parameter, click.Option) else " "
    *others, last = (str(one) for one in parameter.type.choices)
    allowed = f"{', '.join(others)} or {last}" if others else last
    return f"{name}{between}{found['value']}: must be {allowed}"


def _bad_use(error: click.BadOptionUsage) -> str:
    """Describe the mistake of an option without its value, or of a flag with one."""
    found = [
        one
        for one in (error.ctx.command.params if error.ctx is not None else ())
        if isinstance(one, click.Option) and error.option_name in one.opts
    ]
    if not found:
        return error.format_message()
    if found[0].is_flag:
        return f"{error.option_name} takes no value; write {error.option_name} alone"
    return f"{error.option_name} needs a value; write {error.option_name}={_metavar(found[0])}"


def _missing(error: click.MissingParameter, parameter: click.Parameter) -> str:
    name = name_of(parameter)
    if not isinstance(parameter, click.Option):
        return f"which {name}? Write: {_usage(error)}"
    return f"{name}={_metavar(parameter)} is missing; write: {_usage(error)} {name}={_metavar(parameter)}"


def _metavar(option: click.Option) -> str:
    if option.metavar or not isinstance(option.type, click.Choice):
        return option.metavar or "N"
    return "|".join(str(one) for one in option.type.choices)


def _path(error: click.UsageError) -> str:
    return error.ctx.command_path if error.ctx is not None else "dslaunch"


def _usage(error: click.UsageError) -> str:
    """Return the command and its arguments."""
    if error.ctx is None:
        return "dslaunch --help"
    pieces = error.ctx.command.collect_usage_pieces(error.ctx)
    return " ".join([error.ctx.command_path, *(one for one in pieces if one != "[OPTIONS]")])
