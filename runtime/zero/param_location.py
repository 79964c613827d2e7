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
_LOCATIONS: Any = WeakTensorKeyDictionary()


class ParamLocation(NamedTuple):
    """A parameter's place: it is the member `member_index` of `sub_buffer`."""

    model: ShardedModel
    unit: Unit
    sub_buffer: SubBuffer
    member_index: int

    @property
    def name(self) -> str:
        return self.sub_buffer.members[self.member_index].name


def note_locations(model: ShardedModel) -> None:
    """Note where all parameters of this model live; of a parameter in two models the last one counts."""
    reference = weakref.ref(model)
    for unit_index, unit in enumerate(model.units):
        for sub_buffer_index, sub_buffer in enumerate(unit.sub_buffers):
            for index, member in enumerate(sub_buffer.members):
                _LOCATIONS[member.param] = (reference, unit_index, sub_buffer_index, index)


def location_of(param: Tensor) -> ParamLocation | None:
    """Where it lives; None if no engine has it, or has it any more."""
    reference, unit_index, sub_buffer_index, index = _LOCATIONS.get(param, (lambda: None, 0, 0, 0))
    model = reference()
    if model is None or not model.units or model.parked_states.is_over:
        return None
    unit = model.units[unit_index]
    return ParamLocation(model, unit, unit.sub_buffers[sub_buffer_index], index)
