"""Files of a folder that are left out: git's rules, then those of `.dslaunchignore`, which win.

Names are bytes, as they are for git: `?` is one byte. An ignored folder is not looked into, so no file below
it can be taken back.

Source: git, dir.c and wildmatch.c; tested against `git check-ignore`
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import stat
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..wording import shown_size

GIT_FILE, OUR_FILE = b".gitignore", b".dslaunchignore"
MAX_FILE_BYTES = 100 << 20  # git's limit
Note = Callable[[bytes, str], None]  # gets a file that should have rules and has none, and the reason
_CLASSES: dict[bytes, Callable[[bytes], bool]] = {
    b"alnum": bytes.isalnum,
    b"alpha": bytes.isalpha,
    b"blank": lambda one: one in b" \t",
    b"cntrl": lambda one: one < b" " or one == b"\x7f",
    b"digit": bytes.isdigit,
    b"graph": lambda one: b" " < one < b"\x7f",
    b"lower": bytes.islower,
    b"print": lambda one: b" " <= one < b"\x7f",
    b"punct": lambda one: b" " < one < b"\x7f" and not one.isalnum(),
    b"space": bytes.isspace,
    b"upper": bytes.isupper,
    b"xdigit": lambda one: one in b"0123456789abcdefABCDEF",
}
MAX_PATH_BYTES = 4096
_ANY, _ANY_IN_FOLDER, _ANY_FOLDERS = b".*", b"[^/]*", b"(?:.*/)?"
_LAZY = {_ANY: b".*?", _ANY_IN_FOLDER: b"[^/]*?", _ANY_FOLDERS: b"(?:.*?/)??"}
_STARS = frozenset(_LAZY)
_BYTES = [bytes([number]) for number in range(256)]


class IgnoreRule(NamedTuple):
    """One line. `is_of_name`: it is compared with the last name only."""

    pattern: re.Pattern[bytes]
    is_negated: bool
    is_of_folders: bool
    is_of_name: bool


class RuleFile(NamedTuple):
    """The lines of one file; they are compared with the path after `base`."""

    base: bytes
    rules: tuple[IgnoreRule, ...]

    def decide(self, path: bytes, *, is_folder: bool) -> bool | None:
        """Tell whether the path is ignored; None if no line matches it. The last line that does, decides."""
        name = path.rpartition(b"/")[2]
        for rule in reversed(self.rules):
            if rule.is_of_folders and not is_folder:
                continue
            if rule.pattern.fullmatch(name if rule.is_of_name else path[len(self.base) :]):
                return not rule.is_negated
        return None


class Ignored(NamedTuple):
    """The rules that hold in one folder: those of the files in it and above, the nearest last.

    `prefix` stands before the paths below the folder that is sent: the rules of a repository begin there.
    """

    prefix: bytes = b""
    of_git: tuple[RuleFile, ...] = ()
    of_ours: tuple[RuleFile, ...] = ()

    def inside(self, path: bytes, git_rules: bytes, our_rules: bytes) -> Ignored:
        """Return the rules in a folder below, with those of its two files."""
        base = self.prefix + path + b"/" if path else self.prefix
        return self._replace(
            of_git=_with(self.of_git, base, git_rules), of_ours=_with(self.of_ours, base, our_rules)
        )

    def matches(self, path: bytes, *, is_folder: bool) -> bool:
        """Tell whether this is left out; its folder is not."""
        whole = self.prefix + path
        for one in (*reversed(self.of_ours), _ALWAYS, *reversed(self.of_git)):
            decided = one.decide(whole, is_folder=is_folder)
            if decided is not None:
                return decided
        return False


def _with(files: tuple[RuleFile, ...], base: bytes, text: bytes) -> tuple[RuleFile, ...]:
    rules = read_rules(text)
    return (*files, RuleFile(base, rules)) if rules else files


def rules_above(root: bytes, note: Note) -> Ignored:
    """Return the rules that hold in this folder because of the repository that it stands in."""
    top, names = root, list[bytes]()
    while not os.path.lexists(os.path.join(top, b".git")):
        top, name = os.path.split(top)
        if not name:
            return Ignored()
        names.insert(0, name)
    ignored = Ignored(prefix=b"".join(name + b"/" for name in names))
    of_git = _with((), b"", read_exclude(top, note))
    for depth in range(len(names)):  # the files of the folder itself are read when it is walked through
        base = b"".join(name + b"/" for name in names[:depth])
        of_git = _with(of_git, base, read_rule_file(os.path.join(top, base + GIT_FILE), note))
    return ignored._replace(of_git=of_git)


def read_exclude(top: bytes, note: Note) -> bytes:
    """Return the rules of the repository with this top folder that are in none of its files.

    Errors: OSError if they cannot be read
    """
    git = os.path.join(top, b".git")
    if os.path.isfile(git):  # a file in another worktree, or a submodule
        git = os.path.join(top, read_rule_file(git, note, follows=True).removeprefix(b"gitdir:").strip())
        shared = os.path.join(git, b"commondir")
        if os.path.isfile(shared):
            git = os.path.join(git, read_rule_file(shared, note, follows=True).strip())
    return read_rule_file(os.path.join(git, b"info/exclude"), note, follows=True)


def read_rule_file(path: bytes, note: Note, *, follows: bool = False) -> bytes:
    """Read a file of rules; empty if there is none. Another kind of file holds no rules, as for git, and is
    noted; so is a link, unless it is followed.

    Errors: OSError if it cannot be read
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags if follows else flags | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return b""
    except ValueError:  # a NUL in a path of a file of git
        return b""
    except OSError as error:
        if error.errno == errno.ENXIO or os.path.islink(path):
            note(path, "a link, which git does not follow" if os.path.islink(path) else "no file")
            return b""
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            note(path, "a folder" if stat.S_ISDIR(found.st_mode) else "no file")
            return b""
        if found.st_size > MAX_FILE_BYTES:
            note(path, f"more than {shown_size(MAX_FILE_BYTES)}")
            return b""
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read(MAX_FILE_BYTES)
    finally:
        os.close(fd)


