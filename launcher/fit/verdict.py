"""The verdict: the one line that says whether a job fits, and the exit code. Arithmetic only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..errors import LaunchError
from ..job.mesh import HostSlots
from ..wording import shown_size
from .answer import ALL_HOST, DEVICE, Answer, Rehearsed, RunPhase

EXIT_FITS, EXIT_TOO_LARGE = 0, 1
DEFAULT_LIMIT_S = 600.0  # all rehearsals together take no longer
GIB = 2**30
OUTSIDE = "outside of torch"
OUTSIDE_BYTES = GIB  # CUDA's context and NCCL's buffers, assumed
LEAST_OUTSIDE_BYTES, MOST_OUTSIDE_BYTES = GIB // 2, 2 * GIB
PROCESSES = "processes without their tensors"
SNAPSHOTS = "snapshots"
GENERATIONS = 2  # copies in time of each state that a host holds
MAX_NAMED = 4
_ENDS = "the program ends"  # the beginning of what runtime/plan/program.py says of too few steps


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMemory:
    """The memory that a job may use. None: not known, and not judged."""

    device_bytes: int | None  # what each GPU has; None on hosts without
    hosts: tuple[HostSlots, ...]
    host_bytes: tuple[int | None, ...]  # what each of these hosts has
    process_bytes: int  # what a rank has before its first tensor: the interpreter and torch
    # With snapshots: for each host the places of those whose copies it has; empty without
    copies: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUse:
    """Host memory of one host, when all its ranks are at their peaks."""

    name: str
    num_ranks: int
    needed_bytes: int
    total_bytes: int | None
    kinds: tuple[tuple[str, int], ...]

    @property
    def is_too_small(self) -> bool:
        """Tell whether the host is known to have less than is needed."""
        return self.total_bytes is not None and self.needed_bytes > self.total_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FitVerdict:
    """`notes` are lines below the verdict: what was assumed, guessed and not judged."""

    line: str
    fits: bool
    notes: tuple[str, ...]

    @property
    def exit_code(self) -> int:
        """Return 0 if the job fits."""
        return EXIT_FITS if self.fits else EXIT_TOO_LARGE


def check_rehearsed(rehearsed: Sequence[Rehearsed]) -> None:
    """Errors: LaunchError with the program's line, if a rehearsal has not come to the end of its steps"""
    stopped = [(one, problem) for one in rehearsed if (problem := one.answer.problem) is not None]
    if not stopped:
        return
    # a rank that waits for what another one tells is not the one with the problem
    one, (line, why, is_in_runs, exit_code) = min(stopped, key=lambda pair: bool(pair[0].answer.waits_for))
    place = line or "the program"
    if is_in_runs:
        raise LaunchError(f"{place}: a run ends here, too: {why}" if line else why)
    if exit_code:
        raise LaunchError(f"{place}: {why}")
    if why.startswith(_ENDS):
        raise LaunchError(
            f"{place}: {why} as {one.name}, and two are rehearsed; give it more "
            "samples, or a smaller gradient_accumulation_steps"
        )
    raise LaunchError(
        f"{place}: cannot be rehearsed as {one.name}, where no tensor has values: "
        f"{why}; plan its model with --model=FOLDER --batch=4x2048, or in Python with "
        "dslaunch.plan(make_model, make_batch, config, hosts=...)"
    )


def hosts_used(rehearsed: Sequence[Rehearsed], memory: JobMemory) -> tuple[HostUse, ...]:
    """Return each host's use, in the order of the job; each rank needs what its kind does."""
    of_rank = {rank: one.answer for one in rehearsed for rank in one.alike}
    uses: list[HostUse] = []
    snapshots = _snapshots(of_rank, memory)
    first = 0
    for place, (host, total) in enumerate(zip(memory.hosts, memory.host_bytes, strict=True)):
        kinds: Counter[str] = Counter({PROCESSES: host.num_ranks * memory.process_bytes})
        if snapshots:
            kinds[SNAPSHOTS] = snapshots[place]
        for rank in range(first, first + host.num_ranks):
            kinds.update(_host_kinds(of_rank[rank]))
        first += host.num_ranks
        uses.append(
            HostUse(
                name=host.name,
                num_ranks=host.num_ranks,
                needed_bytes=sum(kinds.values()),
                total_bytes=total,
                kinds=tuple(kinds.most_common()),
            )
        )
    return tuple(uses)


