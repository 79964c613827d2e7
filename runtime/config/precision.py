"""bf16: the data type of parameters and gradients."""

from __future__ import annotations

from .section import Section
from .value import Bool


class Bf16Config(Section):
    """bfloat16 parameters and gradients with a float32 master copy; off means float32 throughout."""

    enabled: Bool = False
