"""Rehearsals: one process for each kind of rank, with the environment and the command of such a rank."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...shared import variables
from ..errors import LaunchError
from ..job.master_address import LOOPBACK
from ..job.plan import Plan, environment_of
from ..job.verdict import signal_name
from ..node.workers.preparation import apply_environment
from ..node.workers.stack_dump import catches
from ..node.workers.worker_hook import SIGNAL
from ..wire.frames import bytes_of
from ..wording import cleaned, count, shown_time
from .answer import Answer, read_answer
from .model import with_ds_config, with_mapped
from .rank_kinds import RankKind
from .scratch_folder import scratch_folder

NUM_AT_ONCE = 2
TOLD_AFTER_S = 2.0
_POLL_S = 0.05
LINE_TIMEOUT_S = 3.0  # how long a process may take to tell its line
_MODULE = f"{__package__.partition('.')[0]}.runtime.plan"
_KEEPER = f"{__package__}.rehearsal_keeper"
KEEPER_TIMEOUT_S = 10.0  # how long the keeper of a rehearsal may take to end what is below it
_NUM_LAST_LINES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalOptions:
    """How the rehearsals run: on which device, for how long, and what is told meanwhile."""

    device: str  # "cuda" or "cpu"
    device_bytes: int
    model: Mapping[str, Any] | None  # planned in place of the program; see model.py
    limit_s: float
    is_verbose: bool  # the program's own output goes to stderr
    mapped: tuple[tuple[str, str], ...] = ()  # keys of the ds_config, and arguments that repeat them
    say: Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A job that is rehearsed as these kinds of rank, with what is changed of it. None: as the job has it."""

    plan: Plan
    kinds: tuple[RankKind, ...]
    name: str = ""  # what is changed, for messages
    config: Mapping[str, Any] | None = None  # the ds_config
    batch: str | None = None  # --batch of a model in place of the program
    is_checkpointed: bool | None = None  # whether such a model's blocks are


def rehearse(
    plan: Plan, kinds: Sequence[RankKind], stage: RehearsalOptions, *, known: Sequence[Answer] = ()
) -> tuple[Answer, ...]:
    """Return the answer of each kind of rank, in their order. `known`: those of the first kinds, which are
    rehearsed once more only if they wait for what others tell.

    Errors: LaunchError if a rehearsal takes too long, or ends without an answer
    """
    (answers,) = rehearse_variants((Variant(plan=plan, kinds=tuple(kinds)),), stage, known=known)
    return checked(answers)


def checked(answers: tuple[Answer, ...] | LaunchError) -> tuple[Answer, ...]:
    """Return the answers. Errors: the LaunchError that is in their place"""
    if isinstance(answers, LaunchError):
        raise answers
    return answers


def rehearse_variants(
    variants: Sequence[Variant], stage: RehearsalOptions, *, known: Sequence[Answer] = ()
) -> list[tuple[Answer, ...] | LaunchError]:
    """Return for each variant of the job the answers of its kinds of rank, or why there are none: also that
    all together take too long. `known`: as rehearse() takes them.
    """
    with scratch_folder("plan") as folder, contextlib.ExitStack() as running:
        rehearsals: list[list[_Rehearsal]] = []
        for number, variant in enumerate(variants):
            own = folder / str(number)
            own.mkdir()
            rehearsals.append([_Rehearsal(variant, kind, stage, own) for kind in variant.kinds])
            for one, answer in zip(rehearsals[-1], known, strict=False):
                one.found = answer
        lines = [line for of_variant in rehearsals for line in _lines(of_variant)]
        try:
            _run_all([line for line in lines if line.has_turn], stage, running)
        except LaunchError as error:
            return [_answers(of_variant, error) for of_variant in rehearsals]
        return [_answers(of_variant) for of_variant in rehearsals]


def _lines(rehearsals: Sequence[_Rehearsal]) -> list[_Line]:
    pipelines: dict[int, list[_Rehearsal]] = {}
    for one in rehearsals:
        pipelines.setdefault(one.pipeline, []).append(one)
    return [_Line(members) for members in pipelines.values()]


def _answers(
    rehearsals: Sequence[_Rehearsal], late: LaunchError | None = None
) -> tuple[Answer, ...] | LaunchError:
    try:
        return tuple(one.answer() for one in rehearsals)
    except LaunchError as error:
        return late or error


def _run_all(lines: Sequence[_Line], stage: RehearsalOptions, running: contextlib.ExitStack) -> None:
    began = time.monotonic()
    is_told = False
    waiting, active = list(lines), list[_Line]()
    while waiting or active:
        while waiting and len(active) < NUM_AT_ONCE:
            active.append(waiting.pop(0))
            running.callback(active[-1].end)
            active[-1].begin()
        if active[0].ends_within(_POLL_S):
            active.pop(0)
        active = [one for one in active if not one.ends_within(0)]
        past_s = time.monotonic() - began
        if not is_told and past_s > TOLD_AFTER_S and active:
            is_told = True
            number = count(sum(one.num_ranks for one in lines), "rehearsal")
            stage.say(f"{number} here, without values, {NUM_AT_ONCE} at a time; first {lines[0].name}")
        if active and past_s > stage.limit_s:
            line = active[0].line_now()
            raise LaunchError(
                f"the rehearsal of {active[0].name} has not reached the end of its second step in "
                f"{shown_time(stage.limit_s)}{f', and is at {line}' if line else ''}; give it more time with "
                "--time_limit, or less to load"
            )


