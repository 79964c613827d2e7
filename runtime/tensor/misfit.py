"""Names of layers whose parts by a plan do not fit together: torch's own error has only sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from torch import nn

from ..errors import ConfigError, UserError
from .lower import Division
from .styles import Column, GatheredColumn

_OF_SHAPES = re.compile(
    r"must match|cannot be multiplied|is invalid for input of size|[Ee]xpected size|normalized_shape|"
    r"not broadcastable|shape mismatch|to have size|split_with_sizes|exceeds dimension"
)
# A loss raises these texts for logits that are only a part, but also for wrong labels.
_OF_LABELS = re.compile(r"to match target batch_size|Target -?\d+ is out of bounds")
_LISTED = 6


@contextmanager
def naming_misfits(module: nn.Module, division: Division) -> Iterator[None]:
    """Context of a forward in which an error of shapes inside a divided module names the module's layers.

    Errors: ConfigError
    """
    try:
        yield
    except (RuntimeError, ValueError, IndexError) as error:
        text = "" if isinstance(error, UserError) else (str(error).splitlines() or [""])[0]
        misfit = _misfitting_module(module, division, text, error.__traceback__)
        if misfit is None:
            raise
        divided = {id(param) for param, _ in division.cuts}
        names: tuple[list[str], list[str]] = ([], [])
        for name, param in module.get_submodule(misfit).named_parameters():
            names[id(param) in divided].append(name)
        subject = f"'{misfit}'" if misfit else "the model"
        whole, parts = (_listed(one) for one in names)
        raise ConfigError(
            f"{subject} cannot compute with the parts of its parameters that tensor_parallel gives each rank "
            f"({text}): the plan divides {parts} and leaves {whole} whole. If the results of the "
            "two are combined, divide both, or join the parts with the rule gather_output, or leave both "
            "whole: name the layers in tensor_parallel.partition_config"
        ) from error


def _misfitting_module(
    module: nn.Module, division: Division, text: str, trace: TracebackType | None
) -> str | None:
    """Return the name of the module that an error with this text is about; None if the plan is
    not the cause.
    """
    is_of_shapes = _OF_SHAPES.search(text) is not None
    if not (is_of_shapes or _OF_LABELS.search(text)):
        return None
    divided = _divided_module(module, division, trace)
    if divided is None or (is_of_shapes and divided):
        return divided
    # Wrong labels fail in the model itself, too: the plan is the cause only where a layer gives a part there.
    return divided if any(map(_gives_part, module.get_submodule(divided).children())) else None


def _gives_part(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, Column) and not isinstance(forward, GatheredColumn)


def _divided_module(module: nn.Module, division: Division, trace: TracebackType | None) -> str | None:
    """Return the name of the innermost module in the traceback that has divided parameters; None if there is
    none.
    """
    names = {id(one): name for name, one in module.named_modules()}
    divided = {id(param) for param, _ in division.cuts}
    innermost: str | None = None
    while trace is not None:
        one = trace.tb_frame.f_locals.get("self")
        if isinstance(one, nn.Module) and any(id(param) in divided for param in one.parameters()):
            innermost = names.get(id(one), innermost)
        trace = trace.tb_next
    return innermost


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_LISTED]) or "nothing"
    return shown + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
