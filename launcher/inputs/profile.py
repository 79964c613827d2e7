"""A launch profile: the options of a command in a YAML file, for --profile.

The file becomes words of the command line.

hostfile: hosts            # any long option of the command, without its dashes
num_gpus: 4
no_local_rank: true        # an option without a value
script: train.py
args: [--epochs, 3]

The words of the file stand in front of the typed ones, so there is one parser, and one set of rules and
messages. A typed option replaces that of the file, and a typed script replaces `script` and `args`. Paths are
relative to the current folder, as everywhere on the command line, not to the file's folder.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from ..errors import LaunchError
from .named_file import read_named

if TYPE_CHECKING:
    from .yaml_file import Node

EXAMPLE = "num_gpus: 4"

_NOT_IN_A_FILE = ("profile", "help", "version")


class ProfileWords(NamedTuple):
    """Words to put in front: `options` before typed ones; `script` and its arguments if none was typed."""

    options: tuple[str, ...]
    script: tuple[str, ...]
    replaced: frozenset[str] = frozenset()  # parameter names of the file's options that were typed, too


def read_profile(path: Path, options: Mapping[str, click.Option], *, typed: frozenset[str]) -> ProfileWords:
    """Return the words of the file, without the options whose parameter name is in `typed`.

    `options` are known by `--name`.

    Errors: LaunchError if the file cannot be read, or as parse_profile()
    """
    try:
        text = read_named(path).decode("utf-8-sig")
    except OSError as error:
        raise LaunchError(
            f"--profile={path}: cannot be read ({error.strerror}); give the path of a YAML file"
        ) from None
    except UnicodeDecodeError as error:
        raise LaunchError(
            f"--profile={path}: not text (byte {error.start} is not UTF-8); give the path of a YAML file"
        ) from None
    return parse_profile(text, options, source=str(path), typed=typed)


def parse_profile(
    text: str, options: Mapping[str, click.Option], *, source: str, typed: frozenset[str] = frozenset()
) -> ProfileWords:
    """Return the words that the text of a profile means.

    Errors: LaunchError with `source` and the key, if the command has no such option or no option takes such
    a value
    """
    from .yaml_file import parse_yaml

    document = parse_yaml(text, source=source, example=EXAMPLE)
    if not isinstance(document, dict):
        raise LaunchError(f"{source}: not a mapping of options to values; write e.g. {EXAMPLE!r}")
    words: list[str] = []
    replaced: set[str] = set()
    key_of: dict[str | None, str] = {}  # by parameter name
    for key, value in document.items():
        if key in ("script", "args"):
            continue
        name = "--" + key.replace("-", "_")
        option = options.get(name)
        if option is None or key in _NOT_IN_A_FILE:
            raise _unknown(key, options, source)
        if option.name in key_of:
            raise LaunchError(f"{source}: {key} and {key_of[option.name]} are one option; give one of them")
        key_of[option.name] = key
        if option.name in typed:
            replaced.add(option.name or "")
        else:
            words += _words(name, value, option, where=f"{source}: {key}")
    return ProfileWords(options=tuple(words), script=_script(document, source), replaced=frozenset(replaced))


def _words(name: str, value: Node, option: click.Option, *, where: str) -> list[str]:
    if option.is_flag:
        if not isinstance(value, str) or value.lower() not in ("true", "false"):
            raise LaunchError(
                f"{where}: true or false is allowed, for the option takes no value; write e.g. 'true'"
            )
        return [name] if value.lower() == "true" else []
    if isinstance(value, list) and option.multiple:
        return [f"{name}={_text(one, where)}" for one in value]
    return [f"{name}={_text(value, where)}"]


def _script(document: dict[str, Node], source: str) -> tuple[str, ...]:
    if "script" not in document:
        if "args" in document:
            raise LaunchError(f"{source}: args without script; write e.g. 'script: train.py' above it")
        return ()
    args = document.get("args", [])
    if isinstance(args, list):
        words = [_text(one, f"{source}: args", may_be_empty=True) for one in args]
    else:
        try:
            words = shlex.split(_text(args, f"{source}: args", may_be_empty=True))
        except ValueError as error:
            raise LaunchError(f"{source}: args: {error}; write a list, e.g. 'args: [--lr, 1e-3]'") from None
    return ("--", _text(document["script"], f"{source}: script"), "--", *words)


def _text(value: Node, where: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise LaunchError(
            f"{where}: one text or number is allowed, not "
            f"{'a list' if isinstance(value, list) else 'a mapping'}; write e.g. {EXAMPLE!r}"
        )
    if "\0" in value or not (value or may_be_empty):
        problem = "a NUL byte" if value else "no value"
        raise LaunchError(f"{where}: {problem}; write e.g. {EXAMPLE!r}, or leave the line out")
    return value


def _unknown(key: str, options: Mapping[str, click.Option], source: str) -> LaunchError:
    known = [name[2:] for name in options if name.startswith("--") and name[2:] not in _NOT_IN_A_FILE]
    is_reserved = key in _NOT_IN_A_FILE
    import difflib

    near = difflib.get_close_matches(
        key.lower().lstrip("-").replace("-", "_"), [*known, "script", "args"], n=1
    )
    hint = f"did you mean {near[0]!r}?" if near and not is_reserved else "see dslaunch --help for the options"
    shown = repr(key if len(key) <= 80 else key[:80] + "...")
    why = "cannot stand in a profile" if is_reserved else "is no option"
    return LaunchError(
        f"{source}: {shown} {why}; allowed are the long options without their dashes, script and args; {hint}"
    )
