"""What a model asks and tells of what trains it."""

from __future__ import annotations

from collections.abc import Callable


class Trainer:
    """Asks for nothing, and every backward ends a step: a model without an engine."""

    def ends_step(self) -> bool:
        """Return whether a backward that begins now is the last of a step."""
        return True

    def before_change(self) -> None:
        """Something but a step is about to change shards, masters or states."""

    def before_gather(self) -> None:
        """Parameters are about to be gathered for the program, not for the model.

        Order: a collective
        """

    def after_evaluation(self) -> None:
        """A forward without gradients, in which units were gathered, has come to its end.

        Order: a collective
        """

    def before_end(self) -> None:
        """Another engine takes parameters of the model: no hook may stay."""

    def on_taken(self) -> Callable[[], None] | None:
        """Return what that ends, when the other engine has been made."""
        return None
