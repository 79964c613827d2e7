"""Where a parameter lives: from the object that the user has in hand to its unit."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from .early_parameter import Early
    from .sharded_model import ShardedModel
    from .sub_buffer import SubBuffer
    from .unit import Unit

# Nothing in them keeps a parameter or a model alive.
_HOMES: Any = (
    WeakTensorKeyDictionary()
)  # parameter -> (weak reference to its model, place of unit, of part, of member)
_EARLY: Any = WeakTensorKeyDictionary()  # parameter that no model has yet -> what zero.Init keeps of it


class Home(NamedTuple):
    """A parameter's place: it is the member `place` of `part`."""

    model: ShardedModel
    unit: Unit
    part: SubBuffer
    place: int

    @property
    def name(self) -> str:
        return self.part.members[self.place].name


def move_in(model: ShardedModel) -> None:
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


def note_early(param: Tensor, early: Early) -> None:
    """Note what is kept of a parameter before it has a home."""
    _EARLY[param] = early


def early_of(param: Tensor) -> Early | None:
    """What is kept of it; None unless zero.Init has it, and no engine yet."""
    early: Early | None = _EARLY.get(param)
    return early


def forget_early(param: Tensor) -> None:
    """It is like any other from now on."""
    _EARLY.pop(param, None)
