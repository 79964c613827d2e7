"""Check that the engine still trains what plain torch would train: at every step, of the model and of the
optimizer's groups.

Flat buffers are laid out once, by the arguments of `initialize()`, but a program may change its model or its
optimizer later. Changes of requires_grad are followed, see zero/units/freezing.py. Other changes are
reported: as an error on all ranks if plain torch would train a parameter that the engine cannot, as a warning
if plain torch would not train it either but the program may expect it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import is_, itemgetter, methodcaller
from typing import Any
from zlib import crc32

from torch import Tensor, nn

from ..comm.rank_group import Job
from ..errors import ConfigError
from ..zero.model.sharded_model import ShardedModel
from ..zero.parameters.sub_buffer_plan import NO_GROUP
from ..zero.units.freezing import Freezing, requiring_grad
from ..zero.units.unused import Unused

_log = logging.getLogger("dslaunch")
_LISTED = 5
_VALUES = methodcaller("values")  # the tables of a ScriptModule are no dicts
_FREEZE = (
    "set requires_grad before initialize(), and call requires_grad_(False) until it is to be trained, which "
    "is followed; or call initialize() again"
)


class RollCall:
    """Roll call of one engine, made when its model lies in flat buffers."""

    def __init__(
        self,
        module: nn.Module,
        model: ShardedModel,
        groups: Sequence[Mapping[str, Any]],
        job: Job,
        *,
        ignores_unused: bool = True,
    ) -> None:
        """`ignores_unused` False: a parameter that got no gradient is an error, too."""
        self._module, self._model, self._groups, self._job = module, model, groups, job
        members = [
            member for unit in model.units for sub_buffer in unit.sub_buffers for member in sub_buffer.members
        ]
        trained = {id(member.param) for sub_buffer in model.trained for member in sub_buffer.members}
        self._trained = {id(member.param): member for member in members if id(member.param) in trained}
        self._frozen = [member for member in members if not member.param.requires_grad]
        self._known = {id(member.param) for member in members}
        self.freezing = Freezing(model.trained)
        self._unused = None if ignores_unused else Unused(model.trained)
        self._tables: list[dict[str, Any]] = []
        self._present: list[Any] = []
        # names of untrained parameters that require a gradient and were reported
        self._untrained: tuple[str, ...] = ()
        self._about_model = self._complaint = ""
        self._of_groups = self._in_groups()
        self._num_groups = len(groups)
        self._look_at_model()

    @property
    def note(self) -> float:
        """Return a checksum of the changes since the start, equal on ranks with equal changes; 0:
        no change.
        """
        changes = (*self.freezing.names, "", *self._untrained, "", self._complaint)
        return float(crc32("\n".join(changes).encode())) if any(changes) else 0.0

    def call(self) -> None:
        """Look for changes when a step begins."""
        self.freezing.look_if_new()
        if not _are_same(self._now_present(), self._present):
            self._look_at_model()
        self._complaint = self._about_model
        if not _are_same(self._in_groups(), self._of_groups) or len(self._groups) != self._num_groups:
            self._complaint = self._about_groups()
        if any(requiring_grad(member.param for member in self._frozen)):
            self._look_at_unfrozen()
        unused = [] if self._unused is None else self._unused.take()
        if unused and not self._complaint:
            self._complaint = (
                f"no backward of this step gave {_listed(unused)} a gradient, and "
                "zero_optimization.ignore_unused_parameters is false; call requires_grad_(False) on what is "
                "not trained, or leave the key out: such a gradient is zero then"
            )

    def close(self) -> None:
        """End the roll call with the engine."""
        if self._unused is not None:
            self._unused.close()

    def settle(self, notes: Sequence[float]) -> None:
        """Report the changes of any rank on all ranks; `notes` are the notes of all ranks.

        Order:  a collective, if any of them is not 0
        Errors: ConfigError, on all ranks, if there is a complaint, or ranks have changed different things
        """
        if not any(notes) or (len(set(notes)) == 1 and not self._complaint):
            return
        own = (self._complaint, self._holders((*self.freezing.names, *self._untrained)))
        everywhere = self._job.all_gather_objects(own, what="what has changed since initialize()")
        for complaint, _ in everywhere:
            if complaint:
                raise ConfigError(complaint)
        for rank, (_, changed) in enumerate(everywhere):
            others = {
                one for name, holders in changed.items() for one in holders if name not in everywhere[one][1]
            }
            if others:
                other = min(others)
                different = [
                    name
                    for name, holders in changed.items()
                    if other in holders and name not in everywhere[other][1]
                ]
                raise ConfigError(
                    f"rank {max(rank, other)} and rank {min(rank, other)} do not train the same: "
                    f"{_listed(sorted(different))} was frozen, or added, on one of them only; change "
                    "requires_grad and the model on all ranks that hold it, or parts of it"
                )

    def _holders(self, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
        """Return for each of these parameters the ranks that hold it, or parts or copies of it."""
        domains, params = self._model.domains, dict(self._module.named_parameters(remove_duplicate=False))
        holders: dict[str, tuple[int, ...]] = {}
        for name in names:
            domain = domains.of(params[name]) if name in params else domains.dense
            line = next(line for line in domain.sharers if self._job.index in line)
            holders[name] = tuple(
                sorted({one for rank in line for one in domains.axes.line_of(rank, ("tp",))})
            )
        return holders

    # ---- the model

    def _look_at_model(self) -> None:
        modules = list(self._module.modules())
        self._tables = [table for one in modules for table in (one._parameters, one._modules)]
        self._present = self._now_present()
        params = dict(self._module.named_parameters())
        flags = requiring_grad(params.values())
        here = {id(param) for param in params.values()}
        gone = [member.name for key, member in self._trained.items() if key not in here]
        untrained = [
            name
            for (name, param), flag in zip(params.items(), flags, strict=True)
            if flag and id(param) not in self._trained
        ]
        strange = [name for name in untrained if id(params[name]) not in self._known]
        self._about_model = ""
        if gone and strange:
            self._about_model = (
                f"the model no longer has {_listed(gone)}, and now has {_listed(strange)}, which "
                "initialize() has not seen, with requires_grad: the optimizer has the old ones; replace "
                "parameters before initialize(), or write new values into those that are there"
            )
        elif gone:
            self._warn(
                "the model no longer has %s: what is not in the model gets no gradient and is not trained",
                gone,
            )
        self._tell_untrained(untrained)

    def _look_at_unfrozen(self) -> None:
        flags = requiring_grad(member.param for member in self._frozen)
        unfrozen = [member for member, flag in zip(self._frozen, flags, strict=True) if flag]
        in_groups = [member.name for member in unfrozen if member.group != NO_GROUP]
        if in_groups:
            self._complaint = (
                f"the optimizer has {_listed(in_groups)}, with requires_grad now and without it at "
                f"initialize(), which has laid out gradients and states for what had it: {_FREEZE}"
            )
        self._tell_untrained([member.name for member in unfrozen if member.group == NO_GROUP])

    def _tell_untrained(self, names: Sequence[str]) -> None:
        new = [name for name in names if name not in self._untrained]
        if not new:
            return
        self._untrained = (*self._untrained, *new)
        self._warn(
            "no group of the optimizer has %s, though requires_grad is set: what no group has is not "
            "trained; give it to the optimizer before initialize(), or call requires_grad_(False) on it",
            new,
        )

    def _warn(self, text: str, names: Sequence[str]) -> None:
        if self._job.is_first:
            _log.warning(text, _listed(names))

    def _now_present(self) -> list[Any]:
        return list(chain.from_iterable(map(_VALUES, self._tables)))

    # ---- the optimizer's groups

    def _in_groups(self) -> list[Tensor]:
        return list(chain.from_iterable(map(itemgetter("params"), self._groups)))

    def _about_groups(self) -> str:
        before, now = {id(one) for one in self._of_groups}, {id(one) for one in self._in_groups()}
        changes = [
            f"{number} parameters were {verb}"
            for number, verb in ((len(now - before), "added"), (len(before - now), "taken out"))
            if number
        ]
        if len(self._groups) != self._num_groups:
            changes.append(f"the number of groups was {self._num_groups} and is {len(self._groups)}")
        return (
            "the optimizer's param_groups have changed since initialize(): "
            f"{' and '.join(changes) or 'parameters were moved'}; give initialize() all groups, and call "
            "requires_grad_(False) on what is not to be trained for a while"
        )


def _are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _listed(names: Iterable[str]) -> str:
    all_names = list(names)
    shown = ", ".join(f"'{name}'" for name in all_names[:_LISTED])
    shown = f"parameter{'s' if len(all_names) > 1 else ''} {shown}"
    return shown + (f" and {len(all_names) - _LISTED} more" if len(all_names) > _LISTED else "")
