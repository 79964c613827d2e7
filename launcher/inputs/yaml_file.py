"""YAML text as str, list and dict.

Nothing is guessed: `8`, `yes` and `010` are texts, as on a command line.
"""

from __future__ import annotations

from typing import Any, Union

import yaml

from ..errors import LaunchError

# Union because `|` cannot be evaluated with a part in quotes
Node = Union[str, "list[Node]", "dict[str, Node]"]

_MAX_CHARS = 4 << 20  # takes a minute to read; a file of 10,000 hosts has a tenth of this
_SHOWN_LENGTH = 80


class _Loader(yaml.BaseLoader):
    """Refuses a key that is given twice, where YAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is not a word", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{shown(key.value)} is given twice", key.start_mark
                )
            seen.add(key.value)
        made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return made


def parse_yaml(text: str, *, source: str, example: str) -> Node:
    """Return the only document in `text`; for an empty text an empty str.

    Errors: LaunchError with `source` and the line; `example` is a correct text.
    """
    if len(text) > _MAX_CHARS:
        raise LaunchError(
            f"{source}: {len(text)} characters; at most {_MAX_CHARS} are read; is this the right file?"
        )
    try:
        found: Node | None = yaml.load(text, Loader=_Loader)  # this loader makes only texts, lists and dicts
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        why = error.problem or error.context or "it cannot be read"
        raise LaunchError(f"{where}: not YAML as it is read here: {why}; write e.g. {example!r}") from None
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise LaunchError(f"{source}: not YAML as it is read here: {why}; write e.g. {example!r}") from None
    except RecursionError:
        raise LaunchError(f"{source}: lists in lists, too deep to be read; write e.g. {example!r}") from None
    return "" if found is None else found


def shown(node: Node) -> str:
    """Return a value for a message, shortened."""
    text = repr(node) if isinstance(node, str) else "a list" if isinstance(node, list) else "a mapping"
    return text if len(text) <= _SHOWN_LENGTH else text[:_SHOWN_LENGTH] + "..."
