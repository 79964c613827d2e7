"""slots=auto: as many slots as a host has accelerators, found by asking the host before the plan is made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..errors import EXIT_HOST, LaunchError
from ..inputs.host import MAX_SLOTS, Host
from ..wire.frames import Hello

_HOSTS_LISTED = 5


def with_known_slots(
    hosts: tuple[Host, ...],
    *,
    in_question: tuple[Host, ...],
    look: Callable[[tuple[Host, ...]], tuple[Hello | str, ...]],
    num_cpu_workers: int,
    warn: Callable[[str], None] | None = None,
) -> tuple[Host, ...]:
    """Return `hosts` with the number of accelerators in place of auto, or `num_cpu_workers` on a host
    without accelerators.

    Only hosts `in_question` are looked at, all in one call of `look`, which answers for each host in order.
    With `warn`, a host that cannot be looked at stays in the plan, because the job can start without it: it
    is given as many slots as most other hosts have. Errors: LaunchError with every host that could not be
    looked at, and why; with `warn` only if no host could be.
    """
    unknown = tuple(host for host in in_question if host.slots is None)
    if not unknown:
        return hosts
    answers = dict(zip((host.name for host in unknown), look(unknown), strict=True))
    silent = {name: answer for name, answer in answers.items() if isinstance(answer, str)}
    if silent and (warn is None or len(silent) == len(answers)):
        raise _no_look(silent)
    known = {
        name: min(answer.num_devices or num_cpu_workers, MAX_SLOTS)
        for name, answer in answers.items()
        if isinstance(answer, Hello)
    }
    for name, why in silent.items():
        ((known[name], _),) = Counter(known.values()).most_common(1)
        if warn is not None:
            warn(
                f"slots=auto: {name}: {why}; it counts as a host with slots={known[name]} "
                "until it is tried again"
            )
    return tuple(host._replace(slots=known.get(host.name, host.slots)) for host in hosts)


def _no_look(silent: dict[str, str]) -> LaunchError:
    shown = [f"{name}: {why}" for name, why in silent.items()][:_HOSTS_LISTED]
    more = f"; and {len(silent) - _HOSTS_LISTED} more" if len(silent) > _HOSTS_LISTED else ""
    return LaunchError(
        f"slots=auto needs a look at each host: {'; '.join(shown)}{more}; "
        "repair that, or write slots=N in the hostfile",
        exit_code=EXIT_HOST,
    )
