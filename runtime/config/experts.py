"""expert_parallel: over how many ranks the experts of a Hugging Face model are divided."""

from __future__ import annotations

from .keys.value import Bool, Positive
from .section import Section


class ExpertParallelConfig(Section):
    """Divide experts over ranks."""

    enabled: Bool = False
    """divide the experts of a Hugging Face model over ranks"""
    autoep_size: Positive = 1
    """so many ranks hold all experts of a layer together; 1 if left out"""

    @property
    def size(self) -> int:
        """The ranks, 1 if nothing is divided."""
        return self.autoep_size if self.enabled else 1
