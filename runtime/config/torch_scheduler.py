"""The schedulers of torch that a config can name."""

from __future__ import annotations

import inspect

from torch.optim import lr_scheduler

# Schedulers that need something a config cannot hold.
_NOT_FROM_A_CONFIG = {
    "ChainedScheduler": "other schedulers",
    "LambdaLR": "a function",
    "MultiplicativeLR": "a function",
    "ReduceLROnPlateau": "a metric at each step",
    "SequentialLR": "other schedulers",
}


def _classes() -> dict[str, type[lr_scheduler.LRScheduler]]:
    base = lr_scheduler.LRScheduler
    return {
        name: value
        for name, value in vars(lr_scheduler).items()
        if isinstance(value, type)
        and issubclass(value, base)
        and value is not base
        and not name.startswith("_")
    }


def torch_scheduler_names() -> tuple[str, ...]:
    """The types that a config can name."""
    return tuple(sorted(set(_classes()) - set(_NOT_FROM_A_CONFIG)))


def torch_scheduler(name: str) -> type[lr_scheduler.LRScheduler] | None:
    """The class of torch.optim.lr_scheduler called `name`, if there is one.

    Errors: ValueError if it needs something that a config cannot hold.
    """
    if name in _NOT_FROM_A_CONFIG:
        raise ValueError(
            f"needs {_NOT_FROM_A_CONFIG[name]}, which no config can hold; pass lr_scheduler to initialize()"
        )
    return _classes().get(name)


def torch_scheduler_params(scheduler: type[lr_scheduler.LRScheduler]) -> dict[str, bool]:
    """The keyword arguments of `scheduler` but the optimizer, and for each whether it must be given."""
    parameters = list(inspect.signature(scheduler).parameters.values())[1:]
    return {parameter.name: parameter.default is parameter.empty for parameter in parameters}
