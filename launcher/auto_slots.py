"""slots=auto: as many slots as a host has accelerators, found by a look at it before anything is planned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from .errors import EXIT_HOST, LaunchError
from .frames import Hello
from .host import MAX_SLOTS, Host

_HOSTS_LISTED = 5


def with_known_slots(
    hosts: tuple[Host, ...],
    *,
    in_question: tuple[Host, ...],
    look: Callable[[tuple[Host, ...]], tuple[Hello | str, ...]],
    num_cpu_workers: int,
) -> tuple[Host, ...]:
    """`hosts` with the number of accelerators in place of auto, or `num_cpu_workers` where there is none.

    Only hosts `in_question` are looked at, all in one call of `look`, which answers for each host in order.
    Errors: LaunchError with every host that could not be looked at, and why.
    """
    unknown = tuple(host for host in in_question if host.slots is None)
    if not unknown:
        return hosts
    answers = dict(zip((host.name for host in unknown), look(unknown), strict=True))
    silent = [f"{name}: {answer}" for name, answer in answers.items() if isinstance(answer, str)]
    if silent:
        more = f"; and {len(silent) - _HOSTS_LISTED} more" if len(silent) > _HOSTS_LISTED else ""
        raise LaunchError(
            f"slots=auto needs a look at each host: {'; '.join(silent[:_HOSTS_LISTED])}{more}; "
            "repair that, or write slots=N in the hostfile",
            exit_code=EXIT_HOST,
        )
    return tuple(_known(host, answers.get(host.name), num_cpu_workers) for host in hosts)


def _known(host: Host, answer: Hello | str | None, num_cpu_workers: int) -> Host:
    if not isinstance(answer, Hello):
        return host
    return replace(host, slots=min(answer.num_devices or num_cpu_workers, MAX_SLOTS))
