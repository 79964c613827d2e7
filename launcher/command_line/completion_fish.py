"""What makes fish complete a command line of dslaunch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .completion_places import Kind, Place, Value, Written

_HEAD = """\
function __dslaunch_at -a wanted
    set -l place
    set -l script no
    set -l skip no
    set -l words (commandline -opc)
    for word in $words[2..-1]
        if test $skip = yes
            set skip no
            continue
        end
        switch $word
            case '--'
                set script yes
            case '-*=*'
            case '--*'
                contains -- (string replace -a _ - -- $word) $__dslaunch_valued; and set skip yes
            case '-*'
                set -l length (string length -- $word)
                for letter in (seq 2 $length)
                    if contains -- -(string sub -s $letter -l 1 -- $word) $__dslaunch_valued
                        test $letter = $length; and set skip yes
                        break
                    end
                end
            case '*'
                set -l longer (string trim -- "$place $word")
                if contains -- $longer $__dslaunch_places; and test -n "$place" -o "$word" = "$words[2]"
                    set place $longer
                else if not contains -- "$place" $__dslaunch_going_on
                    set script yes
                end
        end
        test $script = yes; and break
    end
    test $script = no -a "$place" = "$wanted"
end

function __dslaunch_hosts
    set -l words (commandline -opc)
    set -l value (string replace -r -- '^(-[^=]*=)?["\\']?' '' (commandline -ct))
    $words[1] completion hosts "$value" $words[2..-1] 2>/dev/null
end

function __dslaunch_jobs
    set -l words (commandline -opc)
    $words[1] completion jobs (commandline -ct) 2>/dev/null
end
"""


def fish_script(places: Sequence[Place]) -> str:
    """The lines for fish."""
    valued = sorted({name.replace("_", "-") for place in places for name in place.names_with_value})
    going_on = [one.name for one in places if not one.stops]
    lists = [
        f"set -g __dslaunch_valued {' '.join(map(_quoted, valued))}",
        f"set -g __dslaunch_places {' '.join(_quoted(one.name) for one in places if one.words)}",
        f"set -g __dslaunch_going_on {' '.join(map(_quoted, going_on))}",
    ]
    return "\n".join([_HEAD, *lists, *(line for place in places for line in _lines(place))])


def _lines(place: Place) -> Iterator[str]:
    here = f"complete -c dslaunch -n {_quoted(f'__dslaunch_at {_quoted(place.name)}')}"
    if place.argument.kind is not Kind.FILE:
        yield f"{here} -f{_offered(place.argument)}"
    for name, text in place.commands:
        yield f"{here} -a {name} -d {_quoted(text)}"
    for option in place.options:
        yield f"{here} {_option(option)}"


def _option(option: Written) -> str:
    parts = [f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in option.names]
    if option.value.kind is Kind.FILE:
        parts.append("-r -F")
    elif option.value.kind is not Kind.FLAG:
        parts.append(f"-x{_offered(option.value)}")
    return " ".join([*parts, f"-d {_quoted(option.does)}"])


def _offered(value: Value) -> str:
    if value.kind is Kind.WORDS:
        return f" -a {_quoted(' '.join(value.words))}"
    if value.kind is Kind.FOLDER:
        return " -a '(__fish_complete_directories (commandline -ct))'"
    if value.kind is Kind.JOBS:
        return " -a '(__dslaunch_jobs)'"
    return " -a '(__dslaunch_hosts)'" if value.kind is Kind.HOSTS else ""


def _quoted(text: str) -> str:
    """In single quotes, in which fish knows two escapes."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
