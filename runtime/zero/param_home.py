"""Where a parameter lives: from the object that the user has in hand to its unit."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .sharded_model import ShardedModel
from .sub_buffer import SubBuffer
from .unit import Unit

# parameter -> (weak reference to its model, place of unit, of part, of member):
# it keeps no parameter and no model alive
_HOMES: Any = WeakTensorKeyDictionary()


class Home(NamedTuple):
    """A parameter's place: it is the member `place` of `part`."""

    model: ShardedModel
    unit: Unit
    part: SubBuffer
    place: int

    @property
    def name(self) -> str:
        return self.part.members[self.place].name


def note_homes(model: ShardedModel) -> None:
    """Note where all parameters of this model live; of a parameter in two models the last one counts."""
    reference = weakref.ref(model)
    for unit_place, unit in enumerate(model.units):
        for part_place, part in enumerate(unit.parts):
            for place, member in enumerate(part.members):
                _HOMES[member.param] = (reference, unit_place, part_place, place)


def home_of(param: Tensor) -> Home | None:
    """Where it lives; None if no engine has it."""
    reference, unit_place, part_place, place = _HOMES.get(param, (lambda: None, 0, 0, 0))
    model = reference()
    if model is None or not model.units:
        return None
    unit = model.units[unit_place]
    return Home(model, unit, unit.parts[part_place], place)
