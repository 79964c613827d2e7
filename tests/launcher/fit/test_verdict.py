"""The line that says whether a job fits, its exit code, and the notes below it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dslaunch.launcher.errors import LaunchError
from dslaunch.launcher.fit.verdict import JobMemory, check_rehearsed, hosts_used, judge
from dslaunch.launcher.job.partners import copies_on

from .answers import GIB, answer, memory, rehearsed

ROWS = [
    # what is rehearsed, memory, exit code, line
    (
        [rehearsed()],
        memory(),
        0,
        "fits: 13.0 of 22.5 GiB on rank 0 in step 1 (backward, in lm_head); 6.0 GiB of host memory on each "
        "host",
    ),
    (
        [rehearsed(answer(activations=40.1))],
        memory(),
        1,
        "does not fit: 45.1 of 22.5 GiB on rank 0 in step 1 (backward, in lm_head); the largest part is "
        "activations, 40.1 GiB",
    ),
    (
        [rehearsed(num_alike=2), rehearsed(answer(activations=9), rank=2, place="stage 1 of 2", num_alike=2)],
        memory(hosts=(503, 503)),
        0,
        "fits: 14.0 of 22.5 GiB on rank 2 (stage 1 of 2) in step 1 (backward, in lm_head); 6.0 of 503 GiB on "
        "each host",
    ),
    (
        [rehearsed(answer(pinned=300))],
        memory(hosts=(None, 503)),
        1,
        "does not fit: 606 of 503 GiB of host memory on node2 with its 2 ranks; the largest part is masters "
        "and optimizer states, 600 GiB",
    ),
    ([rehearsed()], memory(device=None, hosts=(8, 7)), 0, "fits: 6.0 of 7.0 GiB on node2"),
]


@pytest.mark.parametrize(("found", "there", "code", "line"), ROWS)
def test_the_verdict_is_one_line_and_an_exit_code(
    found: list[object], there: JobMemory, code: int, line: str
) -> None:
    verdict = judge(found, there)  # type: ignore[arg-type]
    assert (verdict.line, verdict.exit_code) == (line, code)


def test_an_assumption_that_decides_is_named_so() -> None:
    notes = judge([rehearsed(answer(activations=17))], memory()).notes
    assert "which take half a GiB to two, and with two it does not fit; free" in notes[0]
    notes = judge([rehearsed(answer(activations=18))], memory()).notes
    assert "which take half a GiB to two, and with half a GiB it fits; free" in notes[0]


def test_what_is_guessed_or_not_judged_is_said() -> None:
    found = answer(guesses=[{"line": "train.py:7", "what": "a number decides"}])
    notes = judge([rehearsed(found)], memory(hosts=(None, 503))).notes
    assert notes[2:] == (
        "not judged: host memory, which is not known of node1; give --host_memory",
        "guessed at train.py:7: a number decides",
    )


def test_a_program_that_ends_too_early_needs_more_samples() -> None:
    found = answer(problem={"line": "train.py", "why": "the program ends after 0 optimizer steps"})
    with pytest.raises(
        LaunchError, match=r"train.py: the program ends after 0 optimizer steps as rank 0, and two"
    ):
        check_rehearsed([rehearsed(found)])


def test_a_program_that_cannot_be_rehearsed_is_a_mistake_with_its_line() -> None:
    found = answer(problem={"line": "train.py:3", "why": "ValueError: no"})
    with pytest.raises(
        LaunchError, match=r"train.py:3: cannot be rehearsed as rank 0, .*: ValueError: no;"
    ) as caught:
        check_rehearsed([rehearsed(found)])
    assert caught.value.exit_code == 2


def test_snapshots_take_two_generations_of_a_host_and_of_those_whose_copies_it_has() -> None:
    """Each rank's part of a save is a GiB, and each host has two ranks."""
    one = [rehearsed(num_alike=6)]
    job = memory(device=None, hosts=(64, 64, 17))
    plain = hosts_used(one, job)
    found = hosts_used(one, replace(job, copies=copies_on(["a", "a", "b"])))
    assert [use.needed_bytes - before.needed_bytes for use, before in zip(found, plain, strict=True)] == [
        2 * 4 * GIB, 2 * 2 * GIB, 2 * 6 * GIB,
    ]  # fmt: skip
    assert dict(found[0].kinds)["snapshots"] == 8 * GIB
    assert judge(one, job).fits
    verdict = judge(one, replace(job, copies=copies_on(["a", "a", "b"])))
    line = verdict.line
    assert line.startswith("does not fit: ")
    assert any(note.startswith("counted: 12.0 GiB of host memory on node3 for") for note in verdict.notes)
    assert "on node3 with its 2 ranks; the largest part is snapshots, 12.0 GiB" in line
