"""Tables of mistakes and what is said of them: NAME.txt, a mistake in each line, `given => said`.

What is given is text as it stands, or a JSON string, such as one with line ends. More lines of what is said
begin with four spaces. `<NAME> = text` above the table is a part of what many of its lines say.
"""

from __future__ import annotations

import json
import re
from pathlib import Path


def mistakes(name: str, **parts: str) -> list[tuple[str, str]]:
    """Return what is given and what is said of it, of each mistake of a table.

    `parts`: what stands in it as `<NAME>`, beside its own.
    """
    found: list[tuple[str, str]] = []
    for line in (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if part := re.fullmatch(r"<([A-Z]+)> = (.*)", line):
            parts[part[1]] = part[2]
        elif line.startswith("    "):
            given, said = found.pop()
            found.append((given, f"{said}\n{line[4:]}"))
        elif line and not line.startswith("# "):
            given, arrow, said = line.partition(" => ")
            assert arrow, f"{name}.txt: {line!r} is no `given => said`"
            found.append((json.loads(given) if given.startswith('"') else given, said))
    for part, text in parts.items():
        found = [(given, said.replace(f"<{part}>", text)) for given, said in found]
    return found
