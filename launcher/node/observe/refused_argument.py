"""Programs that do not know the argument --local_rank=N, which dslaunch adds: judged by its text before
it runs, and by its output after it failed.
"""

from __future__ import annotations

import re

# Complaints about an unknown argument, of parsers such as argparse, getopt, click, absl, Fire, Go, Rust.
_COMPLAINT = re.compile(
    "unrecognized|not recognized|unknown|no such option|invalid option|illegal option|unexpected argument"
    "|not defined|could not consume|are not used"
)
_SUGGESTION = re.compile("did you mean|you meant|possible options|similar")  # names of known arguments follow
_HARMLESS = re.compile("warn|ignor")  # the program went on
_NAME = re.compile(r"(?:(?<![\w-])--?|flag ')local[_-]rank(?![\w-])")
_SHOWN_LENGTH = 80


# The script reads the second word of its command line by number: now that is --local_rank=N.
_READS_BY_NUMBER = re.compile(rb"^[^#\n]*\bargv\s*\[\s*[1-9][0-9]*\s*\]", re.MULTILINE)
_KNOWS = re.compile(rb"--local[_-]rank")


def why_misread(source: bytes) -> str:
    """Return the sentence about a script that counts its arguments, unaware of this one; else empty."""
    if _KNOWS.search(source) or not _READS_BY_NUMBER.search(source):
        return ""
    return (
        "the script reads sys.argv by number, and sys.argv[1] is --local_rank=N, which dslaunch adds as "
        "DeepSpeed does; give dslaunch --no_local_rank, and let the script read the variable LOCAL_RANK"
    )


def why_refused(lines: list[str]) -> str:
    """Return the sentence about it, if one of these lines complains of the argument; else empty."""
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
    """Return the other arguments that argparse lists; the program refuses them also without --local_rank."""
    words = line.partition("unrecognized arguments:")[2].split()
    names = " ".join(one for one in words if one.startswith("-") and not _NAME.match(one.lower()))
    return f"; it does not know {names[:_SHOWN_LENGTH]} either, of your command line" if names else ""