class _Line:
    """Rehearsals of the ranks along one pipeline, one after the other: each is given what the others' stages
    have told. One that ends for want of something is begun anew when that has been told.
    """

    def __init__(self, rehearsals: Sequence[_Rehearsal]) -> None:
        self._all = tuple(rehearsals)
        self._told: dict[str, Any] = {}
        for one in self._all:
            self._told |= one.told
        self._next = self._with_turn()

    def _with_turn(self) -> _Rehearsal | None:
        """Return the first that was not rehearsed, then the first that can go on."""
        return next((one for one in self._all if one.is_new), None) or next(
            (one for one in self._all if one.can_go_on(self._told)), None
        )

    @property
    def has_turn(self) -> bool:
        """Tell whether there is one to rehearse."""
        return self._next is not None

    @property
    def num_ranks(self) -> int:
        """Return how many ranks are rehearsed."""
        return len(self._all)

    @property
    def name(self) -> str:
        """Return the name of the rank that is rehearsed now."""
        return (self._next or self._all[-1]).name

    def begin(self) -> None:
        """Start the next process."""
        if self._next is not None:
            self._next.begin(self._told)

    def ends_within(self, timeout_s: float) -> bool:
        """Wait so long for the end of the process, and start the next one; tell whether there is none."""
        if self._next is None or not self._next.ends_within(timeout_s):
            return self._next is None
        self._told |= self._next.told
        self._next = self._with_turn()
        self.begin()
        return self._next is None

    def line_now(self) -> str:
        """Return the line of the program at which the process is; empty if it does not tell."""
        return "" if self._next is None else self._next.line_now()

    def end(self) -> None:
        """Kill what is left of its processes."""
        for one in self._all:
            one.end()


