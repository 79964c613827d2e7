"""Pieces of HTML. All output of a job is only text here."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_CHARACTERS = 4000  # characters of one line, or of one value
MAX_LINES = 400
MAX_DEPTH = 12
MAX_ITEMS = 400  # items of one level of a tree
_UNSHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_COLOR = re.compile("\x1b\\[[0-?]*[ -/]*[@-~]|\x1b\\][^\x07\x1b]*(?:\x07|\x1b\\\\)")


def escaped(text: object, limit: int = MAX_CHARACTERS) -> str:
    """Return text as HTML shows it: cut if it is long, without signs that cannot be shown."""
    words = str(text)
    is_cut = len(words) > limit
    words = _UNSHOWN.sub("\ufffd", _COLOR.sub("", words[:limit]))
    return html.escape(words) + ("..." if is_cut else "")


def element(name: str, inner: str, **attributes: str) -> str:
    """Return an element: `inner` is HTML, attributes are text; a trailing _ of their names is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"' for key, value in attributes.items()
    )
    return f"<{name}{written}>{inner}</{name}>"


def lines_of(lines: Sequence[str], limit: int = MAX_LINES) -> str:
    """Return the lines unchanged; of many the first and the last."""
    shown = list(lines)
    if len(shown) > limit:
        left_out = f"... {len(shown) - limit} lines left out ..."
        shown = [*shown[: limit // 4], left_out, *shown[-(limit - limit // 4) :]]
    return element("pre", "\n".join(escaped(one) for one in shown), tabindex="0")


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "", numbers: bool = False
) -> str:
    """Return a table; its cells are text."""
    titles = "".join(element("th", escaped(one), scope="col") for one in head)
    body = "".join(f"<tr>{''.join(element('td', escaped(cell)) for cell in row)}</tr>" for row in rows)
    title = element("caption", escaped(caption)) if caption else ""
    made = f"{title}<thead><tr>{titles}</tr></thead><tbody>{body}</tbody>"
    kind = {"class_": "numbers"} if numbers else {}
    return element("div", element("table", made, **kind), class_="wide", tabindex="0")


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Return names with their descriptions; the second is HTML."""
    return element(
        "dl", "".join(f"{element('dt', escaped(name))}{element('dd', value)}" for name, value in rows)
    )


def fold(title: str, inner: str, *, is_open: bool = False) -> str:
    return f"<details{' open' if is_open else ''}>{element('summary', escaped(title))}{inner}</details>"


def tree(value: Any, depth: int = 0) -> str:
    """Return a configuration whose levels can be folded."""
    if depth < MAX_DEPTH:
        if isinstance(value, Mapping):
            return _level([(str(name), one) for name, one in value.items()], depth)
        if isinstance(value, list | tuple) and any(isinstance(one, Mapping | list) for one in value):
            return _level([(str(place), one) for place, one in enumerate(value)], depth)
    return element("code", escaped(as_value(value)))


def _level(items: Sequence[tuple[str, Any]], depth: int) -> str:
    found = []
    for name, value in items[:MAX_ITEMS]:
        inner = tree(value, depth + 1)
        if inner.startswith("<ul"):
            found.append(f"<li>{fold(name, inner, is_open=depth == 0)}</li>")
        else:
            found.append(f"<li>{element('span', escaped(name), class_='key')} {inner}</li>")
    if len(items) > MAX_ITEMS:
        found.append(f"<li>... and {len(items) - MAX_ITEMS} more</li>")
    return element("ul", "".join(found), class_="tree") if found else element("code", "{}")


def as_value(value: Any) -> str:
    """Write the value as JSON has it."""
    import json

    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return "..."


def moment(at: float) -> str:
    """Write date and time on this machine's clock."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) if at else ""
    except (OverflowError, ValueError, OSError):
        return ""
