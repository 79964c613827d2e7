"""Questions and reports of a model to the engine that trains it."""

from __future__ import annotations

from collections.abc import Callable


class Trainer:
    """The trainer of a model without an engine: it asks for nothing, and every backward ends a step."""

    def ends_step(self) -> bool:
        """Return whether a backward that begins now is the last of a step."""
        return True

    def before_change(self) -> None:
        """Prepare for a change of shards, masters or states by anything but a step."""

    def before_gather(self) -> None:
        """Prepare for a gather of parameters for the program, not for the model.

        Order: a collective
        """

    def after_evaluation(self) -> None:
        """Note the end of a forward without gradients in which units were gathered.

        Order: a collective
        """

    def before_end(self) -> None:
        """Remove all hooks: another engine takes parameters of the model."""

    def on_taken(self) -> Callable[[], None] | None:
        """Return the call that ends the trainer when the other engine has been made."""
        return None
