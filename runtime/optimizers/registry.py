"""Table of the optimizers, one row for each; all code that lists optimizers or looks for one uses it.

A row has names only: torch and the kernels are loaded with a row's classes or formulas.
`import deepspeed` reads this table.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .formula import Formula


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerRow:
    """One optimizer: its file in this folder, which has `FORMULAS`, and its names elsewhere."""

    module: str
    names: tuple[str, ...]  # names of its formulas in checkpoints, messages and DeepSpeed's ds_config
    classes: tuple[str, ...] = ()  # our classes in its file
    # our class for a ds_config's type of this name; "": Config treats that type itself
    config_class: str = ""
    torch_classes: tuple[str, ...] = ()  # classes of torch.optim that its kernel steps in an engine
    # keys of torch's param_groups by which this optimizer is recognized when it has no states yet
    group_keys: tuple[str, ...] = ()
    # False: it needs whole parameters, so no kernel steps it on an engine's shards
    is_elementwise: bool = True
    is_deepspeeds: bool = True  # deepspeed.ops has these classes, in a package of the file's name

    def load(self, name: str) -> Any:
        """Return the object of that name in the optimizer's file."""
        return getattr(import_module(f".{self.module}", __package__), name)

    def formula(self, name: str = "") -> Formula:
        """Return the formula of that name; without a name the row's first formula."""
        formulas: tuple[Formula, ...] = self.load("FORMULAS")
        return next((one for one in formulas if one.name == name), formulas[0])

    @property
    def deepspeed_modules(self) -> dict[str, str]:
        """Return the modules of `deepspeed.ops.<module>`, with the class that each has."""
        kinds = (("DeepSpeedCPU", "cpu"), ("Fused", "fused"))
        return {
            f"{where}_{self.module}": one
            for one in self.classes
            for prefix, where in kinds
            if self.is_deepspeeds and one.startswith(prefix)
        }


OPTIMIZERS = (
    OptimizerRow(
        module="adam",
        names=("AdamW", "Adam"),
        classes=("DeepSpeedCPUAdam", "FusedAdam"),
        torch_classes=("AdamW", "Adam"),
        group_keys=("betas", "eps"),
    ),
    OptimizerRow(
        module="lamb",
        names=("Lamb",),
        classes=("FusedLamb",),
        config_class="FusedLamb",
        is_elementwise=False,
    ),
    OptimizerRow(
        module="lion",
        names=("Lion",),
        classes=("DeepSpeedCPULion", "FusedLion"),
        config_class="FusedLion",
        group_keys=("betas",),
    ),
    OptimizerRow(
        module="adagrad",
        names=("Adagrad",),
        classes=("DeepSpeedCPUAdagrad",),
        torch_classes=("Adagrad",),
        group_keys=("lr_decay",),
    ),
    OptimizerRow(
        module="sgd", names=("SGD",), torch_classes=("SGD",), group_keys=("momentum",), is_deepspeeds=False
    ),
)

ELEMENTWISE = tuple(row for row in OPTIMIZERS if row.is_elementwise)
FROM_CONFIG = {row.names[0]: row for row in OPTIMIZERS if row.config_class}  # the ds_config's type -> row
DEEPSPEEDS = tuple(row for row in OPTIMIZERS if row.is_deepspeeds)
DEEPSPEED_CONSTANTS = {
    f"{name.upper()}_OPTIMIZER": name.lower()
    for name in sorted(name for row in DEEPSPEEDS for name in row.names)
}


def row_of(kind: type) -> OptimizerRow | None:
    """Return the row of exactly this class, ours or torch's: a subclass may override anything."""
    for row in OPTIMIZERS:
        if kind.__name__ in row.classes and kind.__module__ == f"{__package__}.{row.module}":
            return row
        if kind.__name__ in row.torch_classes and kind.__module__.startswith("torch.optim."):
            return row
    return None


def config_types_with(param: str) -> tuple[str, ...]:
    """Return the ds_config's types for which a class of ours is made that takes this argument."""
    kinds = {name: row.load(row.config_class) for name, row in FROM_CONFIG.items()}
    return tuple(name for name, kind in kinds.items() if param in inspect.signature(kind).parameters)