def read_rules(text: bytes) -> tuple[IgnoreRule, ...]:
    """Return the lines of a file of rules."""
    lines = text.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    rules = (_read_rule(_trimmed(line.removesuffix(b"\r"))) for line in lines if not line.startswith(b"#"))
    return tuple(rule for rule in rules if rule is not None)


def _trimmed(line: bytes) -> bytes:
    """Return the line without spaces at the end, except one after a backslash."""
    end = place = 0
    while place < len(line):
        if line[place : place + 1] == b"\\" and place + 1 < len(line):
            place += 1
        elif line[place : place + 1] == b" ":
            place += 1
            continue
        place += 1
        end = place
    return line[:end]


def _read_rule(line: bytes) -> IgnoreRule | None:
    is_negated = line.startswith(b"!")
    pattern = line[is_negated:]
    is_of_folders = pattern.endswith(b"/")
    if is_of_folders:
        pattern = pattern[:-1]
    if not pattern:
        return None
    is_of_name = b"/" not in pattern
    compiled = compile_pattern(pattern.removeprefix(b"/"), is_path=not is_of_name)
    return None if compiled is None else IgnoreRule(compiled, is_negated, is_of_folders, is_of_name)


def compile_pattern(pattern: bytes, *, is_path: bool) -> re.Pattern[bytes] | None:
    """Return a regular expression; None if the pattern matches no path. In a path `*` ends at a slash."""
    parts: list[bytes] = []
    place = 0
    while place < len(pattern):
        one = pattern[place : place + 1]
        if one == b"*":
            end = place
            while pattern[end : end + 1] == b"*":
                end += 1
            # git compares the part before the first special byte by itself: then the rest begins here.
            is_first = not any(one in pattern[:place] for one in (b"*", b"?", b"[", b"\\"))
            is_alone = (is_first or pattern[place - 1 : place] == b"/") and (
                end == len(pattern) or pattern[end : end + 1] == b"/" or pattern[end : end + 2] == b"\\/"
            )
            if not is_path:
                parts.append(_ANY)
            elif end - place > 1 and is_alone:
                if pattern[end : end + 1] == b"/":
                    parts.append(_ANY_FOLDERS)
                    end += 1
                else:
                    parts.append(_ANY)
            else:
                parts.append(_ANY_IN_FOLDER)
            place = end
            continue
        if one == b"?":
            parts.append(b"[^/]" if is_path else b".")
        elif one == b"[":
            found = _read_set(pattern, place)
            if found is None:
                return None
            members, place = found
            parts.append(_written_set([byte for byte in members if byte != b"/" or not is_path]))
        elif one == b"\\":
            place += 1
            if place == len(pattern):
                return None
            parts.append(re.escape(pattern[place : place + 1]))
        else:
            parts.append(re.escape(one))
        place += 1
    return _compile(parts, is_path=is_path)


