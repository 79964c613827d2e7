"""The place of a parameter: from the object that the user has in hand to its unit."""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .model.sharded_model import ShardedModel
from .units.sub_buffer import SubBuffer
from .units.unit import Unit

# parameter -> (weak reference to its model, its place): it keeps no parameter and no model alive
_LOCATIONS: Any = WeakTensorKeyDictionary()
_NUMBERS = count()  # numbers models in the order in which engines take them over, the same on every rank
_NOWHERE = (lambda: None, (0, 0, 0, 0))


class ParamLocation(NamedTuple):
    """A parameter's place: it is the member `member_index` of `sub_buffer`."""

    model: ShardedModel
    unit: Unit
    sub_buffer: SubBuffer
    member_index: int
    place: tuple[int, int, int, int]  # numbers of model, unit, sub-buffer and member, the same on every rank

    @property
    def name(self) -> str:
        return self.sub_buffer.members[self.member_index].name


def note_locations(model: ShardedModel) -> None:
    """Note where all parameters of this model live; of a parameter in two models the last one counts."""
    reference, number = weakref.ref(model), next(_NUMBERS)
    for unit_index, unit in enumerate(model.units):
        for sub_buffer_index, sub_buffer in enumerate(unit.sub_buffers):
            for index, member in enumerate(sub_buffer.members):
                _LOCATIONS[member.param] = (reference, (number, unit_index, sub_buffer_index, index))


def location_of(param: Tensor) -> ParamLocation | None:
    """Return the parameter's place; None if no engine has it, or has it any more."""
    reference, place = _LOCATIONS.get(param, _NOWHERE)
    model = reference()
    if model is None or not model.units or model.parked_states.is_over:
        return None
    _, unit_index, sub_buffer_index, index = place
    unit = model.units[unit_index]
    return ParamLocation(model, unit, unit.sub_buffers[sub_buffer_index], index, place)
