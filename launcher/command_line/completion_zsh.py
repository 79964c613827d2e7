"""What makes zsh complete a command line of dslaunch: one call of its _arguments for each place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from shlex import quote

from .completion_places import Kind, Place, Value, Written

_HEAD = """\
_dslaunch_hosts() {
    local -a names
    names=("${(@f)$($dslaunch_program completion hosts "$PREFIX" "${dslaunch_typed[@]}" 2>/dev/null)}")
    compadd -- "${(@)names:#}"
}

_dslaunch_jobs() {
    local -a names
    names=("${(@f)$($dslaunch_program completion jobs "$PREFIX" 2>/dev/null)}")
    compadd -- "${(@)names:#}"
}

_dslaunch() {
    local dslaunch_program="$words[1]" place=""
    local -a dslaunch_typed=("${(@)words[2,CURRENT-1]}") commands=()
    local context state line
    typeset -A opt_args
    if ((CURRENT > 2)); then
        place="$(_dslaunch_place "$words[2]")"
        if [[ -n "$place" ]]; then
            shift words
            ((CURRENT--))
        fi
    fi
    if ((CURRENT > 2)) && [[ -n "$place" && -n "$(_dslaunch_place "$place $words[2]")" ]]; then
        place="$place $words[2]"
        shift words
        ((CURRENT--))
    fi
    case "$place" in"""

_TAIL = """\
    esac
}
compdef _dslaunch dslaunch"""

_ACTIONS = {
    Kind.FILE: "_files",
    Kind.FOLDER: "_files -/",
    Kind.HOSTS: "_dslaunch_hosts",
    Kind.JOBS: "_dslaunch_jobs",
    Kind.FREE: " ",
}


def zsh_script(places: Sequence[Place]) -> str:
    """The lines for zsh."""
    return "\n".join([*_place_function(places), _HEAD, *_cases(places), _TAIL])


def _place_function(places: Sequence[Place]) -> Iterator[str]:
    """Prints its argument if these are the words of a command."""
    yield "_dslaunch_place() {"
    names = "|".join(quote(one.name) for one in places if one.words)
    yield f'    case "$1" in {names}) print -r -- "$1" ;; esac'
    yield "}"


def _cases(places: Sequence[Place]) -> Iterator[str]:
    for place in places:
        yield f"    {quote(place.name)})"
        described = " ".join(quote(f"{_escaped(name)}:{text}") for name, text in place.commands)
        yield f"        commands=({described})"
        yield f"        _arguments -s -S{' -A ' + quote('-*') if place.stops else ''} \\"
        for option in place.options:
            for spec in _option_specs(option):
                yield f"            {quote(spec)} \\"
        if place.commands:
            files = "; _files" if place.argument.kind is Kind.FILE else ""
            yield f"            {quote(f'1: :{{ _describe command commands{files} }}')} \\"
        if place.argument.kind is not Kind.FREE:
            yield f"            {quote(f'*: :{_action(place.argument)}')} \\"
        yield ""
        yield "        ;;"


def _option_specs(option: Written) -> Iterator[str]:
    """A spec for each name; one name excludes all of them."""
    others = f"({' '.join(option.names)})"
    for name in option.names:
        if option.value.kind is Kind.FLAG:
            yield f"{others}{name}[{_escaped(option.does)}]"
        else:
            joined = "=" if name.startswith("--") else "+"
            value = f":{_escaped(option.metavar)}:{_action(option.value)}"
            yield f"{others}{name}{joined}[{_escaped(option.does)}]{value}"


def _action(value: Value) -> str:
    return f"({' '.join(value.words)})" if value.kind is Kind.WORDS else _ACTIONS[value.kind]


def _escaped(text: str) -> str:
    """Without a meaning for _arguments and _describe."""
    for sign in "\\[]:":
        text = text.replace(sign, f"\\{sign}")
    return text
