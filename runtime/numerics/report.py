"""The text of a comparison."""

from __future__ import annotations

from collections.abc import Iterator

from ..environment import PLAIN
from .compare import Comparison, FoundDifference

_OTHER = {PLAIN: "in plain torch", "stage0": "at stage 0"}


def lines_of(result: Comparison, reference: str) -> Iterator[str]:
    """Yield the lines of a report; the last one is the verdict."""
    other = _OTHER[reference]
    bounds, facts = result.bounds, result.facts
    yield (
        f"bounds ({bounds.reason}): loss {bounds.loss:.1e}, gradient {bounds.gradient:.1e} of its largest "
        f"element, norm {bounds.norm:.1e}, parameter {bounds.parameter:.1e} of itself and "
        f"{bounds.update:.0e} of its largest change, state {bounds.state:.0e} of its largest element"
    )
    yield from _what_must_differ(result, other)
    if result.difference is None:
        rows = ", ".join(f"{name} {part:.2g}" for name, part in result.largest.items())
        yield f"largest difference, in parts of the bound: {rows}"
        yield (
            f"equal: {result.num_steps} step{'s' * (result.num_steps != 1)} of {result.num_parameters} "
            f"parameters at stage {facts['stage']}, as configured and {other}"
        )
        return
    yield from _told(result.difference, result, other)


def _what_must_differ(result: Comparison, other: str) -> Iterator[str]:
    notes, facts = result.notes, result.facts
    dropped = notes.get("dropped")
    if dropped:
        shown = ", ".join(f"{one:g}" for one in dropped)
        yield f"dropout: it is off in both runs (p was {shown}), since no two runs drop the same elements"
    if notes.get("are_drawn"):
        axes = facts["axes"]
        same = "they are the same in both runs"
        if axes["pp"] > 1 or axes["tp"] > 1:
            same += " as long as no divided layer draws them"
        yield f"random numbers: forwards draw some, from seeds of the forward's number; {same}"
    if (facts["computes_in"] or facts["dtype"]) != "float32":
        yield (
            f"16 bits: both runs compute in {facts['computes_in'] or facts['dtype']}, and the bounds are "
            "those of its rounding; parameters are compared as the float32 values that are updated"
        )
    differing = result.reference_facts.get("differing")
    if differing:
        yield (
            f"first weights: the run {other} has made others, '{differing[0]}' for example, and began with "
            "those of the other run; a program without a seed makes others each time, and so do layers, "
            "stages or experts that a rank makes alone"
        )
    if not result.reference_facts.get("is_torchs", True):
        yield f"optimizer: torch has no {facts['optimizer']}, so that both runs use dslaunch's formula of it"


def _told(found: FoundDifference, result: Comparison, other: str) -> Iterator[str]:
    engine = f", engine {found.engine + 1}" if result.num_engines > 1 else ""
    state, _, name = found.name.partition("/") if found.quantity == "state" else ("", "", found.name)
    of = f" {state} of '{name}'" if state else f" of '{name}'" if found.quantity == "gradient" else ""
    of = f" '{name}'" if found.quantity in ("parameter", "buffer", "frozen parameter") else of
    if found.configured is not None and found.reference is not None:
        yield f"{found.where}: {found.configured:.9g} as configured, {found.reference:.9g} {other}"
        yield f"they differ by {abs(found.configured - found.reference):.3g}, and may by {found.bound:.3g}"
    else:
        yield found.where
    if found.hint:
        yield found.hint
    yield f"differs: step {found.step}{engine}: {found.quantity}{of}"