def _snapshots(of_rank: Mapping[int, Answer], memory: JobMemory) -> list[int]:
    """Return the bytes of snapshots on each host, those of its own ranks and copies; none without them."""
    if not memory.copies:
        return []
    own: list[int] = []
    first = 0
    for host in memory.hosts:
        ranks = range(first, first + host.num_ranks)
        own.append(sum(dict(of_rank[rank].file_bytes).get("checkpoint", 0) for rank in ranks))
        first += host.num_ranks
    return [
        GENERATIONS * (own[place] + sum(own[one] for one in others))
        for place, others in enumerate(memory.copies)
    ]


def _host_kinds(answer: Answer) -> dict[str, int]:
    worst = max(answer.stretches, key=lambda one: one.host_bytes, default=None)
    return {} if worst is None else dict(worst.peak(ALL_HOST).kinds)


def judge(rehearsed: Sequence[Rehearsed], memory: JobMemory) -> FitVerdict:
    """Return whether the job fits into the GPUs and, where their memory is known, into the hosts."""
    uses = hosts_used(rehearsed, memory)
    too_small = next((one for one in uses if one.is_too_small), None)
    on_device = None if memory.device_bytes is None else _Device.of(rehearsed, memory.device_bytes)
    notes = tuple(_notes(rehearsed, memory, uses, on_device))
    if on_device is not None and not on_device.fits:
        line = f"does not fit: {on_device.text(names_largest=True)}"
        return FitVerdict(line=line, fits=False, notes=notes)
    if too_small is not None:
        kind, num_bytes = too_small.kinds[0]
        line = (
            f"does not fit: {_of(too_small.needed_bytes, too_small.total_bytes)} of host memory on "
            f"{too_small.name} with {_ranks(too_small.num_ranks)}; the largest part is {kind}, "
            f"{gib(num_bytes)}"
        )
        return FitVerdict(line=line, fits=False, notes=notes)
    parts = [*([] if on_device is None else [on_device.text()]), *_host_parts(uses)]
    return FitVerdict(line=f"fits: {'; '.join(parts)}", fits=True, notes=notes)


def _host_parts(uses: Sequence[HostUse]) -> Iterator[str]:
    """Yield what is said of hosts that are large enough: of the one that is fullest."""
    fullest = max(uses, key=lambda one: one.needed_bytes / (one.total_bytes or float("inf")))
    if all(one.total_bytes is None for one in uses):
        fullest = max(uses, key=lambda one: one.needed_bytes)
    are_alike = len({(one.needed_bytes, one.total_bytes) for one in uses}) == 1
    where = "each host" if are_alike and len(uses) > 1 else fullest.name
    if fullest.total_bytes is None:
        yield f"{gib(fullest.needed_bytes)} of host memory on {where}"
    else:
        yield f"{_of(fullest.needed_bytes, fullest.total_bytes)} on {where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Device:
    """The highest moment of all ranks on their GPUs."""

    rehearsed: Rehearsed
    stretch: RunPhase
    total_bytes: int

    @classmethod
    def of(cls, rehearsed: Sequence[Rehearsed], total_bytes: int) -> _Device:
        """Return the moment of the rank that needs most."""
        found = [
            (max(one.answer.stretches, key=lambda stretch: stretch.peak(DEVICE).num_bytes), one)
            for one in rehearsed
        ]
        stretch, worst = max(found, key=lambda pair: pair[0].peak(DEVICE).num_bytes)
        return cls(rehearsed=worst, stretch=stretch, total_bytes=total_bytes)

    @property
    def tensors_bytes(self) -> int:
        return self.stretch.peak(DEVICE).num_bytes

    @property
    def needed_bytes(self) -> int:
        return self.tensors_bytes + OUTSIDE_BYTES

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.total_bytes

    def text(self, *, names_largest: bool = False) -> str:
        """Return need, place and moment, with the largest part if that is asked for."""
        peak = self.stretch.peak(DEVICE)
        said = (
            f"{_of(self.needed_bytes, self.total_bytes)} on {self.rehearsed.name} "
            f"{_moment(self.stretch.name, peak.module)}"
        )
        if not names_largest:
            return said
        kind, num_bytes = max([*peak.kinds, (OUTSIDE, OUTSIDE_BYTES)], key=lambda one: one[1])
        return f"{said}; the largest part is {kind}, {gib(num_bytes)}"

    def doubt(self) -> str:
        """Return whether the assumption about memory outside of torch decides; empty if it does not."""
        least, most = (self.tensors_bytes + one for one in (LEAST_OUTSIDE_BYTES, MOST_OUTSIDE_BYTES))
        if self.fits and most > self.total_bytes:
            return ", and with two it does not fit"
        return ", and with half a GiB it fits" if not self.fits and least <= self.total_bytes else ""


