"""What makes bash complete a command line of dslaunch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from shlex import quote

from .completion_places import Kind, Place, Value

# Bash cuts words at = : @, too: what stands together on the line is one word here.
_BODY = r"""
_dslaunch() {
    local line="${COMP_LINE:0:COMP_POINT}" piece="" space word i count=0
    local -a words=()
    for ((i = 0; i <= COMP_CWORD; i++)); do
        space="${line%%[![:space:]]*}"
        line="${line#"$space"}"
        piece="${COMP_WORDS[i]}"
        ((i == COMP_CWORD)) && piece="$line"
        line="${line#"$piece"}"
        if ((i > 0)) && [ -z "$space" ]; then
            words[count - 1]+="$piece"
        else
            words[count++]="$piece"
        fi
    done

    local place="" commands options valued stops argument option="" script="" name letters
    _dslaunch_place
    for ((i = 1; i < count - 1; i++)); do
        word="${words[i]}"
        option=""
        case "$word" in
        --) [ -n "$stops" ] && script=yes && break ;;
        -*=*) ;;
        --*)
            name="${word#--}"
            name="--${name//-/_}"
            [[ " $valued " == *" $name"* ]] && ((++i)) && option="$name"
            ;;
        -?*)
            for ((letters = 1; letters < ${#word}; letters++)); do
                if [[ " $valued " == *" -${word:letters:1} "* ]]; then
                    ((letters + 1 == ${#word})) && ((++i)) && option="-${word:letters:1}"
                    break
                fi
            done
            ;;
        *)
            if [[ " $commands " == *" $word "* ]] && { [ -n "$place" ] || ((i == 1)); }; then
                place="${place:+$place }$word"
                _dslaunch_place
            elif [ -n "$stops" ]; then
                script=yes
                break
            fi
            ;;
        esac
    done
    ((i == count - 1)) && option=""

    local current="${words[count - 1]#[\"\']}" start="" found="" # without a quote that is open
    local value="$current"
    if [ -z "$script$option" ]; then
        case "$current" in
        --*=*) name="${current%%=*}" && name="${name#--}" && option="--${name//-/_}" ;;
        -[!-]=*) option="${current%%=*}" ;;
        esac
        [ -n "$option" ] && start="${current%%=*}=" && value="${current#*=}" && value="${value#[\"\']}"
    fi
    COMPREPLY=()
    if [ -n "$script" ]; then
        compopt -o default
        return
    elif [ -n "$option" ]; then
        _dslaunch_value "$option"
    elif [[ "$current" == -* ]]; then
        found="$(compgen -W "$options" -- "$current")"
    else
        found="$(compgen -W "$commands" -- "$current")"
        if [ -z "$found" ] || [ -z "$commands" ]; then
            _dslaunch_argument "$argument"
        elif [ "$argument" = file ]; then
            compopt -o filenames
            found+=$'\n'"$(compgen -f -- "$current")"
        fi
    fi
    # Bash replaces what follows the last of its own breaks.
    case "$piece" in [=:@]) piece="" ;; esac
    local together="${words[count - 1]%"$piece"}"
    together="${together%@}" # which bash replaces, too
    while IFS= read -r word; do
        word="$start$word"
        [ "$word" != "$start" ] && COMPREPLY+=("${word#"$together"}")
    done <<<"$found"
}

_dslaunch_argument() {
    case "$1" in
    file) compopt -o default ;;
    folder) compopt -o dirnames ;;
    hosts) found="$("${words[0]}" completion hosts "$value" "${words[@]:1:count-2}" 2>/dev/null)" ;;
    jobs) found="$("${words[0]}" completion jobs "$value" 2>/dev/null)" ;;
    free) ;;
    *) found="$(compgen -W "$1" -- "$value")" ;;
    esac
}
"""


def bash_script(places: Sequence[Place]) -> str:
    """The lines for bash."""
    return "\n".join([*_place_function(places), *_value_function(places), _BODY, *_LAST])


_LAST = ["complete -F _dslaunch dslaunch"]


def _place_function(places: Sequence[Place]) -> Iterator[str]:
    """What can stand at each place."""
    yield "_dslaunch_place() {"
    yield '    case "$place" in'
    for one in places:
        options = sorted(name for option in one.options for name in option.names if name.startswith("--"))
        yield f"    {quote(one.name)})"
        yield f"        commands={quote(' '.join(name for name, _ in one.commands))}"
        yield f"        options={quote(' '.join(options))}"
        yield f"        valued={quote(' '.join(one.names_with_value))}"
        yield f"        argument={quote(_written(one.argument))} stops={'yes' if one.stops else ''}"
        yield "        ;;"
    yield "    esac"
    yield "}"


def _value_function(places: Sequence[Place]) -> Iterator[str]:
    """What the value of an option may be."""
    yield "_dslaunch_value() {"
    yield '    case "$place $1" in'
    for place in places:
        for option in place.options:
            if option.value.kind not in (Kind.FLAG, Kind.FREE):
                patterns = "|".join(f"{quote(f'{place.name} {name}')}" for name in option.names)
                yield f"    {patterns}) _dslaunch_argument {quote(_written(option.value))} ;;"
    yield "    esac"
    yield "}"


def _written(value: Value) -> str:
    return " ".join(value.words) if value.kind is Kind.WORDS else _KINDS[value.kind]


_KINDS = {Kind.FILE: "file", Kind.FOLDER: "folder", Kind.HOSTS: "hosts", Kind.JOBS: "jobs", Kind.FREE: "free"}