class _Rehearsal:
    """One process, and the file of its answer."""

    def __init__(self, variant: Variant, kind: RankKind, stage: RehearsalOptions, folder: Path) -> None:
        self.name = f"rank {kind.rank.rank}" + (f" ({kind.place})" if kind.place else "")
        if variant.name:
            self.name += f" with {variant.name}"
        if stage.model is not None:
            changes = {
                "config": variant.config, "batch": variant.batch, "is_checkpointed": variant.is_checkpointed
            }  # fmt: skip
            given = {key: value for key, value in changes.items() if value is not None}
            stage = replace(stage, model={**stage.model, **given})
        elif variant.config is not None:
            path = folder / "ds_config.json"
            path.write_text(json.dumps(variant.config))
            arguments = with_ds_config(kind.rank.arguments, str(path))
            arguments = with_mapped(arguments, stage.mapped, variant.config)
            kind = replace(kind, rank=kind.rank._replace(arguments=arguments))
        self._kind, self.pipeline = kind, kind.pipeline
        self._plan, self._stage = variant.plan, stage
        self._folder = folder / f"rank{kind.rank.rank}"
        self._answer, self._output = self._folder / "answer.json", self._folder / "output.txt"
        self._stacks = self._folder / "stacks.txt"
        self._begun: list[subprocess.Popen[bytes]] = []  # one more when others have told what it waited for
        self._given: Mapping[str, Any] = {}  # what others had told when the last one was begun
        self.found: Answer | None = None

    @property
    def is_new(self) -> bool:
        """Tell whether it was not rehearsed yet."""
        return self.found is None and not self._begun

    def can_go_on(self, told: Mapping[str, Any]) -> bool:
        """Tell whether it has ended for want of something that was told since."""
        wanted = "" if self.found is None else self.found.waits_for
        return bool(wanted) and told.get(wanted) != self._given.get(wanted)

    @property
    def told(self) -> Mapping[str, Any]:
        """Return what its stages tell others."""
        return {} if self.found is None else self.found.told

    def begin(self, told: Mapping[str, Any]) -> None:
        """Start the process in a group of its own. `told`: what stages of other ranks have told."""
        self._folder.mkdir(exist_ok=True)
        self._given = dict(told)
        given = self._folder / "told.json"
        given.write_text(json.dumps(told))
        request = request_of(self._plan, self._kind, self._stage) | {
            "answer": str(self._answer),
            "stacks": str(self._stacks),
            "stacks_signal": SIGNAL,
            "told": str(given),
            "layers": str(self._folder / f"layers{len(self._begun)}"),
        }
        asked = self._folder / "request.json"  # all arguments of a program are more than one may be long
        asked.write_text(json.dumps(request))
        env = environment_of_rank(self._plan, self._kind)
        safe = ["-P"] if sys.version_info >= (3, 11) else []  # the folder of the job may have a torch.py
        with open(self._output, "wb") as output:
            python = [sys.executable, *safe, "-u", "-m"]
            process = subprocess.Popen(
                [*python, _KEEPER, str(os.getpid()), *python, _MODULE, str(asked)],
                cwd=bytes_of(self._plan.cwd),
                env={os.fsdecode(name): os.fsdecode(value) for name, value in env.items()},
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr if self._stage.is_verbose else output,
                stderr=None if self._stage.is_verbose else output,
                start_new_session=True,
            )
            self._begun.append(process)

    def ends_within(self, timeout_s: float) -> bool:
        """Wait so long for the end; tell whether it has come. What was found is there then."""
        try:
            self._begun[-1].wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self.found = None
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):  # it is empty until the end
            self.found = self._with_last_words(read_answer(json.loads(self._answer.read_text())))
        return True

    def line_now(self) -> str:
        """Return the line of the program at which the process is; empty if it does not tell."""
        pid = self._begun[-1].pid
        if not self._stacks.exists() or not catches(pid, SIGNAL):
            return ""
        os.kill(pid, SIGNAL)
        patience_ends = time.monotonic() + LINE_TIMEOUT_S
        text = ""
        while not text.endswith("\n") and time.monotonic() < patience_ends:
            time.sleep(_POLL_S)
            text = self._stacks.read_text(errors="replace")
        return program_line(text)

    def end(self) -> None:
        """Kill what is left of the process and its children."""
        for process in self._begun[-1:]:
            if process.poll() is not None:
                return
            process.terminate()  # the keeper kills them all
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KEEPER_TIMEOUT_S)
                return
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def answer(self) -> Answer:
        """Return what the rehearsal has found.

        Errors: LaunchError if it has written no answer
        """
        if self.found is not None:
            return self.found
        code = self._begun[-1].returncode if self._begun else None
        if code is not None and code < 0:
            raise LaunchError(
                f"the rehearsal of {self.name} was killed by {signal_name(-code)}"
                f"{self._last_words(_NUM_LAST_LINES)}; --verbose shows the program's output"
            )
        raise LaunchError(
            f"the rehearsal of {self.name} has ended with exit code {code} and without an answer"
            f"{self._last_words(_NUM_LAST_LINES)}; --verbose shows the program's output"
        )

    def _with_last_words(self, answer: Answer) -> Answer:
        """Return the answer with what a program has said that ends by itself, and with its command."""
        code = 0 if answer.problem is None else answer.problem.exit_code
        if answer.problem is None or not code:
            return answer
        words = shlex.join(self._kind.rank.arguments[len(self._plan.program.head) - 1 :])
        why = f"the program ends with exit code {code}{self._last_words(1)}; its command is: {words}"
        return replace(answer, problem=answer.problem._replace(why=why))

    def _last_words(self, num_lines: int) -> str:
        lines = self._output.read_bytes().decode("utf-8", "replace").strip().splitlines()
        return f": {cleaned(' | '.join(lines[-num_lines:]), 400)}" if lines else ""


def program_line(stack: str) -> str:
    """Return the innermost line that is neither torch's, nor ours, nor of Python's own modules, of a stack as
    faulthandler writes it; empty if there is none.
    """
    own, python = str(Path(__file__).parents[2]), sysconfig.get_path("stdlib")
    for file, line in re.findall(r'^  File "([^<"][^"]*)", line (\d+) in ', stack, re.MULTILINE):
        is_python = file.startswith(python) and "-packages" not in file
        if not (is_python or file.startswith(own) or "/torch/" in file):
            return f"{file}:{line}"
    return ""


def request_of(plan: Plan, kind: RankKind, stage: RehearsalOptions) -> dict[str, Any]:
    """Return what `python -m dslaunch.runtime.plan` is asked, without the files of the process."""
    program = plan.program
    words = kind.rank.arguments[len(program.head) - 1 :]
    return {
        "program": list(words),
        "is_module": program.script is None,
        "model": stage.model,
        "device": stage.device,
        "device_bytes": stage.device_bytes,
        "rank": kind.rank.rank,
        "world_size": plan.world_size,
    }


def environment_of_rank(
    plan: Plan, kind: RankKind, environ: Mapping[bytes, bytes] | None = None
) -> dict[bytes, bytes]:
    """Return the environment that such a rank gets, as far as this machine can know it."""
    env = dict(os.environb if environ is None else environ)
    apply_environment(env, [[one.name, *one.value] for one in environment_of(plan, kind.node.host)])
    env.setdefault(variables.THREADS.encode(), b"1")
    env[variables.DEVICES.encode()] = bytes_of(",".join(kind.node.devices))
    env[variables.MASTER_ADDR.encode()] = bytes_of(plan.master.address or LOOPBACK)
    env[variables.MASTER_PORT.encode()] = str(plan.master.port).encode()
    for name, value in kind.rank.env:
        env[bytes_of(name)] = bytes_of(value)
    return env
