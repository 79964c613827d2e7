"""Faults of a ds_config that DeepSpeed passes, with or without a warning: programs written for it go on,
too.
"""

from __future__ import annotations

from typing import Any

from .keys.value import show
from .scheduler import PARAMS_OF, WARMUP_TYPES
from .strict import Sifted, leave_out_autos


def relax(values: dict[str, Any], sifted: Sifted, *, has_optimizer: bool) -> dict[str, Any]:
    """`values` without what DeepSpeed leaves aside; `has_optimizer`: the program brings one, which goes
    before the ds_config's.
    """
    values = leave_out_autos(values, sifted)
    if has_optimizer:
        values = _without(values, "optimizer", "max_grad_norm", sifted.unmet)
    scheduler = values.get("scheduler")
    # a type may be a list
    if not isinstance(scheduler, dict) or scheduler.get("type") not in list(PARAMS_OF):
        return values
    params = scheduler.get("params")
    kind = params.get("warmup_type") if isinstance(params, dict) else None
    if isinstance(kind, str) and kind.lower() not in WARMUP_TYPES:
        unknown: list[str] = []
        values = _without(values, "scheduler", "warmup_type", unknown)
        sifted.unknown |= {f"{path} {show(kind)}": "" for path in unknown}
    return values


def _without(values: dict[str, Any], section: str, name: str, left_out: list[str]) -> dict[str, Any]:
    inner = values.get(section)
    params = inner.get("params") if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or not isinstance(params, dict) or name not in params:
        return values
    left_out.append(f"{section}.params.{name}")
    rest = {key: value for key, value in params.items() if key != name}
    return {**values, section: {**inner, "params": rest}}
