"""The batch triangle: train_batch_size = micro batch size * gradient accumulation steps * world size."""

from __future__ import annotations

from dataclasses import dataclass

from .keys.value import POSITIVE, show

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The three sizes, which agree."""

    train_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int


def _not_a_multiple(train: int, what: str, unit: int) -> ValueError:
    below, above = train // unit * unit, -(-train // unit) * unit
    fitting = f"{below} and {above} are" if below else f"{above} is"
    return ValueError(f"{TRAIN} {show(train)} is not a multiple of {what}; {fitting}")


def resolve_batch(train: int | None, micro: int | None, steps: int | None, *, world_size: int) -> BatchSizes:
    """Return the whole triangle from the sides that were given.

    Errors: ValueError with the whole line, if the sides do not agree, do not divide, or are too few.
    """
    if train is None and micro is None:
        given = "" if steps is None else f"; {STEPS} {steps} alone does not say how large a batch is"
        raise ValueError(f"{TRAIN} or {MICRO} must be given{given}")
    if train is None:
        if micro is None:
            raise AssertionError("unreachable: one of the two was given")
        steps = steps or 1
        return BatchSizes(
            train_batch_size=micro * steps * world_size,
            micro_batch_size=micro,
            gradient_accumulation_steps=steps,
        )
    if micro is None:
        unit = (steps or 1) * world_size
        if train % unit:
            what = (
                f"world_size {world_size}"
                if steps is None
                else f"{STEPS} {steps} * world_size {world_size} = {unit}"
            )
            raise _not_a_multiple(train, what, unit)
        return BatchSizes(
            train_batch_size=train, micro_batch_size=train // unit, gradient_accumulation_steps=steps or 1
        )
    unit = micro * world_size
    if steps is None:
        if train % unit:
            raise _not_a_multiple(train, f"{MICRO} {micro} * world_size {world_size} = {unit}", unit)
        steps = train // unit
    if train != unit * steps:
        raise ValueError(
            f"{TRAIN} {train} is not {MICRO} {micro} * {STEPS} {steps} * world_size {world_size} = "
            f"{unit * steps}; write {unit * steps}, or leave one of the three out"
        )
    return BatchSizes(train_batch_size=train, micro_batch_size=micro, gradient_accumulation_steps=steps)


def fill_batch(values: dict[str, object], *, world_size: int) -> str | None:
    """Put the sides that are missing into `values`; a line if that cannot be.

    A side of the wrong kind is left for the model to report, and the missing ones become 1.
    """
    given = [values.get(name) for name in (TRAIN, MICRO, STEPS)]
    line = None
    if all(side is None or POSITIVE.accepts(side) for side in given):
        train, micro, steps = (None if side is None else POSITIVE.read(side) for side in given)
        try:
            batch = resolve_batch(train, micro, steps, world_size=world_size)
        except ValueError as error:
            line = str(error)
        else:
            values[TRAIN] = batch.train_batch_size
            values[MICRO] = batch.micro_batch_size
            values[STEPS] = batch.gradient_accumulation_steps
    for name in (TRAIN, MICRO, STEPS):
        values.setdefault(name, 1)
    return line
