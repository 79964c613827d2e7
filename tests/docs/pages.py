"""The fenced blocks of the documents, and what a comment before each says of it.

A block of code is run by a test, or says why not, in a comment on the line before it:

    <!-- file: train.py -->             a file that the commands of this page use
    <!-- run -->                        commands of this page, in a folder of their own, in the page's order
    <!-- printed -->                    lines that the commands before it printed, among others
    <!-- run by: tests/docs/test_x.py --> another test runs or reads it
    <!-- not run: needs 4 GPUs -->      why none does

Text and differences need no mark; a ds_config, a hostfile and an environment file are read by a test without
one. Indented blocks are command lines and output, whose options `test_links.py` looks up.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.docs.test_links import CHECKOUT

NO_CODE = {"", "text", "diff"}
READ = {"json", "hostfile", "env"}  # without a mark, by test_pages.py and test_configs.py
KINDS = ("file", "run", "printed", "run by", "not run")

FENCE = re.compile(
    r"(?:^[ ]*<!-- (?P<mark>[^\n]*?) -->\n)?^(?P<indent>[ ]*)```(?P<language>[\w-]*)\n(?P<text>.*?)^[ ]*```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block. `kind` is one of KINDS, or empty where no comment stands before it."""

    page: Path
    line: int  # of its first fence, from 1
    language: str
    text: str
    kind: str
    detail: str  # what follows the kind: a file's name, a test, a reason


def blocks_of(page: Path) -> list[Block]:
    return blocks_in(page.read_text(encoding="utf-8"), page)


def blocks_in(source: str, page: Path) -> list[Block]:
    """In the page's order; a comment that is none of the marks counts as none."""
    found = []
    for match in FENCE.finditer(source):
        kind, _, detail = (match["mark"] or "").partition(":")
        found.append(
            Block(
                page=page,
                line=source[: match.start("language")].count("\n") + 1,
                language=match["language"],
                text=re.sub(rf"^{match['indent']}", "", match["text"], flags=re.MULTILINE),
                kind=kind.strip() if kind.strip() in KINDS else "",
                detail=detail.strip(),
            )
        )
    return found


def fault_of(block: Block) -> str | None:
    """Why the block is neither run nor says why not, or None."""
    if block.kind in ("", "printed"):
        if block.language in NO_CODE or (not block.kind and block.language in READ):
            return None
        return "no comment before it says that it is run, or why not"
    if block.kind == "run by":
        return None if (CHECKOUT / block.detail).is_file() else f"there is no test {block.detail!r}"
    if block.kind == "run":
        return None if block.language == "sh" else f"commands to run are `sh`, not {block.language!r}"
    return None if block.detail else f"{block.kind!r} says nothing more"
