"""Whether a program does not know the argument --local_rank=N, which dslaunch adds: before it runs, from its
text, and when it has failed, from what it says.

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


# The second word of the command line is read by its number: that is --local_rank=N, and the third is meant.
_READS_BY_NUMBER = re.compile(rb"^[^#\n]*\bargv\s*\[\s*[1-9][0-9]*\s*\]", re.MULTILINE)
_KNOWS = re.compile(rb"--local[_-]rank")


def why_misread(source: bytes) -> str:
    """The sentence about a script that counts its arguments and does not know of this one; else empty."""
    if _KNOWS.search(source) or not _READS_BY_NUMBER.search(source):
        return ""
    return (
        "the script reads sys.argv by number, and sys.argv[1] is --local_rank=N, which dslaunch adds as "
        "DeepSpeed does; give dslaunch --no_local_rank, and let the script read the variable LOCAL_RANK"
    )


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
