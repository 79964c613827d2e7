"""One key of a ds_config, and its fate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from .value import ANY, BOOL, OBJECT, ValueKind, show


class Fate(Enum):
    """The fate of a key."""

    USED = "used"
    HINT = "accepted, without effect"  # needs nothing: one line of level INFO names all that were given
    UNMET = "accepted, but not done"  # training is the same, but what it asks for is missing: one WARNING
    REFUSED = "refused when on"  # an error unless its value switches it off
    DETAIL = "no meaning while off"  # belongs to something that is refused when on; only its type is checked


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key by its dotted path. `types` are the optimizer or scheduler types that have it, () for any."""

    path: str
    fate: Fate
    kind: ValueKind = ANY
    is_off: Callable[[Any], bool] = lambda value: (
        False
    )  # tells whether a value of that kind turns the key off; used where hinted or refused
    off: str = ""  # is_off in words
    note: str = ""  # refused: why, or what to write instead; else why it has no effect; "" where it is used
    types: tuple[str, ...] = ()


def _is_one_of(values: tuple[object, ...], kind: ValueKind) -> Callable[[Any], bool]:
    return lambda value: kind.convert(value) in values


def is_empty(value: Any) -> bool:
    """True if the value is empty."""
    return not value


def nothing_enabled(value: Any) -> bool:
    """True if there is no `"enabled": true` at any depth."""
    if isinstance(value, dict):
        return value.get("enabled") in (None, False) and all(map(nothing_enabled, value.values()))
    return all(map(nothing_enabled, value)) if isinstance(value, list) else True


def hint(
    path: str, kind: ValueKind, note: str, *, quiet: tuple[object, ...] = (), types: tuple[str, ...] = ()
) -> Key:
    """`quiet` are the values that ask for nothing, which no warning needs to name."""
    return Key(path=path, fate=Fate.HINT, kind=kind, note=note, is_off=_is_one_of(quiet, kind), types=types)


def unmet(path: str, kind: ValueKind, note: str, *, quiet: tuple[object, ...] = ()) -> Key:
    """Return a hinted key whose request is not met."""
    return replace(hint(path, kind, note, quiet=quiet), fate=Fate.UNMET)


def refused(
    path: str,
    kind: ValueKind = BOOL,
    *,
    off: tuple[object, ...] = (False,),
    note: str,
    types: tuple[str, ...] = (),
) -> Key:
    """`off` are the values that switch it off."""
    return Key(
        path=path,
        fate=Fate.REFUSED,
        kind=kind,
        is_off=_is_one_of(off, kind),
        off=" or ".join(map(show, off)),
        note=note,
        types=types,
    )


def opaque(path: str, is_off: Callable[[Any], bool], off: str, note: str) -> Key:
    """A whole section that is refused unless `is_off` says that it asks for nothing."""
    return Key(path=path, fate=Fate.REFUSED, kind=OBJECT, is_off=is_off, off=off, note=note)


def details(section: str, **kinds: ValueKind) -> Iterator[Key]:
    """Yield the other keys of a section whose switch is refused when on."""
    return (Key(path=f"{section}.{name}", fate=Fate.DETAIL, kind=kind) for name, kind in kinds.items())
