"""activation_checkpointing: what becomes of the inputs of checkpointed functions."""

from __future__ import annotations

from .keys.value import Bool, Count
from .section import Section


class ActivationConfig(Section):
    """For models that call `dslaunch.checkpointing.checkpoint()`; the first three fields have an effect."""

    cpu_checkpointing: Bool = False
    synchronize_checkpoint_boundary: Bool = False
    profile: Bool = False
    partition_activations: Bool = False
    contiguous_memory_optimization: Bool = False
    number_checkpoints: Count = 0

    @property
    def asks_for_something(self) -> bool:
        """Whether anything is on."""
        return any(self.model_dump().values())
