"""The README as a package index shows it: there, links to files of the repository lead nowhere.

A provider for `[[tool.dynamic-metadata]]`. Where `[project.urls]` has `Repository`, links and pictures lead
there. Without one a link becomes its text with the path in the source distribution, and a picture what it
shows, in words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

README = "README.md"
FROM_A_CLONE = "pip install '.[train]'    # in a clone, with a C++ compiler; without"
FROM_THE_INDEX = "pip install 'dslaunch[train]'    # without"
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
SCHEME = re.compile(r"[a-z][a-z+.-]*:|#|//")


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """The field `readme`, called while the package is built, in the folder of pyproject.toml.

    Errors: ValueError if a setting is given, for there is none
    """
    if settings:
        raise ValueError(f"{sorted(settings)}: the long description has no settings; leave them out")
    text = Path(README).read_text(encoding="utf-8")
    repository = dict(project.get("urls", {})).get("Repository", "")
    return {"readme": {"content-type": "text/markdown", "text": long_description(text, repository)}}


def long_description(readme: str, repository: str = "") -> str:
    """The README's text without a link that is relative. `repository`: its address, or empty.

    Errors: ValueError if the README does not have the line of the installation that is replaced
    """
    if FROM_A_CLONE not in readme:
        raise ValueError(
            f"{README} has no line with {FROM_A_CLONE!r}; say in long_description.py what it is now"
        )

    def absolute(match: re.Match[str]) -> str:
        picture, text, target = match["picture"], match["text"], match["target"]
        if SCHEME.match(target):
            return match[0]
        if repository:
            return f"{picture}[{text}]({repository.rstrip('/')}/{'raw' if picture else 'blob'}/HEAD/{target})"
        return f"*{text}: {target}*" if picture else f"{text} (`{target}`)"

    return LINK.sub(absolute, readme.replace(FROM_A_CLONE, FROM_THE_INDEX))
