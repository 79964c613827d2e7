"""activation_checkpointing: what becomes of the inputs of checkpointed functions."""

from __future__ import annotations

from .keys.value import Bool, Count
from .section import Section


class ActivationConfig(Section):
    """Checkpointing in models that call `dslaunch.checkpointing.checkpoint()` or torch's; the first three
    fields have an effect.
    """

    cpu_checkpointing: Bool = False
    """inputs of checkpointed functions wait in host memory for the backward: of those that go through
    dslaunch.checkpointing.checkpoint(), and of torch.utils.checkpoint (reentrant or not, as
    gradient_checkpointing_enable() of transformers uses it) in a forward of the engine"""
    synchronize_checkpoint_boundary: Bool = False
    """wait for the GPU before and after a function that goes through dslaunch.checkpointing.checkpoint()"""
    profile: Bool = False
    """rank 0 prints what such functions took, and their recomputation, for each optimizer step"""
    partition_activations: Bool = False
    """has no effect, which a warning says: without model parallelism there is nothing to divide"""
    contiguous_memory_optimization: Bool = False
    """has no effect, which a warning says: inputs stay in the memory that they have"""
    number_checkpoints: Count = 0
    """has no effect, which a warning says: inputs stay in the memory that they have"""

    @property
    def asks_for_something(self) -> bool:
        """Whether anything is on."""
        return any(self.model_dump().values())

    @property
    def asks_for_inputs_alone(self) -> bool:
        """Whether nothing is on but what torch's checkpoint() does, too."""
        return not any(value for name, value in self.model_dump().items() if name != "cpu_checkpointing")
