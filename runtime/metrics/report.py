"""`dslaunch.report()`: a program reports its progress.

It imports neither torch nor anything that does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from math import inf
from numbers import Integral, Real
from typing import Any, SupportsFloat

from ..environment import read_trace
from ..errors import ConfigError
from .pipe import Pipe, process_pipe
from .start_phases import start_phases

MOST_NAMES = 32  # names that a program may report: with an engine's they fit into one line
LONGEST_NAME = 40
_TAKEN = ("state", "file")
_ESCAPED = '"\\'  # these take two bytes in JSON
_AMOUNTS = frozenset(
    ("steps", "step_s", "forward_s", "backward_s", "optimizer_s", "comm_s", "paused_s", "saving_s", "data_s")
)  # amounts of the interval: they are added up, and rates come from them
_LARGEST_WHOLE = 2**53  # a float holds those below exactly


def report(*, step: int | None = None, loss: SupportsFloat | None = None, **numbers: SupportsFloat) -> None:
    """Tell the launcher numbers of this rank: its commands and files show them beside what engines tell.

    Call it as often as you like, with any names: of several values in a second the last one counts, and of
    names that end in _s, which are seconds, the sum. Where no launcher listens it does nothing, and it never
    waits: a tensor of a GPU is read when the GPU has computed it. With --trace it says where a step ends.

    An engine tells its steps, loss and times without this call; under those names the value given here goes
    before, but for `step`, which is the engine's.

    Shapes: numbers, or anything with one: 0-d tensors and arrays
    Units:  `step` counts optimizer steps, from 1; `loss` is of that step
    Errors: ConfigError for what is not one number, and for more than 32 names
    """
    given: dict[str, Any] = dict(numbers)
    if step is not None:
        given["step"] = step
    if loss is not None:
        given["loss"] = loss
    pipe = process_pipe()
    told = {name: _number(name, value) for name, value in given.items()}
    known = _process_steps()
    known.check_names(given)
    if pipe is not None and told:
        pipe.add(told | known.count(pipe, told), is_program=True)
    if "step" in told:
        start = start_phases()
        if start is not None and (pipe is None or not pipe.has_engine):
            start.end_step()
        mark = _step_marker()
        if mark is not None:
            mark(told["step"])


class _Steps:
    """Steps that a program without an engine has reported."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._names: set[str] = set()

    def check_names(self, given: dict[str, Any]) -> None:
        """Names that are refused do not count later. Errors: ConfigError if there are too many"""
        new = given.keys() - self._names
        if new and len(self._names) + len(new) > MOST_NAMES:
            raise ConfigError(
                f"report() was given {len(self._names) + len(new)} different names so far, the last ones "
                f"{', '.join(sorted(new)[:3])}; tell at most {MOST_NAMES}"
            )
        self._names |= new

    def count(self, pipe: Pipe, told: dict[str, Any]) -> dict[str, float]:
        """Return the number of steps since the last call, and how long they took, where no engine tells
        it.
        """
        if pipe.has_engine or "step" not in told or {"steps", "step_s"} & told.keys():
            return {}
        now, before = time.monotonic(), self._last
        self._last = told["step"], now
        if before is None or told["step"] <= before[0]:
            return {}
        return {"steps": told["step"] - before[0], "step_s": now - before[1]}


@cache
def _process_steps() -> _Steps:
    return _Steps()


@cache
def _step_marker() -> Callable[[int], None] | None:
    """Return the call that tells a trace of a step; None where no trace is asked for."""
    if read_trace() is None:
        return None
    from ..tracing.tracer import mark_step  # imported at need: few programs are traced

    return mark_step


def _number(name: str, value: Any) -> Any:
    """Return the value as a number that JSON has, or a tensor of a GPU.

    Errors: ConfigError
    """
    if not _is_name(name):
        raise ConfigError(
            f"report({name!r}=...): a name has 1 to {LONGEST_NAME} printable ASCII characters, no quotation "
            f"mark and no backslash, and is not {' or '.join(map(repr, _TAKEN))}; rename it"
        )
    if not isinstance(value, Real) and hasattr(value, "item"):
        shape = tuple(getattr(value, "shape", ()))
        if shape != ():
            raise ConfigError(
                f"report({name}=...): was given {type(value).__name__} of shape {list(shape)}; give one "
                "number, such as its mean()"
            )
        if getattr(value, "is_cuda", False):
            return value.detach().clone()  # the program may change it
        try:
            value = value.item()
        except RuntimeError as error:  # such as a tensor without storage
            raise ConfigError(f"report({name}=...): {error}; give a number") from None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(
            f"report({name}={value!r}): is {type(value).__name__}; give a number, or a tensor with one"
        )
    try:
        number = (
            int(value) if isinstance(value, Integral) and abs(int(value)) <= _LARGEST_WHOLE else float(value)
        )
    except OverflowError:
        raise ConfigError(
            f"report({name}=...): the number is too large for a float; tell its logarithm"
        ) from None
    if name == "step" and not (isinstance(number, int) and number >= 0):
        raise ConfigError(f"report(step={value!r}): must be a whole number, 0 or more")
    if name in _AMOUNTS and not 0 <= number < inf:
        raise ConfigError(f"report({name}={value!r}): must be a finite number, 0 or more")
    return number


def _is_name(name: str) -> bool:
    return (
        0 < len(name) <= LONGEST_NAME
        and name.isascii()
        and name.isprintable()
        and name not in _TAKEN
        and not any(one in name for one in _ESCAPED)
    )
