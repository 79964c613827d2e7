"""Every wait of the launcher and its agents is in docs/design/waits.md,
with its limit and what is said when it is over.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
LAUNCHER = CHECKOUT / "launcher"
PAGE = (CHECKOUT / "docs" / "design" / "waits.md").read_text()

Wait = tuple[str, str, str]  # file, function, what is called

# These wait without a limit if they are given none of their own.
_LIMITED_BY_AN_ARGUMENT = ("wait", "join", "acquire", "communicate", "result", "get", "poll")
# The limit of these is elsewhere: a timeout of the socket, a selector that was asked before, a descriptor
# that never blocks.
_LIMITED_ELSEWHERE = ("accept", "recv", "recvfrom", "recvmsg", "recv_into", "getaddrinfo")
_READS = ("read", "readline", "readlines")
# One that was opened by its name is a regular file or one of /proc; the others are modules
# and readers of ours.
_READ_AT_ONCE = ("file", "fast_json", "subject", "first", "second")
_CHILDREN = ("run", "call", "check_call", "check_output")


def waits_in(source: str, file: str) -> set[Wait]:
    """Each endless loop and each call that may wait for ever as it stands there."""
    found: set[Wait] = set()

    def look(node: ast.AST, where: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            where = (*where, node.name)
        if isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value:
            found.add((file, ".".join(where), "while True"))
        if isinstance(node, ast.Call) and _may_wait_for_ever(node):
            found.add((file, ".".join(where), f"{ast.unparse(node.func)}()"))
        for child in ast.iter_child_nodes(node):
            look(child, where)

    look(ast.parse(source), ())
    return found


def _may_wait_for_ever(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    name, owner = call.func.attr, ast.unparse(call.func.value)
    if name == "join" and isinstance(call.func.value, ast.Constant):  # of texts
        return False
    limits = {one.arg: one.value for one in call.keywords}
    if name in _LIMITED_ELSEWHERE:
        return True
    if name in _LIMITED_BY_AN_ARGUMENT:
        if "timeout" in limits:
            return _may_be_none(limits["timeout"])
        return "blocking" not in limits and (not call.args or _may_be_none(call.args[0]))
    if name == "select":
        return len(call.args) in (0, 3) and "timeout" not in limits
    if name in _READS:
        return owner not in _READ_AT_ONCE
    if name in ("waitpid", "waitid", "wait4"):
        return "WNOHANG" not in ast.unparse(call)
    if owner == "subprocess" and name in _CHILDREN:
        return "timeout" not in limits
    return name == "create_connection" and "timeout" not in limits


def _may_be_none(node: ast.expr) -> bool:
    return any(isinstance(one, ast.Constant) and one.value is None for one in ast.walk(node))


def in_the_launcher() -> set[Wait]:
    found: set[Wait] = set()
    for path in sorted(LAUNCHER.rglob("*.py")):
        found |= waits_in(path.read_text(), str(path.relative_to(LAUNCHER)))
    return found


def in_the_page() -> set[Wait]:
    rows = re.findall(r"^\| `([^`]+)` `([^`]+)` \| `([^`]+)` \|", PAGE, re.MULTILINE)
    return {(file, function, what) for file, function, what in rows}


def test_every_wait_is_in_the_page_and_the_page_has_no_other() -> None:
    code, page = in_the_launcher(), in_the_page()
    missing = "".join(f"\n  | `{file}` `{where}` | `{what}` |" for file, where, what in sorted(code - page))
    assert not code - page, f"give it a limit, or say in docs/design/waits.md what limits it:{missing}"
    assert not page - code, f"in docs/design/waits.md, but not in the launcher: {sorted(page - code)}"


def test_every_row_says_what_limits_the_wait_and_what_is_said_then() -> None:
    for line in PAGE.splitlines():
        if line.startswith("| `"):
            cells = [one.strip() for one in line.strip("|").split(" | ")]
            assert len(cells) == 4, line
            assert all(cells), line


@pytest.mark.parametrize(
    ("source", "is_wait"),
    [
        ("while True: pass", True),
        ("while 1: pass", True),
        ("while not is_over: pass", False),
        ("thread.join()", True),
        ("thread.join(None if x else 5)", True),
        ("thread.join(5)", False),
        ("event.wait(timeout=None)", True),
        ("event.wait(timeout=2)", False),
        ("queue.get()", True),
        ("names.get(key)", False),
        ("', '.join(names)", False),
        ("lock.acquire(blocking=False)", False),
        ("select.select([a], [], [])", True),
        ("select.select([a], [], [], 1.0)", False),
        ("os.waitpid(pid, 0)", True),
        ("os.waitpid(-1, os.WNOHANG)", False),
        ("subprocess.run(argv)", True),
        ("subprocess.run(argv, timeout=5)", False),
        ("sock.recv(10)", True),
        ("socket.create_connection(where)", True),
    ],
)
def test_what_counts_as_a_wait(source: str, is_wait: bool) -> None:
    assert bool(waits_in(source, "a.py")) == is_wait