def _notes(
    rehearsed: Sequence[Rehearsed], memory: JobMemory, uses: Sequence[HostUse], on_device: _Device | None
) -> Iterator[str]:
    if on_device is not None:
        yield (
            f"assumed: {gib(OUTSIDE_BYTES)} of each GPU {OUTSIDE}, for CUDA's context and NCCL's buffers, "
            f"which take half a GiB to two{on_device.doubt()}; free pieces between tensors are not counted"
        )
    yield (
        f"assumed: {gib(memory.process_bytes)} of host memory for each rank's process before its first "
        "tensor; all ranks of a host have their peaks at the same time"
    )
    if memory.copies:
        fullest = max(uses, key=lambda one: dict(one.kinds)[SNAPSHOTS])
        yield (
            f"counted: {gib(dict(fullest.kinds)[SNAPSHOTS])} of host memory on {fullest.name} for snapshots, "
            "two generations of its own ranks and of the hosts whose copies it has; no host has more"
        )
    unknown = [one.name for one in uses if one.total_bytes is None]
    if unknown:
        more = f" and {len(unknown) - MAX_NAMED} more" if len(unknown) > MAX_NAMED else ""
        yield (
            f"not judged: host memory, which is not known of {', '.join(unknown[:MAX_NAMED])}{more}; give "
            "--host_memory"
        )
    why = next((one.answer.writes_files for one in rehearsed if one.answer.writes_files), "")
    if why:
        yield f"not held back: files that the program writes in its first steps are written, because {why}"
    guesses = {line: what for one in rehearsed for line, what in one.answer.guesses}
    for line, what in guesses.items():
        yield f"guessed at {line}: {what}"


def _moment(phase: str, module: str) -> str:
    """Return when a peak was: "in step 1 (backward, in lm_head)", "while building the model"."""
    step, colon, part = phase.partition(": ")
    inside = f"in {module}" if module else ""
    if not colon:
        return f"while {phase}" + (f" ({inside})" if inside else "")
    return f"in {step} ({', '.join(filter(None, (part, inside)))})"


def gib(num_bytes: int) -> str:
    """Write a size in GiB with three digits; a small one in smaller units."""
    return f"{_number(num_bytes)} GiB" if num_bytes >= GIB // 10 else shown_size(num_bytes)


def _of(needed_bytes: int, total_bytes: int | None) -> str:
    return f"{_number(needed_bytes)} of {_number(total_bytes or 0)} GiB"


def _number(num_bytes: int) -> str:
    value = num_bytes / GIB
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def _ranks(number: int) -> str:
    return "its rank" if number == 1 else f"its {number} ranks"
