"""The same command lines, hostfiles and machines given to DeepSpeed's own launcher and to
ours: who takes part?

Both answers are equal, or the case has a trait in DEVIATIONS that explains the difference. Every trait is
looked for in what was given, not in what came out, so that a new difference is not explained away.
"""

from __future__ import annotations

import io
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from dslaunch.launcher.command_line import cli
from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.options import Options
from dslaunch.launcher.output.console import Console
from dslaunch.launcher.run import host_pool, make_plan, run_job

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]

DEEPSPEED = Path(sys.prefix) / "deepspeed"  # `make setup` puts the package there
ORACLE = Path(__file__).parents[1] / "deepspeed_oracle.py"
NUM_CASES = 6000

Answer = "list[tuple[str, list[str]]] | str"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One command on one machine. `lines` is the hostfile; None: there is none."""

    lines: tuple[str, ...] | None
    include: str = ""
    exclude: str = ""
    num_nodes: int | None = None
    num_gpus: int | None = None
    num_devices: int = 4
    visible: str | None = None
    is_missing: bool = False  # a hostfile is named and not there

    @property
    def selection(self) -> str:
        return self.include or self.exclude

    @property
    def code(self) -> list[str]:
        """The lines of the hostfile without blank ones and comment lines."""
        return [one.strip() for one in self.lines or () if one.strip() and not one.strip().startswith("#")]

    @property
    def slots(self) -> dict[str, int]:
        """Slots by host, as DeepSpeed reads them."""
        found = (re.match(r"(\S+)\s+slots=(\d+)", one) for one in self.code)
        return {one[1]: int(one[2]) for one in found if one}

    @property
    def items(self) -> list[tuple[str, str | None]]:
        """Host and slots of each item."""
        return [
            (name, slots if colon else None)
            for name, colon, slots in (one.partition(":") for one in self.selection.split("@"))
        ]

    @property
    def uses_visible(self) -> bool:
        return self.lines is None and not self.is_missing and bool(self.visible) and self.num_devices > 0

    def words(self, path: str) -> list[str]:
        """The command line, the hostfile being at `path`."""
        given = {
            "-H": path if self.lines is not None or self.is_missing else None,
            "--include": self.include or None,
            "--exclude": self.exclude or None,
            "--num_nodes": self.num_nodes,
            "--num_gpus": self.num_gpus,
        }
        options = [word for name, value in given.items() if value is not None for word in (name, str(value))]
        return [*options, "train.py"]


# Cases.

PLAIN_NAMES = ("w0", "w1", "w2", "10.0.0.7", "node-3.lan")
ODD_NAMES = (
    "W1",
    "n[1-2]",
    "[::1]",
    "::1",
    "ada@w4",
    "w,5",
    "w:6",
    "-w7",
    "w8:22",
    "w\u00f6",
    "10.0.0.300",
    "n{1..2}",
)
ODD_REST = ("", " slots=0", " slots=x", " slots = 2", " slots=2 max_slots=4", " slots=2x", " slots=2#x",
            " port=22 slots=2", " slots=2 port=22", " slots=5000", " slots=-1", " devices=0,2",
            " slots=2 devices=0,2", " slots=auto", ":2", " slots=2 slots=3",
            " slots=2 cwd=/x", " slots=02", " is bad slots=1")  # fmt: skip
IGNORED = ("", "   ", "# w0 slots=9", "  #x")
ODD_SLOTS = ("", "a", "9", "0-2", "2-0", " 1", "0,", "-1", "+1", "1_0", "0:1", "03", "0, 1")
ODD_ITEMS = (
    "jeff",
    "",
    "@",
    " w0",
    "w0 ",
    "W0",
    "[::1]:0",
    "[::1]",
    "::1",
    "n[1-2]",
    "n1",
    "localhost:0",
    "127.0.0.1:0",
)
VISIBLE = (
    "0",
    "1,0",
    "0,1",
    "3,1,2",
    "0,0",
    "9",
    "GPU-8932f937",
    "MIG-41b8,0",
    "-1",
    "NoDevFiles",
    "all",
    "",
    "0, 1",
    " ",
)


def make_case(chance: random.Random) -> Case:
    is_local = chance.random() < 0.2
    lines = None if is_local else make_lines(chance)
    kind = chance.choices(("none", "include", "exclude", "numbers", "both"), (10, 35, 35, 20, 1))[0]
    selection = make_selection(chance, lines)
    is_number = kind == "numbers" or chance.random() < 0.02
    return Case(
        lines=lines,
        include=selection if kind in ("include", "both") else "",
        exclude=selection if kind in ("exclude", "both") else "",
        num_nodes=chance.choice((None, -1, 0, 1, 1, 2, 2, 3, 7)) if is_number else None,
        num_gpus=chance.choice((None, -1, 0, 1, 1, 2, 4, 9)) if is_number else None,
        num_devices=chance.choice((4, 4, 4, 1, 0)),
        visible=chance.choice(VISIBLE) if chance.random() < (0.5 if is_local else 0.1) else None,
        is_missing=is_local and chance.random() < 0.1,
    )


def make_lines(chance: random.Random) -> tuple[str, ...]:
    """Mostly a good hostfile: some lines of it are odd, or name a host again."""
    names = chance.sample(PLAIN_NAMES, chance.choice((1, 2, 2, 3, 3, 4)))
    lines = [make_line(chance, name) for name in names]
    if chance.random() < 0.03:
        lines.append(make_line(chance, chance.choice(names)))
    if chance.random() < 0.15:
        lines.append(make_line(chance, chance.choice(ODD_NAMES)))
    if chance.random() < 0.15:
        lines.append(chance.choice(("w8", "w9")) + chance.choice(ODD_REST))
    lines += chance.sample(IGNORED, chance.choice((0, 0, 1, 2)))
    chance.shuffle(lines)
    return tuple(lines) if chance.random() > 0.01 else IGNORED


def make_line(chance: random.Random, name: str) -> str:
    space, indent, end = (
        chance.choice((" ", "\t", "   ")),
        chance.choice(("", "", "  ")),
        chance.choice(("", " ", " # x")),
    )
    return f"{indent}{name}{space}slots={chance.choice((1, 2, 4, 8))}{end}"


def make_selection(chance: random.Random, lines: tuple[str, ...] | None) -> str:
    there = Case(lines=lines).slots or {"localhost": 4}
    return "@".join(make_item(chance, there) for _ in range(chance.choice((1, 1, 1, 2, 2, 3))))


def make_item(chance: random.Random, there: dict[str, int]) -> str:
    if chance.random() < 0.06:
        return chance.choice(ODD_ITEMS)
    name = chance.choice([*there])
    if chance.random() < 0.3:
        return name
    if chance.random() < 0.1:
        return f"{name}:{chance.choice(ODD_SLOTS)}"
    last = there[name] - 1 if chance.random() < 0.95 else 9
    return (
        f"{name}:{','.join(str(chance.randint(0, max(0, last))) for _ in range(chance.choice((1, 2, 2, 3))))}"
    )


# Where the two differ on purpose.


WE_REFUSE, THEY_REFUSE, OTHERS = "we refuse", "they refuse", "others take part"


class Deviation(NamedTuple):
    """`has` says whether a case has the trait; `outcomes` are the differences that it explains."""

    name: str
    reason: str
    outcomes: tuple[str, ...]
    has: Callable[[Case], bool]


def _rest(line: str) -> str:
    """What follows the slots that DeepSpeed reads, without a comment."""
    match = re.match(r"\S+\s+slots=\d+(.*)", line)
    return re.sub(r"\s#.*", "", match[1]).strip() if match else ""


def _keys(line: str) -> set[str]:
    return set(re.findall(r"\s(\w+)=", re.sub(r"(^|\s)#.*", "", line)))


def _is_plain(name: str) -> bool:
    return re.fullmatch(r"\w[\w.-]*", name, re.ASCII) is not None and name != "10.0.0.300"


DEVIATIONS = (
    Deviation(
        "a hostfile that is not there",
        "DeepSpeed warns and trains on one machine; we refuse",
        (WE_REFUSE,),
        lambda case: case.is_missing,
    ),
    Deviation(
        "text after the slots",
        "DeepSpeed passes over it; we read keys there, refuse a slip of one, and pass over "
        "the rest with a warning",
        (WE_REFUSE,),
        lambda case: any(_rest(one) for one in case.code),
    ),
    Deviation(
        "keys that DeepSpeed does not have",
        "port, devices, slots=auto: we read them, in any order",
        (THEY_REFUSE, OTHERS),
        lambda case: any(_keys(one) - {"slots"} or "slots=auto" in one for one in case.code),
    ),
    Deviation(
        "slots=0, or more than 4096",
        "DeepSpeed takes any number, and keeps a host without ranks; we leave that host out",
        (WE_REFUSE, OTHERS),
        lambda case: any(
            not 1 <= int(one) <= 4096 for one in re.findall(r"slots=(\d+)", "\n".join(case.code))
        ),
    ),
    Deviation(
        "a name with brackets, a user, a colon or odd characters",
        "DeepSpeed takes any word; for us they are ranges, addresses and users, or a mistake",
        (WE_REFUSE, THEY_REFUSE, OTHERS),
        lambda case: any(not _is_plain(one.split()[0]) for one in case.code),
    ),
    Deviation(
        "names that differ only in case",
        "hosts' names have no case: DNS has none",
        (WE_REFUSE, THEY_REFUSE),
        lambda case: any(name != name.lower() for name in [*case.slots, *(name for name, _ in case.items)]),
    ),
    Deviation(
        "a host by itself and with slots",
        "DeepSpeed lets the slots win; all of the host and some of it is all of it, so "
        "--exclude may leave nothing",
        (OTHERS, WE_REFUSE),
        lambda case: any(
            (name, None) in case.items and any(one == name and slots for one, slots in case.items)
            for name, _ in case.items
        ),
    ),
    Deviation(
        "a range of slots",
        "DeepSpeed has none: 0-2 is 0,1,2",
        (THEY_REFUSE,),
        lambda case: any(re.search(r"\d\s*-\s*\d", slots or "") for _, slots in case.items),
    ),
    Deviation(
        "white space around a host",
        "DeepSpeed takes it for a part of the name",
        (THEY_REFUSE,),
        lambda case: any(name != name.strip() for name, _ in case.items),
    ),
    Deviation(
        "numbers as Python writes them",
        "DeepSpeed takes +1 and 1_0 for numbers",
        (WE_REFUSE,),
        lambda case: any(re.search(r"\+|_", slots or "") for _, slots in case.items),
    ),
    Deviation(
        "more nodes than hosts",
        "DeepSpeed takes what there is; we refuse",
        (WE_REFUSE,),
        lambda case: case.lines is not None and (case.num_nodes or 0) > len(case.slots),
    ),
    Deviation(
        "more GPUs than slots",
        "DeepSpeed starts workers that find no device; we refuse",
        (WE_REFUSE,),
        lambda case: (
            (case.num_gpus or 0)
            > min(
                [*case.slots.values()][: case.num_nodes if (case.num_nodes or 0) > 0 else None],
                default=case.num_devices,
            )
        ),
    ),
    Deviation(
        "a machine without GPUs",
        "DeepSpeed refuses; we start CPU workers",
        (THEY_REFUSE,),
        lambda case: case.lines is None and case.num_devices == 0,
    ),
    Deviation(
        "visible devices by name, twice, out of order, or hidden",
        "DeepSpeed sorts numbers, drops doubles and refuses names; we keep order and "
        "names, and refuse doubles",
        (WE_REFUSE, THEY_REFUSE, OTHERS),
        lambda case: case.uses_visible and not re.fullmatch(r"0|0, ?1", case.visible or ""),
    ),
    Deviation(
        "visible devices together with --num_nodes=1 or --num_gpus=0",
        "DeepSpeed makes an --include of the variable and then refuses it beside the number",
        (THEY_REFUSE,),
        lambda case: case.uses_visible and (case.num_nodes in (0, 1) or case.num_gpus == 0),
    ),
    Deviation(
        "visible devices beyond those there",
        "DeepSpeed refuses here; our agent does, on the host",
        (THEY_REFUSE,),
        lambda case: case.uses_visible and case.num_devices == 1 and "1" in (case.visible or ""),
    ),
)


# The comparison.


@pytest.fixture(scope="module")
def cases() -> list[Case]:
    chance = random.Random(20261120)  # the same cases in every run: a failure can be repeated
    return [make_case(chance) for _ in range(NUM_CASES)]


@pytest.fixture
def theirs(cases: list[Case], tmp_path: Path) -> list[Answer]:
    """DeepSpeed's answers, all from one process."""
    if not (DEEPSPEED / "deepspeed" / "launcher").is_dir():
        reason = f"no DeepSpeed in {DEEPSPEED}; `make setup` puts it there"
        if os.environ.get("DSLAUNCH_LAB") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    questions = []
    for number, case in enumerate(cases):
        path = tmp_path / f"hosts-{number}"
        if case.lines is not None:
            path.write_text("\n".join(case.lines))
        questions.append(
            {"words": case.words(str(path)), "num_devices": case.num_devices, "visible": case.visible}
        )
    ended = subprocess.run(
        [sys.executable, str(ORACLE), str(DEEPSPEED)],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return [
        one if isinstance(one, str) else [(name, [str(slot) for slot in slots]) for name, slots in one]
        for one in json.loads(ended.stdout)
    ]


def ours(case: Case, path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Our answer, from the same words to the plan."""
    monkeypatch.setattr(host_pool, "DEFAULT_HOSTFILE", path.parent / "nowhere")
    monkeypatch.setattr(host_pool, "count_accelerators", lambda: case.num_devices)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if case.visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", case.visible)
    taken: list[Options] = []
    monkeypatch.setattr(run_job, "run", lambda options: taken.append(options) or 0)
    with pytest.raises(SystemExit) as ended:
        cli.main(case.words(str(path)))
    assert ended.value.code == 0
    console = Console(log_level="critical", err=io.BytesIO())
    try:
        attempt = make_plan.choose_attempt(taken[0], console)
    except LaunchError as error:
        return f"LaunchError: {error}"
    return [(one.host.name, list(one.devices)) for one in attempt.hosts]


def test_who_takes_part_is_as_with_deepspeed_but_for_listed_deviations(
    cases: list[Case],
    theirs: list[Answer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    counts: Counter[str] = Counter()
    unexplained: list[str] = []
    for number, (case, their_answer) in enumerate(zip(cases, theirs, strict=True)):
        our_answer = ours(case, tmp_path / f"hosts-{number}", monkeypatch)
        if our_answer == their_answer:
            counts["equal"] += 1
        elif isinstance(our_answer, str) and isinstance(their_answer, str):
            counts["refused by both"] += 1
        else:
            outcome = WE_REFUSE if isinstance(our_answer, str) else OTHERS
            outcome = THEY_REFUSE if isinstance(their_answer, str) else outcome
            names = [one.name for one in DEVIATIONS if outcome in one.outcomes and one.has(case)]
            counts.update([names[0]] if names else ["unexplained"])
            if not names:
                unexplained.append(f"{case}\n  DeepSpeed: {their_answer}\n  dslaunch: {our_answer}")
    with capsys.disabled():
        print("\nagainst DeepSpeed:", ", ".join(f"{count} {name}" for name, count in counts.most_common()))
    assert not unexplained, "\n".join([f"{len(unexplained)} differences:", *unexplained[:10]])
    assert counts["equal"] > NUM_CASES / 3, "the cases have become too odd to say much"
    assert {one.name for one in DEVIATIONS} <= set(counts), "a deviation that no case shows; remove it"


# Prompts as arguments. Source: DeepSpeed 0.19.8 tests/unit/launcher/test_user_args.py.

READ_PROMPTS = """
import argparse, os
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int)
parser.add_argument("--prompt", nargs="+")
print(ascii(parser.parse_args().prompt))
"""
PROMPTS = [
    "I am 6' tall",
    'I am 72" tall',
    '"translate English to Romanian: "',
    'I\'m going to tell them "DeepSpeed is the best"',
]


@pytest.mark.parametrize("prompt", [[one] for one in PROMPTS] + [PROMPTS])
def test_prompts_arrive_as_they_were_typed(prompt: list[str], tmp_path: Path) -> None:
    (tmp_path / "prompts.py").write_text(READ_PROMPTS)
    assert launched(tmp_path, ["prompts.py", "--prompt", *prompt]) == f"localhost:0 | {prompt!a}\n"


def test_prompts_of_a_bash_script_arrive(tmp_path: Path) -> None:
    """xargs reads quotes itself."""
    (tmp_path / "prompts.py").write_text(READ_PROMPTS)
    script = """
        ARGS="--launcher=local --num_gpus=1 prompts.py --prompt 'I am 72\\" tall' \\"I am 6' tall\\""
        echo ${ARGS} | xargs "$0" -m dslaunch
    """
    printed = subprocess.run(
        ["bash", "-c", script, sys.executable], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert printed == f"localhost:0 | {PROMPTS[1::-1]!a}\n"


def launched(folder: Path, words: list[str]) -> str:
    """What a job of one worker on this machine prints."""
    command = [sys.executable, "-m", "dslaunch", "--launcher=local", "--num_gpus=1", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
