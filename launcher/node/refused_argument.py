"""Whether a program failed because it does not know the argument --local_rank=N, which dslaunch adds.

Sent to the nodes: standard library only.
"""

from __future__ import annotations

import re

# What parsers of arguments say of one that they do not know: argparse, getopt, click, absl, Fire, Go, Rust
# and others in their words.
_COMPLAINT = re.compile(
    "unrecognized|not recognized|unknown|no such option|invalid option|illegal option|unexpected argument"
    "|not defined|could not consume|are not used"
)
_SUGGESTION = re.compile("did you mean|you meant|possible options|similar")  # names that they do know follow
_HARMLESS = re.compile("warn|ignor")  # the program went on
_NAME = re.compile(r"(?:(?<![\w-])--?|flag ')local[_-]rank(?![\w-])")
_SHOWN_LENGTH = 80


def why_refused(lines: list[str]) -> str:
    """The sentence about it, if one of these lines of the program complains of the argument; else empty."""
    for line in lines:
        said = _SUGGESTION.split(line.lower(), maxsplit=1)[0]
        if _COMPLAINT.search(said) and _NAME.search(said) and not _HARMLESS.search(said):
            return (
                "the program does not know the argument --local_rank=N, which dslaunch adds as DeepSpeed "
                "does; give dslaunch --no_local_rank, and let the program read the variable LOCAL_RANK "
                f"if it needs the number{_others(line)}"
            )
    return ""


def _others(line: str) -> str:
    """What else argparse lists; leaving --local_rank out will not help with it."""
    words = line.partition("unrecognized arguments:")[2].split()
    names = " ".join(one for one in words if one.startswith("-") and not _NAME.match(one.lower()))
    return f"; it does not know {names[:_SHOWN_LENGTH]} either, of your command line" if names else ""
