from __future__ import annotations

import re

import pytest

from dslaunch.launcher.inputs.line_prefix import (
    DEFAULT_TEMPLATE,
    Origin,
    check_template,
    folded_prefix,
    prefix,
)

WORKER = Origin(host="w1", node_rank=2, rank=19, local_rank=3)
FIELDS = "the fields are {host} {rank} {local_rank} {node_rank} {stream}"


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (DEFAULT_TEMPLATE, b"w1:19 | "),
        ("[{host}:{rank}]", b"[w1:19] "),
        ("[{host}:{rank}]: ", b"[w1:19]: "),
        ("{rank}\t", b"19\t"),
        ("{node_rank}.{local_rank} {stream} >", b"2.3 stderr > "),
        ("{rank:04}", b"0019 "),
        ("{host:>5}|", b"   w1| "),
        ("{{{rank}}}", b"{19} "),
        ("no field", b"no field "),
        ("\x1b[1m{rank}\x1b[0m ", b"\x1b[1m19\x1b[0m "),
        ("caf\udcc3", b"caf\xc3 "),  # a byte that is not UTF-8, as Python gives it in argv
        (" ", b" "),
        ("", b""),
    ],
)
def test_a_template_is_filled_in_and_kept_apart_from_the_line(template: str, shown: bytes) -> None:
    check_template(template)
    assert prefix(template, WORKER, 2) == shown


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{hots}", f"there is no field {{hots}}; {FIELDS}"),
        ("{}", f"there is no field {{}}; {FIELDS}"),
        ("{0}", f"there is no field {{0}}; {FIELDS}"),
        ("{rank.real}", f"there is no field {{rank.real}}; {FIELDS}"),
        ("{host[0]}", f"there is no field {{host[0]}}; {FIELDS}"),
        ("{rank", "expected '}' before end of string; write {{ for a brace itself"),
        ("rank}", "single '}' encountered in format string; write {{ for a brace itself"),
        ("{rank!r}", "only a width such as {rank:3} may follow the name of a field"),
        ("{rank:{host}}", "only a width such as {rank:3} may follow the name of a field"),
        ("{rank:9999999999}", "only a width such as {rank:3} may follow the name of a field"),
        ("{rank:x<q}", "write {rank:03} for 3 digits"),
        ("{host:d}", "write {rank:03} for 3 digits"),
        ("{rank:999}", "a prefix of 999 characters; 200 are allowed"),
        ("a\nb", "'a\\nb' has more than one line; leave out the line end"),
        ("a\r", "'a\\r' has more than one line; leave out the line end"),
    ],
)
def test_a_template_that_cannot_be_filled_in_is_refused(template: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message) + "$"):
        check_template(template)


def workers(*places: tuple[str, int]) -> tuple[Origin, ...]:
    return tuple(Origin(host, 0, rank, 0) for host, rank in places)


@pytest.mark.parametrize(
    ("origins", "shown"),
    [
        (workers(("w0", 3)), b"w0:3 | "),
        (workers(("w0", 2), ("w0", 0), ("w0", 1)), b"w0:0-2 | "),
        (workers(*(("w0", rank) for rank in range(4)), *(("w1", rank) for rank in range(4, 8))),
         b"w0:0-3, w1:4-7 | "),
        (workers(("w1", 9), ("w0", 5), ("w0", 0)), b"w0:0,5, w1:9 | "),
        (workers(*((f"w{rank}", rank) for rank in range(4))), b"w0:0, w1:1, w2:2, w3:3 | "),
        (workers(*((f"w{rank}", rank) for rank in range(5))), b"ranks 0-4 | "),
        (workers(*((f"w{rank}", rank) for rank in (0, 1, 2, 3, 9))), b"ranks 0-3,9 | "),
    ],
)  # fmt: skip
def test_several_workers_are_named_by_ranges(origins: tuple[Origin, ...], shown: bytes) -> None:
    assert folded_prefix(origins) == shown