def _compile(parts: list[bytes], *, is_path: bool) -> re.Pattern[bytes] | None:
    """Put the parts together so that each piece between two stars stays where it fits first.

    A later place is never better, and trying them all takes time without bound where there are many stars.
    """
    if sum(one not in _STARS for one in parts) > MAX_PATH_BYTES:
        return None
    number = itertools.count()

    def once(text: bytes) -> bytes:
        """Return an atomic group, which Python 3.10 does not have."""
        name = b"g%d" % next(number)
        return b"(?=(?P<" + name + b">" + text + b"))(?P=" + name + b")"

    def joined(pieces: list[list[bytes]], *, is_last: bool) -> bytes:
        """Join the pieces between two `**`; every piece but the first begins with a star."""
        text = b"".join(pieces[0])
        for place, (star, *rest) in enumerate(pieces[1:], start=2):
            piece = _LAZY[star] + b"".join(rest)
            text += star + b"".join(rest) if is_last and place == len(pieces) else once(piece)
        return text

    first, *others = _split(parts, {_ANY, _ANY_FOLDERS} if is_path else set())
    inner = {_ANY_IN_FOLDER} if is_path else {_ANY}
    text = joined(_split(first, inner), is_last=not others)
    for place, (star, *rest) in enumerate(others, start=1):
        is_last = place == len(others)
        block = joined(_split(rest, inner), is_last=is_last)
        text += star + block if is_last else once(_LAZY[star] + block)
    return re.compile(text, re.DOTALL)


def _split(parts: list[bytes], stars: set[bytes]) -> list[list[bytes]]:
    """Return pieces that begin with one of these stars, except the first."""
    pieces: list[list[bytes]] = [[]]
    for one in parts:
        if one in stars:
            pieces.append([])
        pieces[-1].append(one)
    return pieces


def _written_set(members: Sequence[bytes]) -> bytes:
    return b"(?:" + b"|".join(re.escape(one) for one in members) + b")" if members else b"(?!)"


def _read_set(pattern: bytes, place: int) -> tuple[list[bytes], int] | None:
    """Return the bytes of `[...]`, and the place of its `]`; None if it has no end, or a class that is
    unknown.
    """
    place += 1
    is_negated = pattern[place : place + 1] in (b"!", b"^")
    place += is_negated
    members: set[bytes] = set()
    before = b""  # the start of a range
    is_first = True
    while is_first or pattern[place : place + 1] != b"]":
        is_first = False
        one = pattern[place : place + 1]
        if not one:
            return None
        following = pattern[place + 1 : place + 2]
        if one == b"\\":
            place += 1
            one = following
            if not one:
                return None
            members.add(one)
        elif one == b"-" and before and following and following != b"]":
            place += 1
            last = following
            if last == b"\\":
                place += 1
                last = pattern[place : place + 1]
                if not last:
                    return None
            members.update(byte for byte in _BYTES if before <= byte <= last)
            one = b""
        elif one == b"[" and following == b":":
            end = pattern.find(b"]", place + 2)
            if end < 0:
                return None
            name = pattern[place + 2 : end - 1]
            if end - place - 3 < 0 or pattern[end - 1 : end] != b":":
                members.add(b"[")
            elif name not in _CLASSES:
                return None
            else:
                members.update(byte for byte in _BYTES if byte < b"\x80" and _CLASSES[name](byte))
                place, one = end, b""
        else:
            members.add(one)
        before = one
        place += 1
    chosen = [byte for byte in _BYTES if (byte in members) != is_negated]
    return chosen, place


_ALWAYS = RuleFile(b"", read_rules(b".git"))  # unless .dslaunchignore takes it back
