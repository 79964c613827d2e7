"""One pass over the weights: an iterator of names and whole tensors."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint.export.output_plan import Spec
from ..errors import ConfigError
from ..mesh.domain import Domains
from ..zero.model.sharded_model import ShardedModel
from .held import HeldWeights, held_weights, names_of
from .naming import Naming, Renamed
from .out_plan import OutGroup, OutPlan, check_names, join_stages
from .whole import Gathered, WholeWeights

To = Literal["all", "first"]


class WeightsPass(Iterator[tuple[str, Tensor]]):
    """Yields name and tensor on every rank, or on rank 0.

    A tensor is contiguous, on the engine's device, and to be read before the next one; of parameters that are
    not sharded it is the parameter's own memory. A rank that ends early goes on with the collectives that are
    left, so that others do not wait for it.
    Order: a collective
    """

    def __init__(
        self,
        module: nn.Module,
        model: ShardedModel,
        domains: Domains,
        *,
        naming: Naming | None = None,
        left_out: Collection[str] = (),
        to: To = "all",
        by_itemsize: bool = False,
    ) -> None:
        """Plan the pass. `by_itemsize`: tensors come in the order of `plan_output`.

        Order:  a collective if ranks hold different layers
        Errors: ConfigError, on all ranks, for names that cannot be given
        """
        if to not in ("all", "first"):
            raise ConfigError(
                f"engine.weights(to={to!r}): write 'all', for every rank, or 'first', for rank 0"
            )
        model.parked_states.check_here("the weights of the whole model")
        model.before_gather()
        model.reshard_idle()
        naming = naming or Renamed()
        held = held_weights(module, model, domains, left_out=left_out, joins_dtypes=naming.joins_dtypes)
        plan = _plan(held, naming, domains)
        self.plan = plan.by_itemsize() if by_itemsize else plan
        by_sources = {names_of(group): group for group in held.groups}
        whole = WholeWeights(self.plan, by_sources, domains, device=model.device, to_all=to == "all")
        self._gathers = iter(whole)
        self._is_begun = False
        self._tensors = _tensors(self._gathers, naming, is_wanted=whole.is_wanted)

    def __next__(self) -> tuple[str, Tensor]:
        self._is_begun = True
        try:
            return next(self._tensors)
        except BaseException:  # the end, too
            self.close()
            raise

    def close(self) -> None:
        """Do the collectives that are left, if any was done.

        Order: a collective
        """
        self._tensors.close()
        if self._is_begun and dist.is_initialized():
            for _ in self._gathers:
                pass

    def __del__(self) -> None:
        if hasattr(self, "_tensors"):  # else the plan was refused
            self.close()


def _plan(held: HeldWeights, naming: Naming, domains: Domains) -> OutPlan:
    """Return the plan of all stages.

    Order:  a collective if ranks hold different layers
    Errors: ConfigError, on all ranks
    """
    own, problem = OutPlan(), ""
    try:
        own = OutPlan(
            groups=tuple(
                OutGroup(stages=(0,), held=names_of(group), conversions=found)
                for group, found in zip(held.groups, naming.conversions(held.groups), strict=True)
                if found
            ),
            aliases=held.aliases,
            no_tensors=held.no_tensors,
        )
        check_names(own)
    except ConfigError as error:
        if len(domains.stage_leaders) == 1:
            raise
        problem = str(error)
    if len(domains.stage_leaders) == 1:
        return own
    told = (own if domains.leads else None, problem)
    answers = domains.job.all_gather_objects(told, what="what the stages hold")
    for _, problem in answers:
        if problem:
            raise ConfigError(problem)
    plan = join_stages([own for own, _ in answers if own is not None])
    check_names(plan)
    return plan


def _tensors(
    gathers: Iterator[Gathered], naming: Naming, *, is_wanted: bool
) -> Generator[tuple[str, Tensor], None, None]:
    """Yield what is made of the gathered tensors.

    The last tensor of a group is a copy if it is a part of the group's memory: the program's loop still has
    it while the next group is gathered.
    """
    for conversion, sources, is_last in gathers:
        if not is_wanted:
            sources.clear()
            continue
        made = naming.convert(conversion, sources)
        sources.clear()
        if {name: Spec(tuple(one.shape), one.dtype) for name, one in made.items()} != conversion.outs:
            raise AssertionError(f"planned {conversion.outs}, made {', '.join(made)}")
        for name in tuple(conversion.outs):
            value = made.pop(name)
            if is_last and not made and value.untyped_storage().nbytes() > value.nbytes:
                value = value.clone()
            value = value.contiguous()
            yield name, value
            del value
