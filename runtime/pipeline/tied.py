"""Tied layers on several stages: one set of parameters, which the ranks of all these stages share."""

from __future__ import annotations

from torch import Tensor

from ..comm.agreement import fail_together
from ..mesh.domain import Domains
from ..zero.model.sharded_model import ShardedModel
from .module import StagesModule


def tie(module: StagesModule, domains: Domains, *, is_sharded: bool) -> None:
    """Let the tied parameters be shared over stages, as other parameters are over the data-parallel ranks.

    Order: every rank must call this: it may create process groups
    """
    for key, stages in tied_over_stages(module):
        params: tuple[Tensor, ...] = ()
        if key in module.tied_modules:
            tied = module.tied_modules[key]
            params = (*tied.parameters(), *tied.buffers())
        domains.tie(
            f"tied '{key}'",
            stages=stages,
            params=params,
            is_sharded=is_sharded,
        )


def check_tied(module: StagesModule, model: ShardedModel) -> None:
    """Check that the stages of each tied layer treat it alike; otherwise they would wait for each other for
    ever.

    Order:  a collective
    Errors: ConfigError, on all ranks
    """
    all_tied, problem = tied_over_stages(module), ""
    for key, stages in all_tied:
        if key not in module.tied_modules:
            continue
        own = {id(param) for param in module.tied_modules[key].parameters()}
        found = [
            (
                [(member.name, tuple(member.param.shape), member.group) for member in sub_buffer.members],
                str(sub_buffer.param_shard.values.flat.dtype),
                sub_buffer.is_trained,
                sub_buffer.is_sharded,
            )
            for unit in model.units
            for sub_buffer in unit.sub_buffers
            if own & {id(member.param) for member in sub_buffer.members}
        ]
        domain = model.domains.of(next(module.tied_modules[key].parameters()))
        everywhere = domain.comm.sharers.all_gather_objects(found, what=f"how '{key}' is tied")
        if any(one != found for one in everywhere):
            problem = (
                f"the stages {', '.join(map(str, stages))} treat the parameters of the tied layer '{key}' "
                "differently: shapes, dtypes, requires_grad and the optimizer's groups must be the same on "
                "all of them"
            )
    if all_tied:
        fail_together(problem)


def tied_over_stages(module: StagesModule) -> list[tuple[str, tuple[int, ...]]]:
    """Return the tied layers that several ranks of the pipeline have, in the same order on all ranks."""
    users = [(key, module.ranks_with(key)) for key in module.tied_keys]
    return [(key, stages) for key, stages in users if len(stages) > 1]
