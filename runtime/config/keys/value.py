"""Kinds of values of a key, and how a value is shown in a message."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator

_SHOWN_CHARACTERS = 80
_LARGEST = 2**63 - 1  # largest whole number: counts of elements, steps or bytes must fit into a machine's


def show(value: object) -> str:
    """`value` as it stands in a config, on one line, shortened where it is long."""
    try:
        text = json.dumps(value, default=repr)
    except (
        TypeError,
        ValueError,
        RecursionError,
    ):  # a key that is no text, a number of 5,000 digits, a cycle
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def show_name(name: str) -> str:
    """A key as a message prints it: unchanged where that is one clean line."""
    return name if name.isprintable() else json.dumps(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueKind:
    """A set of values. `words` completes the sentence "<key> <value> is not ..."."""

    words: str
    accepts: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value

    def read(self, value: Any) -> Any:
        """Return `value` in the program's type.

        Errors: ValueError, whose text follows key and value in the message.
        """
        if not self.accepts(value):
            is_too_large = isinstance(value, int) and abs(value) > _LARGEST
            raise ValueError(f"is not {self.words}" + (" and below 2**63" if is_too_large else ""))
        return self.convert(value)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:  # a whole number that no float can hold
        return False


def _is_whole(value: object) -> bool:
    is_whole = (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and value.is_integer()
    )
    return is_whole and abs(value) <= _LARGEST  # type: ignore[arg-type]


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _is_lr(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_list_of(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and len(value) > 0 and all(map(accepts, value))


def _one_or_list(value: Any) -> float | tuple[float, ...]:
    return tuple(map(float, value)) if isinstance(value, (list, tuple)) else float(value)


_DTYPE_NAMES = {
    "fp32": "fp32",
    "fp16": "fp16",
    "bf16": "bf16",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
}

BOOL = ValueKind(words="true or false", accepts=lambda value: isinstance(value, bool))
TEXT = ValueKind(words="a text", accepts=lambda value: isinstance(value, str))
TEXTS = ValueKind(
    words="a list of texts",
    accepts=lambda value: value == [] or _is_list_of(TEXT.accepts)(value),
    convert=tuple,
)
AXES = ValueKind(
    words="a list of some of pp, dp, sp and tp, each once, the outermost first",
    accepts=lambda v: _is_list_of(lambda one: one in ("pp", "dp", "sp", "tp"))(v) and len(set(v)) == len(v),
    convert=tuple,
)
OBJECT = ValueKind(words="an object: { ... }", accepts=lambda value: isinstance(value, dict))
LIST = ValueKind(words="a list: [ ... ]", accepts=lambda value: isinstance(value, (list, tuple)))
ANY = ValueKind(words="anything", accepts=lambda value: True)
PLAIN = ValueKind(words="what a JSON file can hold", accepts=_is_plain)
INT = ValueKind(words="a whole number", accepts=_is_whole, convert=int)
COUNT = ValueKind(words="a whole number, 0 or above", accepts=lambda v: _is_whole(v) and v >= 0, convert=int)
POSITIVE = ValueKind(words="a whole number above 0", accepts=lambda v: _is_whole(v) and v > 0, convert=int)
START = ValueKind(
    words="a whole number, -1 or above", accepts=lambda v: _is_whole(v) and v >= -1, convert=int
)
INTERVAL = ValueKind(
    words="a whole number, 0 or above",
    accepts=lambda v: v == math.inf or COUNT.accepts(v),
    convert=lambda v: None if v in (0, math.inf) else int(v),  # both spellings of "never" are in use
)
NUMBER = ValueKind(words="a number", accepts=_is_number, convert=float)
SIZE = ValueKind(words="a number, 0 or above", accepts=_is_lr, convert=float)
RATIO = ValueKind(
    words="a number from 0 to 1", accepts=lambda v: _is_number(v) and 0 <= v <= 1, convert=float
)
# The loss is multiplied in float32, whose largest power of two is 2 ** 127.
SCALE_POWER = ValueKind(
    words="a whole number from 0 to 127", accepts=lambda v: _is_whole(v) and 0 <= v <= 127, convert=int
)
LOSS_SCALE = ValueKind(
    words="a number from 0 to 2 ** 127",
    accepts=lambda v: _is_number(v) and 0 <= v <= 2.0**127,
    convert=float,
)
BETA = ValueKind(
    words="a number from 0 to below 1", accepts=lambda v: _is_number(v) and 0 <= v < 1, convert=float
)
BETAS = ValueKind(
    words="a list of two numbers from 0 to below 1",
    accepts=lambda value: _is_list_of(BETA.accepts)(value) and len(value) == 2,
    convert=lambda value: (float(value[0]), float(value[1])),
)
LRS = ValueKind(
    words="a number, 0 or above, or a list with one for each parameter group",
    accepts=lambda value: _is_lr(value) or _is_list_of(_is_lr)(value),
    convert=_one_or_list,
)
MOMS = ValueKind(
    words="a number from 0 to below 1, or a list with one for each parameter group",
    accepts=lambda value: BETA.accepts(value) or _is_list_of(BETA.accepts)(value),
    convert=_one_or_list,
)


def choice(*names: str) -> ValueKind:
    """Kind of a value that is one of `names`, whatever its case; read as it is spelled here."""
    spelled = {name.lower(): name for name in names}
    *others, last = (f'"{name}"' for name in names)
    return ValueKind(
        words=f"{', '.join(others)} or {last}" if others else last,
        accepts=lambda value: isinstance(value, str) and value.lower() in spelled,
        convert=lambda value: spelled[value.lower()],
    )


DTYPE = ValueKind(
    words='"fp32", "fp16", "bf16", "float32", "float16" or "bfloat16"',
    accepts=lambda value: isinstance(value, str) and value.lower() in _DTYPE_NAMES,
    convert=lambda value: _DTYPE_NAMES[value.lower()],
)

STATE_DTYPE = ValueKind(
    words='"fp32", "bf16", "float32" or "bfloat16"',
    accepts=lambda value: DTYPE.accepts(value) and DTYPE.read(value) in ("fp32", "bf16"),
    convert=DTYPE.read,
)

EIGHT_BITS = "8bit"
OPTIMIZER_STATE_DTYPE = ValueKind(
    words=f'{STATE_DTYPE.words.replace(" or ", ", ")} or "{EIGHT_BITS}"',
    accepts=lambda value: value == EIGHT_BITS or STATE_DTYPE.accepts(value),
    convert=lambda value: EIGHT_BITS if value == EIGHT_BITS else DTYPE.read(value),
)

# The kinds as field types.
OptimizerStateDtype = Annotated[str, BeforeValidator(OPTIMIZER_STATE_DTYPE.read)]
StateDtype = Annotated[str, BeforeValidator(STATE_DTYPE.read)]
DtypeName = Annotated[str, BeforeValidator(DTYPE.read)]
Bool = Annotated[bool, BeforeValidator(BOOL.read)]
Count = Annotated[int, BeforeValidator(COUNT.read)]
Positive = Annotated[int, BeforeValidator(POSITIVE.read)]
Interval = Annotated[int | None, BeforeValidator(INTERVAL.read)]
Start = Annotated[int, BeforeValidator(START.read)]
Number = Annotated[float, BeforeValidator(NUMBER.read)]
Size = Annotated[float, BeforeValidator(SIZE.read)]
Ratio = Annotated[float, BeforeValidator(RATIO.read)]
ScalePower = Annotated[int, BeforeValidator(SCALE_POWER.read)]
LossScale = Annotated[float, BeforeValidator(LOSS_SCALE.read)]
Beta = Annotated[float, BeforeValidator(BETA.read)]
Betas = Annotated[tuple[float, float], BeforeValidator(BETAS.read)]
Text = Annotated[str, BeforeValidator(TEXT.read)]
Integer = Annotated[int, BeforeValidator(INT.read)]
AxesInOrder = Annotated[tuple[str, ...], BeforeValidator(AXES.read)]
Texts = Annotated[tuple[str, ...], BeforeValidator(TEXTS.read)]
Lrs = Annotated[float | tuple[float, ...], BeforeValidator(LRS.read)]
Moms = Annotated[float | tuple[float, ...], BeforeValidator(MOMS.read)]
