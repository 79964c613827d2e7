"""How mkdocstrings shows our docstrings: `Errors:`, `Shapes:` and their like become a list."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

HEADINGS = ("Errors", "Order", "Shapes", "Source", "State", "Units")
HEADING = re.compile(rf"^({'|'.join(HEADINGS)}):\s+(.*)$")
MARKUP = re.compile(r"(`[^`]*`)|([*_<\[\]])")


class DslaunchDocstrings(Extension):
    """Rewrites each docstring as it is read."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """The same words, with a list of what stands under headings.

    Lines that are indented deeper than the text around them, and belong to no heading, stay a block of code.
    """
    text: list[str] = []
    items: list[str] = []
    under_heading = False
    for line in docstring.splitlines():
        heading = HEADING.match(line)
        if heading:
            items.append(f"- **{heading[1]}:** {escaped(heading[2])}")
            under_heading = True
        elif under_heading and line.strip():
            items.append(f"  {escaped(line.strip())}")
        elif line.startswith("    "):
            text.append(line)
        else:
            under_heading = False
            text.append(escaped(line))
    return "\n".join([*text, *(["", *items] if items else [])])


def escaped(line: str) -> str:
    """Without markup but for names in backquotes."""
    return MARKUP.sub(lambda match: match[1] or f"\\{match[2]}", line)
