"""One section of a config: a frozen model whose aliases are DeepSpeed's spellings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from .keys.value import show, show_name


class Section(BaseModel):
    """A part of the configuration that was checked; it never changes and has no unknown fields.

    Each field is a key of a ds_config, or the section inside it; its docstring, as it stands, is what
    docs/train/config.md says of the key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


S = TypeVar("S", bound=Section)


def read_section(
    model: type[S], values: Mapping[str, Any], *, path: str, problems: dict[str, str]
) -> S | None:
    """`values` as a `model`; where it does not fit, None, and a line for each fault in `problems`.

    `path` is where the section stands in the config, "" for the top level;
    `problems` maps a dotted key to its line.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            key = ".".join(filter(None, (path, *(show_name(str(part)) for part in fault["loc"]))))
            if fault["type"] == "missing":
                problems.setdefault(key, f"{key} is missing")
            elif fault["type"] == "value_error" and fault["loc"]:
                problems.setdefault(key, f"{key} {show(fault['input'])} {fault['ctx']['error']}")
            elif fault["type"] == "value_error":  # a rule about several keys, which names them itself
                problems.setdefault(key, str(fault["ctx"]["error"]))
            else:
                raise AssertionError(f"{key}: {fault['type']} is not foreseen") from error
        return None
