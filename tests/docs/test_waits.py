"""Every wait of the launcher and its agents, and every constant that limits one, is in docs/design/waits.md,
with its limit and what is said when it is over, or with the option that it follows from.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from dslaunch.launcher.node.files.sync_peer import PeerTimes
from dslaunch.launcher.node.workers.preload import PreloadTimes
from dslaunch.launcher.node.workers.preparation import VENV_PART
from dslaunch.launcher.run.check_first import TIMEOUT_PART

CHECKOUT = Path(__file__).resolve().parents[2]
LAUNCHER = CHECKOUT / "launcher"
PAGE = (CHECKOUT / "docs" / "design" / "waits.md").read_text()
_, _, CONSTANT_LIMITS = PAGE.partition("## Constant limits")
CONSTANT_LIMITS, _, EVERY_PLACE = CONSTANT_LIMITS.partition("## Every place in the code")

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


@cache
def files_of_the_launcher() -> dict[str, ast.Module]:
    return {str(path.relative_to(LAUNCHER)): ast.parse(path.read_text()) for path in LAUNCHER.rglob("*.py")}


def waits_in(tree: ast.Module, file: str) -> set[Wait]:
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

    look(tree, ())
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
    if name == "wait_for":  # of a condition, which is the first argument
        return "timeout" not in limits and (len(call.args) < 2 or _may_be_none(call.args[1]))
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
    return {wait for file, tree in files_of_the_launcher().items() for wait in waits_in(tree, file)}


def in_the_page() -> set[Wait]:
    rows = re.findall(r"^\| `([^`]+)` `([^`]+)` \| `([^`]+)` \|", EVERY_PLACE, re.MULTILINE)
    return {(file, function, what) for file, function, what in rows}


@pytest.mark.slow
def test_every_wait_is_in_the_page_and_the_page_has_no_other() -> None:
    code, page = in_the_launcher(), in_the_page()
    missing = "".join(f"\n  | `{file}` `{where}` | `{what}` |" for file, where, what in sorted(code - page))
    assert not code - page, f"give it a limit, or say in docs/design/waits.md what limits it:{missing}"
    assert not page - code, f"in docs/design/waits.md, but not in the launcher: {sorted(page - code)}"


def test_every_row_says_what_limits_the_wait_and_what_is_said_then() -> None:
    for line in EVERY_PLACE.splitlines():
        if line.startswith("| `"):
            cells = [one.strip() for one in line.strip("|").split(" | ")]
            assert len(cells) == 4, line
            assert all(cells), line


# A constant that is shorter is over before anyone waits for it.
_SHORT_S = 2.0


@cache
def constants_in_the_launcher() -> set[tuple[str, str, float]]:
    """Names of modules that end in _S, with their seconds."""
    found: set[tuple[str, str, float]] = set()
    for file, tree in files_of_the_launcher().items():
        for line in tree.body:
            if isinstance(line, ast.AnnAssign) and line.value is not None:
                pairs = [(line.target, line.value)]
            elif not isinstance(line, ast.Assign):
                continue
            elif isinstance(line.targets[0], ast.Tuple) and isinstance(line.value, ast.Tuple):
                pairs = list(zip(line.targets[0].elts, line.value.elts, strict=True))
            else:
                pairs = [(line.targets[0], line.value)]
            for target, value in pairs:
                name = ast.unparse(target)
                if name.endswith("_S") and (seconds := float(eval(ast.unparse(value)))) >= _SHORT_S:
                    found.add((file, name, seconds))
    return found


def constants_in_the_page() -> list[tuple[str, str]]:
    found, file = [], ""
    for word in re.findall(r"`([^`]+)`", CONSTANT_LIMITS):
        if word.endswith(".py"):
            file = word
        elif re.fullmatch("[A-Z_]+_S", word) and file:
            found.append((file, word))
    return found


def test_every_constant_limit_is_in_the_page_with_what_it_lies_inside_of() -> None:
    code = {(file, name) for file, name, _ in constants_in_the_launcher()}
    page = constants_in_the_page()
    missing = sorted(code - {*page})
    assert not missing, f"say in docs/design/waits.md inside of what it lies: {missing}"
    assert not {*page} - code, f"in docs/design/waits.md, but not in the launcher: {sorted({*page} - code)}"


def test_the_page_tells_the_seconds_of_the_constants_inside_of_an_option() -> None:
    seconds = {(file, name): told_s for file, name, told_s in constants_in_the_launcher()}
    rows = re.findall(
        r"^\| `([^`]+)` ((?:`[A-Z_]+_S`(?:, )?)+) \| ([0-9, ]+) \|", CONSTANT_LIMITS, re.MULTILINE
    )
    assert len(rows) > 20
    for file, names, told in rows:
        each = re.findall(r"`([^`]+)`", names)
        assert [seconds[file, name] for name in each] == [float(one) for one in told.split(",")], file


@pytest.mark.parametrize("option_s", [1.0, 30.0, 600.0, 86400.0])
def test_what_is_made_from_an_option_is_over_before_it(option_s: float) -> None:
    preload = PreloadTimes.within(prepare_timeout_s=option_s, heartbeat_s=option_s)
    assert VENV_PART * option_s + preload.start_s + preload.import_s + 2 * preload.end_s < option_s
    assert preload.fork_s < option_s / 2
    assert sum(PeerTimes.within(option_s)) < option_s
    assert TIMEOUT_PART * option_s < option_s


def test_constants_that_lie_inside_of_each_other_are_shorter() -> None:
    seconds = {(file, name): told_s for file, name, told_s in constants_in_the_launcher()}
    in_a_host = (
        seconds["node/workers/stack_dump.py", "ANSWER_TIMEOUT_S"]
        + seconds["node/workers/stack_dump.py", "PY_SPY_TIMEOUT_S"]
    )
    in_the_job = seconds["controller/stacks.py", "TIMEOUT_S"]
    assert in_a_host < in_the_job < seconds["command_line/stacks.py", "ANSWER_WITHIN_S"]
    assert in_the_job < seconds["top/screen.py", "ANSWER_WITHIN_S"]
    assert 2 * seconds["run/job_end.py", "WEBHOOK_TRY_S"] < seconds["run/job_end.py", "WEBHOOK_S"]
    of_controller, of_nodes = (
        seconds[file, "STOP_MARGIN_S"] for file in ("controller/controller.py", "rendezvous/coordinator.py")
    )
    assert of_controller < of_nodes


def test_no_limit_is_a_number_in_the_middle_of_the_code() -> None:
    """A constant has a name, and so a row in the page."""
    found = []
    for file, tree in files_of_the_launcher().items():
        for call in ast.walk(tree):
            if not isinstance(call, ast.Call):
                continue
            limits = [
                one.value for one in call.keywords if one.arg and one.arg.removesuffix("_s") == "timeout"
            ]
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if name in ("settimeout", "wait", "join", "acquire", "select", "poll"):
                limits += call.args
            for limit in limits:
                if (
                    isinstance(limit, ast.Constant)
                    and isinstance(limit.value, int | float)
                    and limit.value > _SHORT_S
                ):
                    found.append(f"{file}:{call.lineno}")
    assert not found


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
        ("changed.wait_for(lambda: done)", True),
        ("changed.wait_for(lambda: done, 5)", False),
        ("changed.wait_for(lambda: done, timeout=5)", False),
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
    assert bool(waits_in(ast.parse(source), "a.py")) == is_wait
