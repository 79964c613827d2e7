"""The number of ranks along each axis of a job's parallelism, and the order of the axes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import click

from ...shared.axes import AXES, ORDER, SEPARATOR
from .option import option, record

_SIZE = re.compile(r"\s*([a-z]+)\s*=\s*([1-9][0-9]{0,6})\s*")
_NUMBER = re.compile(r"[0-9]{1,9}")
_ESTIMATE = (
    "model (a config.json of transformers, or its folder) and seq (tokens of a sample) are needed; "
    "micro_batch and micro_batches (default 1), stage (0 to 3, default 0) and bytes (of a number: 2, the "
    "default, or 4) may be there; write e.g. model=config.json,seq=4096,micro_batches=8,stage=1"
)
_ORDER = re.compile(r"\s*order\s*=\s*([a-z-]+)\s*")


class EstimateOptions(NamedTuple):
    """`model` is a config.json of transformers, or its folder; `bytes` is the size of one number that is
    sent.
    """

    model: str
    seq: int
    micro_batch: int = 1
    micro_batches: int = 1
    stage: int = 0
    bytes: int = 2


def _axes(value: str) -> tuple[tuple[tuple[str, int], ...], tuple[str, ...]]:
    """Return the size of each axis, and the order of the axes."""
    sizes: dict[str, int] = {}
    order: tuple[str, ...] = ()
    for item in value.split(","):
        found = _ORDER.fullmatch(item)
        if found is not None and not order:
            order = tuple(found[1].split(SEPARATOR))
            _check_order(order, value)
            continue
        match = _SIZE.fullmatch(item)
        if match is None or match[1] not in AXES or match[1] in sizes:
            raise ValueError(
                f"{value[:80]!r}: {item.strip()[:20]!r} is not allowed: sizes of pp (pipeline), dp (data), "
                "ep (experts), sp (sequence) and tp (tensor), each once, are whole numbers above 0; write "
                "e.g. pp=2,tp=2"
            )
        sizes[match[1]] = int(match[2])
    if not sizes:
        raise ValueError(f"{value[:80]!r}: an order without sizes; write e.g. pp=2,order=dp-pp")
    return tuple(sizes.items()), order


def _check_order(order: tuple[str, ...], value: str) -> None:
    """Errors: ValueError for an axis that cannot be in an order, or occurs twice"""
    wrong = next((name for name in order if name not in ORDER or order.count(name) > 1), None)
    if wrong is not None:
        why = "lies along dp and sp, and has no place of its own" if wrong == "ep" else "is not allowed"
        raise ValueError(
            f"{value[:80]!r}: {wrong[:20]!r} in its order {why}: the order has some of pp, dp, sp and tp, "
            "each once, the outermost first; write e.g. order=dp-pp-tp"
        )


def _estimate(value: str) -> EstimateOptions:
    given: dict[str, Any] = {}
    for item in value.split(","):
        name, _, text = (part.strip() for part in item.partition("="))
        is_number = _NUMBER.fullmatch(text) is not None and (int(text) > 0 or name == "stage")
        is_allowed = bool(text) if name == "model" else is_number
        if name not in EstimateOptions._fields or name in given or not is_allowed:
            raise ValueError(f"{value[:200]!r}: {item.strip()[:40]!r} is no size of an estimate: {_ESTIMATE}")
        given[name] = text if name == "model" else int(text)
    if (
        not {"model", "seq"} <= given.keys()
        or given.get("stage", 0) > 3
        or given.get("bytes", 2) not in (2, 4)
    ):
        raise ValueError(f"{value[:200]!r}: {_ESTIMATE}")
    return EstimateOptions(**given)


@record
class MeshOptions(NamedTuple):
    """`sizes` has the given axes and sizes; without sizes there is no mesh. `order` has the outermost axis
    first; empty: that of the runtime.
    """

    sizes: tuple[tuple[str, int], ...] = option(
        "--mesh",
        topic="start",
        default=(),
        read=_axes,
        metavar="AXES",
        help=(
            "How many ranks work together along each axis, e.g. pp=2,tp=2: pp (pipeline), dp (data), ep "
            "(experts), sp (sequence), tp (tensor). An axis that is left out has 1, and dp what remains. "
            "With order=dp-pp-tp the axes have another order than pp-dp-sp-tp; the first is the outermost."
        ),
    )
    order: tuple[str, ...] = ()
    estimate: EstimateOptions | None = option(
        "--mesh_estimate",
        topic="start",
        read=_estimate,
        metavar="SIZES",
        help=(
            "With --mesh and --dry_run: estimate what a rank sends along each axis, and holds, for a model "
            "of transformers: model=config.json,seq=4096, and micro_batch=, micro_batches=, stage=, bytes=."
        ),
    )

    def settled(self, given: Mapping[str, Any]) -> MeshOptions:
        """Settle the options. Errors: click.UsageError for an estimate that would not be printed"""
        sizes, order = given.get("mesh") or ((), ())
        if self.estimate is not None and not (sizes and given["dry_run"]):
            raise click.UsageError(
                "--mesh_estimate adds to the table that --mesh and --dry_run print; give both, or leave "
                "it out"
            )
        return self._replace(sizes=sizes, order=order)
